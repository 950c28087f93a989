"""Everything that changes or watches a network while it trains."""

from .adaptive_experts import AdaptiveExperts
from .balance import LossFreeBalance
from .checkpoint import Checkpoint
from .compile_blocks import CompileBlocks
from .dashboard import Dashboard
from .default_vectors import DefaultVectors
from .event_files import EventFiles
from .guards import NumericalGuards
from .progress import ProgressBar
from .random_state import RandomState
from .routing_monitor import RoutingMonitor
from .routing_pictures import RoutingPictures
from .stopping import Stopped
from .tables import MetricsTable, PredictionTable

__all__ = [
    "AdaptiveExperts",
    "Checkpoint",
    "CompileBlocks",
    "Dashboard",
    "DefaultVectors",
    "EventFiles",
    "LossFreeBalance",
    "MetricsTable",
    "NumericalGuards",
    "PredictionTable",
    "ProgressBar",
    "RandomState",
    "RoutingMonitor",
    "RoutingPictures",
    "Stopped",
]
