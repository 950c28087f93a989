"""Default MoE's moving averages: arXiv 2504.12463."""

from __future__ import annotations

from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from app.moe import MoEBlock, OutputSums

from ..common import RankSums, find_blocks


class DefaultVectors(L.Callback):
    """Keeps every expert's default vector V_e, the moving average of its outputs.

    V_e <- beta V_e + (1 - beta) m_e, once per optimizer step, with m_e the weighted mean of E_e(x)
    over the tokens of the step that took e, on all ranks and in all micro-batches. The first
    observation sets V_e; an expert without a token keeps its V_e; evaluation moves nothing.

    Args:
        beta: decay of the average, 0.9 to 0.999.
        weighting: weigh each output by its router probability (`router`: the authors' later
            default, here divided by the sum of the weights and not by K, which would grow with
            the batch) or equally (`uniform`).
        update: `after` the forward pass, the authors' later default; or `before`: the forward
            pass of a batch already uses the average that includes it. What is kept is the same.
    """

    def __init__(
        self,
        beta: float = 0.99,
        weighting: Literal["router", "uniform"] = "router",
        update: Literal["after", "before"] = "after",
    ) -> None:
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"beta must lie in [0, 1), got {beta}")
        self.beta, self.weighting, self.update = beta, weighting, update
        self.blocks: dict[str, MoEBlock] = {}
        self._sums = RankSums()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.blocks = {
            name: block
            for name, block in find_blocks(self, pl_module).items()
            if block.default_vectors == "ema"
        }
        if not self.blocks:
            raise MisconfigurationException(
                "DefaultVectors: no MoE block has default_vectors: ema; set it, or remove the "
                "callback"
            )
        for block in self.blocks.values():
            block.defaults.follow(self.beta, self.weighting, before=self.update == "before")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._sums.to(pl_module.device)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, block in self.blocks.items():
            observed = block.defaults.observed
            self._sums.add(name, observed.sum_ED, observed.weight_E)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        # Here rather than at the batch's end: experts that are born or die then find it done.
        for name, sums in self._sums.take().items():
            block = self.blocks[name]
            block.defaults.update(block.default_ED, block.default_seen_E, OutputSums(*sums))

    def state_dict(self) -> dict[str, Any]:
        return self._sums.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums.load_state_dict(state)
