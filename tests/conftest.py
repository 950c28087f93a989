"""What holds for all tests: one thread, and an environment that each leaves as it found it."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; two spin for each other

import pytest


@pytest.fixture(autouse=True)
def _environment_kept() -> Iterator[None]:
    """Lightning sets LOCAL_RANK for good: a later run would wait for processes nobody starts."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys() - {"PYTEST_CURRENT_TEST"}:
        if name.startswith(("PL_", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_")):
            del os.environ[name]
