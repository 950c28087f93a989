"""Routing statistics and active FLOPs in TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from app.flops import FlopMeter
from app.moe import MoEBlock, moe_blocks

from .balance import LossFreeBalance
from .common import for_checkpoint, from_checkpoint, sum_over_ranks, widest_float
from .routing_statistics import batch_sums, bias_statistics, statistics, vector_statistics


class RoutingMonitor(L.Callback):
    """Logs what the routing did and what it cost, over all processes.

    `routing/<layer>/<statistic>` in training and `val_routing/<layer>/<statistic>` of each
    validation, as `routing_statistics` defines them; those of default vectors, and the biases of
    LossFreeBalance, in training only. `compute/gflops_per_image` or `compute/gflops_per_token`,
    `val_compute/` in validation: forward GFLOPs of the whole network from what was really executed
    (see app/flops.py), of a dense network as well.

    Args:
        every_n_steps: interval of the training statistics, in optimizer steps; each covers all
            batches since the one before.

    Attributes:
        validation: what the last validation logged, by tag.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.blocks: dict[str, MoEBlock] = {}
        self.meter: FlopMeter | None = None
        self.validation: dict[str, float] = {}
        self._biased = False
        self._sums: dict[str, Tensor] = {}  # by "<prefix>/<layer>/<sum>"
        self._vectors: dict[str, Tensor] = {}  # default vectors when last logged, by layer
        self._logged_step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.blocks = moe_blocks(pl_module)
        self._biased = any(isinstance(each, LossFreeBalance) for each in trainer.callbacks)
        self.teardown(trainer, pl_module, stage)
        self.meter = FlopMeter(pl_module.network)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.meter is not None:
            self.meter.remove()
            self.meter = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device = pl_module.device  # a checkpoint is read to the CPU
        self._sums = {k: v.to(device, widest_float(device)) for k, v in self._sums.items()}

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._add("")
        step = trainer.global_step
        if step != self._logged_step and step % self.every_n_steps == 0:
            self._logged_step = step
            self._log(trainer, "", self._training_statistics)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._sums = {k: v for k, v in self._sums.items() if not k.startswith("val_")}

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
            self._add("val_")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validation = self._log(
                trainer, "val_", lambda name, sums: statistics(sums, self.blocks[name])
            )

    def _add(self, split: str) -> None:
        """Adds the last batch to the sums of training (`split` "") or validation ("val_")."""
        units, flops = self.meter.fixed()
        device = self.meter.device
        new = {
            "compute/units": torch.full((), units, dtype=widest_float(device), device=device),
            "compute/flops": torch.full((), flops, dtype=widest_float(device), device=device),
        }
        for name, block in self.blocks.items():
            new |= {f"routing/{name}/{key}": value for key, value in batch_sums(block).items()}
        for key, value in new.items():
            old = self._sums.get(split + key)
            self._sums[split + key] = value if old is None else old + value

    def _log(
        self,
        trainer: L.Trainer,
        split: str,
        layer_statistics: Callable[[str, dict[str, Tensor]], dict[str, float]],
    ) -> dict[str, float]:
        compute = self._read(f"{split}compute/")
        if not compute:
            return {}
        flops, metrics = float(compute["flops"]), {}
        for name, block in self.blocks.items():
            sums = self._read(f"{split}routing/{name}/")
            flops += float(sums["pairs"]) * block.experts.flops_per_pair()
            values = layer_statistics(name, sums)
            metrics |= {f"{split}routing/{name}/{key}": value for key, value in values.items()}
        per_unit = flops / max(float(compute["units"]), 1.0)
        metrics[f"{split}compute/gflops_per_{self.meter.unit}"] = per_unit / 1e9
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        return metrics

    def _read(self, prefix: str) -> dict[str, Tensor]:
        """Takes the sums under a prefix out, added up over all processes, to the CPU."""
        keys = [key for key in self._sums if key.startswith(prefix)]
        sums = {key.removeprefix(prefix): self._sums.pop(key) for key in keys}
        sum_over_ranks(*sums.values())
        return {name: value.cpu() for name, value in sums.items()}

    def _training_statistics(self, name: str, sums: dict[str, Tensor]) -> dict[str, float]:
        block = self.blocks[name]
        values = statistics(sums, block)
        if block.default_vectors != "none":
            values |= vector_statistics(sums, block, self._vectors.get(name))
            self._vectors[name] = block.default_ED.detach().clone()
        if self._biased:
            values |= bias_statistics(block)
        return values

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": {key: for_checkpoint(value)[0] for key, value in self._sums.items()},
            "vectors": dict(self._vectors),
            "logged_step": self._logged_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._logged_step = state["logged_step"]
        self._sums = {key: from_checkpoint(value)[0] for key, value in state["sums"].items()}
        self._vectors = dict(state["vectors"])
