"""These tests use the tiny runs of the callbacks' tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "callbacks"))
