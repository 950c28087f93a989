"""Random generators across a resume."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info


class RandomState(L.Callback):
    """Keeps the state of Python's, NumPy's and torch's generators in the checkpoint.

    Dropout, stochastic depth, mixup and router noise draw from them; data order and augmentation
    do not. Every process has generators of its own, and gets them back if there are as many
    processes as before. Restored when training starts again, after everything that draws while
    setting up.
    """

    def __init__(self) -> None:
        self._restored: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        mine = _read_generators()
        ranks = [mine]
        if dist.is_available() and dist.is_initialized():
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, mine)
        return {"ranks": ranks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = state.get("ranks", [state])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        ranks, self._restored = self._restored, []
        if len(ranks) == trainer.world_size:
            _set_generators(ranks[trainer.global_rank])
        elif ranks:
            rank_zero_info(
                f"the checkpoint holds the random state of {len(ranks)} processes and there are "
                f"{trainer.world_size}: dropout, mixup and router noise are drawn anew from the "
                "seed; the order of the data stays"
            )


def _read_generators() -> dict[str, Any]:
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


def _set_generators(state: dict[str, Any]) -> None:
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
