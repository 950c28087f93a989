"""Loss-free load balancing: arXiv 2408.15664."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from app.moe import MoEBlock

from ..common import RankSums, find_blocks


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
        self._load = RankSums()

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
        self._load.to(pl_module.device)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, block in self.blocks.items():
            self._load.add(name, block.routing.load_E())

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        for name, (load_E,) in self._load.take().items():
            active_E = self.blocks[name].active_E
            mean = load_E.sum() / active_E.sum()  # inactive slots have no load
            step_E = torch.sign(mean - load_E) * active_E
            self.blocks[name].router.balance_bias_E.add_(step_E, alpha=self.rate)

    def state_dict(self) -> dict[str, Any]:
        return self._load.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load.load_state_dict(state)
