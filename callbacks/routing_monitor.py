"""Routing statistics in TensorBoard."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from app.moe import MoEBlock, Routing, moe_blocks

from .common import for_checkpoint, from_checkpoint, sum_over_ranks, widest_float


class RoutingStatistics:
    """Sums of what one layer's router did, kept on the device until they are read.

    Args:
        slots: number E of expert slots.
        device: where the routings live.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        # tokens, pairs, unrouted tokens, entropy; then the load of every slot
        self.totals = torch.zeros(4 + slots, dtype=widest_float(device), device=device)

    @torch.no_grad()
    def add(self, routing: Routing) -> None:
        """Counts one batch."""
        tokens = len(routing.mask_TE)
        load_E = routing.mask_TE.sum(0)
        self.totals[0] += tokens
        self.totals[1] += load_E.sum()
        self.totals[2] += routing.unrouted_T().sum()
        self.totals[3] += torch.special.entr(routing.distribution_TR().detach()).sum()
        self.totals[4:] += load_E

    def read(self, active_E: Tensor) -> dict[str, float]:
        """Statistics over all processes; {} before the first token.

        Returns:
            active_experts, experts_per_token, unrouted_fraction, router_entropy (nats, mean over
            tokens of the entropy of the router's distribution), load_cv (standard deviation over
            mean of the active experts' loads) and load_max (largest over mean).
        """
        sum_over_ranks(self.totals)
        totals, active_E = self.totals.cpu(), active_E.cpu()
        tokens, pairs, unrouted, entropy = totals[:4].tolist()
        if not tokens:
            return {}
        load = totals[4:][active_E]
        mean = load.mean().clamp_min(1e-12)
        return {
            "active_experts": float(active_E.sum()),
            "experts_per_token": pairs / tokens,
            "unrouted_fraction": unrouted / tokens,
            "router_entropy": entropy / tokens,
            "load_cv": float(load.std(correction=0) / mean),
            "load_max": float(load.max() / mean),
        }


class RoutingMonitor(L.Callback):
    """Logs `routing/<layer>/<statistic>` in training and `val_routing/<layer>/<statistic>`.

    Args:
        every_n_steps: interval of the training statistics, in optimizer steps; each covers all
            batches since the one before.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.blocks: dict[str, MoEBlock] = {}
        self._sums: dict[str, RoutingStatistics] = {}
        self._logged_step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.blocks = moe_blocks(pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device = pl_module.device
        for sums in self._sums.values():  # a checkpoint is read to the CPU
            sums.totals = sums.totals.to(device, widest_float(device))

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._add("routing")
        step = trainer.global_step
        if step != self._logged_step and step % self.every_n_steps == 0:
            self._logged_step = step
            self._log(trainer, "routing")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._drop("val_routing")

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.sanity_checking:
            self._add("val_routing")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._log(trainer, "val_routing")

    def _add(self, prefix: str) -> None:
        for name, block in self.blocks.items():
            if block.routing is not None:
                key = f"{prefix}/{name}"
                if key not in self._sums:
                    device = block.routing.mask_TE.device
                    self._sums[key] = RoutingStatistics(block.slots, device)
                self._sums[key].add(block.routing)

    def _log(self, trainer: L.Trainer, prefix: str) -> None:
        metrics = {}
        for name, block in self.blocks.items():
            sums = self._sums.pop(f"{prefix}/{name}", None)
            if sums is not None:
                values = sums.read(block.active_E)
                metrics |= {f"{prefix}/{name}/{key}": value for key, value in values.items()}
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step=trainer.global_step)

    def _drop(self, prefix: str) -> None:
        self._sums = {k: v for k, v in self._sums.items() if not k.startswith(f"{prefix}/")}

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": {key: for_checkpoint(sums.totals)[0] for key, sums in self._sums.items()},
            "logged_step": self._logged_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._logged_step = state["logged_step"]
        for key, totals in state["sums"].items():
            self._sums[key] = RoutingStatistics(len(totals) - 4, totals.device)
            self._sums[key].totals = from_checkpoint(totals)[0]
