"""Networks with MoE blocks."""

from .decoder import Decoder
from .hub import HFCausalLM, TimmClassifier
from .vit import VisionTransformer
from .with_experts import with_experts

__all__ = ["Decoder", "HFCausalLM", "TimmClassifier", "VisionTransformer", "with_experts"]
