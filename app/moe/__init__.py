"""The shared Mixture-of-Experts block: plain PyTorch, no Lightning."""

from .block import MoEBlock, moe_blocks
from .default_vectors import OutputSums
from .experts import Experts, GeluExperts, SwiGLUExperts
from .losses import LOSSES
from .routers import Dense, Router, Ternary, TopAny, TopK, TopP
from .routing import Pairs, Routing

__all__ = [
    "LOSSES",
    "Dense",
    "Experts",
    "GeluExperts",
    "MoEBlock",
    "OutputSums",
    "Pairs",
    "Router",
    "Routing",
    "SwiGLUExperts",
    "Ternary",
    "TopAny",
    "TopK",
    "TopP",
    "moe_blocks",
]
