"""Everything that changes or watches a network while it trains."""

from .methods.adaptive_experts import AdaptiveExperts
from .methods.balance import LossFreeBalance
from .methods.default_vectors import DefaultVectors
from .routing.monitor import RoutingMonitor
from .routing.pictures import RoutingPictures
from .run.checkpoint import Checkpoint
from .run.compile_blocks import CompileBlocks
from .run.dashboard import Dashboard
from .run.event_files import EventFiles
from .run.guards import NumericalGuards
from .run.progress import ProgressBar
from .run.random_state import RandomState
from .run.stopping import Stopped
from .run.tables import MetricsTable, PredictionTable

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
