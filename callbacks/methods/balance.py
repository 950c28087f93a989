"""Loss-free load balancing: arXiv 2408.15664."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from app.moe import MoEBlock

from ..common import find_blocks, for_checkpoint, from_checkpoint, sum_over_ranks


class LossFreeBalance(L.Callback):
    """Moves a bias per expert, used for selection only, towards an even load.

    b_e <- b_e + rate * sign(mean load - load_e) over active experts, once per optimizer step, with
    the load of all ranks and micro-batches. Gates come from the unbiased probabilities.

    Args:
        rate: step of the bias (u in the paper, 0.001 there).
    """

    def __init__(self, rate: float = 0.001) -> None:
        if rate <= 0.0:
            raise ValueError(f"rate must be positive, got {rate}")
        self.rate = rate
        self.blocks: dict[str, MoEBlock] = {}
        self._load: dict[str, Tensor] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.blocks = find_blocks(self, pl_module)
        for name, block in self.blocks.items():
            reason = block.router.why_not_balanced
            if reason:
                raise MisconfigurationException(
                    f"LossFreeBalance can't be combined with the router "
                    f"{type(block.router).__name__} of {name}: {reason}"
                )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, load_E in self._load.items():  # a checkpoint is read to the CPU
            self._load[name] = load_E.to(pl_module.device)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, block in self.blocks.items():
            self._load[name] = self._load.get(name, 0.0) + block.routing.load_E()

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        for name, load_E in self._load.items():
            sum_over_ranks(load_E)
            active_E = self.blocks[name].active_E
            mean = load_E.sum() / active_E.sum()  # inactive slots have no load
            step_E = torch.sign(mean - load_E) * active_E
            self.blocks[name].router.balance_bias_E.add_(step_E, alpha=self.rate)
        self._load = {}

    def state_dict(self) -> dict[str, Any]:
        return {name: for_checkpoint(load_E)[0] for name, load_E in self._load.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load = {name: from_checkpoint(load_E)[0] for name, load_E in state.items()}
