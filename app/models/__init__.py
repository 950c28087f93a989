"""Networks whose feed-forward layers can be MoE blocks."""

from .decoder import Decoder
from .vit import VisionTransformer

__all__ = ["Decoder", "VisionTransformer"]
