"""Train Mixture-of-Experts models, and use what came out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch


def load_model(
    folder: str | Path,
    device: str | torch.device = "cpu",
    classes: Sequence[type[torch.nn.Module]] = (),
) -> torch.nn.Module:
    """The network that `python -m app export` wrote; see `app.models.exported.load_model`."""
    from .models.exported import load_model as load  # torch and timm take seconds to import

    return load(folder, device, classes)
