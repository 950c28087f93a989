"""One file a routing method."""

from .base import Router, SoftmaxRouter, SoftmaxRouting
from .dense import Dense
from .ternary import Ternary, TernaryRouting
from .topany import TopAny, TopAnyRouting
from .topk import TopK
from .topp import TopP

__all__ = [
    "Dense",
    "Router",
    "SoftmaxRouter",
    "SoftmaxRouting",
    "Ternary",
    "TernaryRouting",
    "TopAny",
    "TopAnyRouting",
    "TopK",
    "TopP",
]
