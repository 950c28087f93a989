"""Everything that changes or watches a network while it trains."""

from .adaptive_experts import AdaptiveExperts
from .balance import LossFreeBalance
from .checkpoint import Checkpoint
from .default_vectors import DefaultVectors
from .progress import ProgressBar
from .random_state import RandomState
from .routing_monitor import RoutingMonitor
from .tables import MetricsTable, PredictionTable

__all__ = [
    "AdaptiveExperts",
    "Checkpoint",
    "DefaultVectors",
    "LossFreeBalance",
    "MetricsTable",
    "PredictionTable",
    "ProgressBar",
    "RandomState",
    "RoutingMonitor",
]
