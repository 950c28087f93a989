"""Random generators across a resume."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch


class RandomState(L.Callback):
    """Keeps the state of Python's, NumPy's and torch's generators in the checkpoint.

    Dropout, stochastic depth, mixup and router noise draw from them; data order and augmentation
    do not. Restored when training starts again, after everything that draws while setting up.
    """

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        name, keys, position, has_gauss, cached = np.random.get_state()
        version, internal, gauss = random.getstate()
        state = {
            "torch": torch.get_rng_state(),
            "numpy": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
            "python": [version, list(internal), gauss],
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        state, self._restored = self._restored, None
        if state is None:
            return
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(state["torch"].cpu())
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())
