"""The class path `app.sharding.FSDP2`, which configs of older runs name."""

from .tasks.sharding import FSDP2

__all__ = ["FSDP2"]
