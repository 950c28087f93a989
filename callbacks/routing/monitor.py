"""Routing statistics and active FLOPs in TensorBoard."""

from __future__ import annotations

from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from app.moe import MoEBlock, moe_blocks
from app.moe.flops import FlopMeter

from .history import RoutingHistory
from .statistics import (
    Sums,
    batch_sums,
    block_state,
    expert_statistics,
    router_statistics,
    slot_state,
    statistics,
    to_host,
    utilisation,
    vector_statistics,
)

HEADLINES = (
    "active_experts",
    "experts_per_token",
    "unrouted_fraction",
    "router_entropy",
    "load_cv",
    "load_max",
)
"""What is logged of each layer, however many there are."""

MANY_LAYERS = 16
"""Of more layers than this, the other statistics are summarised over all of them."""


class RoutingMonitor(L.Callback):
    """Logs what the routing did and what it cost, over all processes.

    `routing/<layer>/<statistic>` in training and `val_routing/<layer>/<statistic>` of each
    validation; `compute/gflops_per_image` or `compute/gflops_per_token`, `val_compute/` in
    validation: forward GFLOPs of the whole network from what was really executed (see
    app/moe/flops.py), of a dense network as well. docs/monitoring.md lists every tag.

    Args:
        every_n_steps: interval of the training statistics, in optimizer steps; each covers all
            batches since the one before.
        detail: `brief`, or `detailed`: in addition every expert's load, mean gate and threshold,
            and histograms after each epoch (where epochs have no validation at their end, or
            several validations, after each of those). Of networks of more than 16 MoE layers,
            `brief` logs six headline statistics for each layer and for all statistics their mean,
            smallest and largest value over the layers.

    Attributes:
        history: each layer's loads of every training interval, from the run's first step.
        taking: shares of tokens that took 0, 1, 2 ... experts, by split ("" for the last training
            interval, "val_" for the last validation) and layer.
    """

    def __init__(
        self, every_n_steps: int = 50, detail: Literal["brief", "detailed"] = "brief"
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}")
        if detail not in ("brief", "detailed"):
            raise ValueError(f"detail must be brief or detailed, got {detail}")
        self.every_n_steps, self.detail = every_n_steps, detail
        self.blocks: dict[str, MoEBlock] = {}
        self.meter: FlopMeter | None = None
        self.history: dict[str, RoutingHistory] = {}
        self.taking: dict[str, dict[str, Tensor]] = {"": {}, "val_": {}}
        self._sums = {"": Sums(), "val_": Sums()}
        self._vectors: dict[str, Tensor] = {}  # default vectors when last logged, by layer
        self._experts: dict[str, dict[str, Tensor]] = {}  # of the last interval, by layer
        self._logged_step = self._drawn_step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.blocks = moe_blocks(pl_module)
        self.teardown(trainer, pl_module, stage)
        self.meter = FlopMeter(pl_module.network)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.meter is not None:
            self.meter.remove()
            self.meter = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._sums[""].move(pl_module.device)  # a checkpoint is read to the CPU

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
            self._log(trainer, "")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._sums["val_"] = Sums(pl_module.device)

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
            # Others find them there: metrics.csv, and callbacks that monitor a metric.
            logged = self._log(trainer, "val_")
            exact = {key: torch.tensor(v, dtype=torch.float64) for key, v in logged.items()}
            trainer.callback_metrics.update(exact)
            self._add_histograms(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._add_histograms(trainer)

    def _add(self, split: str) -> None:
        """Adds the last batch to the sums of training (`split` "") or validation ("val_")."""
        units, flops = self.meter.fixed()
        values = {
            f"{name}/{key}": value
            for name, block in self.blocks.items()
            for key, value in batch_sums(block).items()
        }
        self._sums[split].add(values, {"units": units, "flops": flops})

    def _log(self, trainer: L.Trainer, split: str) -> dict[str, float]:
        """Logs what has been summed up since it was last, and starts anew."""
        if not self._sums[split].counts:
            return {}
        sums = self._sums[split].read()
        self._sums[split] = Sums(self.meter.device)
        states = {
            f"{name}/{key}": value
            for name, block in self.blocks.items()
            for key, value in block_state(block).items()
        }
        units, flops = float(sums.pop("units")), float(sums.pop("flops"))
        sums_of, state_of = _by_layer(sums), _by_layer(to_host(states))
        layers, metrics = {}, {}
        for name, block in self.blocks.items():
            own, state = sums_of[name], state_of[name]
            flops += float(own["load_E"].sum()) * block.experts.flops_per_pair()
            layers[name] = statistics(own, state, block)
            self.taking[split][name] = own["taking_K"] / own["taking_K"].sum().clamp_min(1)
            if not split:
                layers[name] |= self._training_statistics(trainer, name, own, state)
            if self.detail == "detailed":
                values = expert_statistics(own, state)
                metrics |= {f"{split}experts/{name}/{key}": v for key, v in values.items()}
        metrics |= self._of_layers(split, layers)
        gflops = flops / max(units, 1.0) / 1e9
        metrics[f"{split}compute/gflops_per_{self.meter.unit}"] = gflops
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        return metrics

    def _of_layers(self, split: str, layers: dict[str, dict[str, float]]) -> dict[str, float]:
        many = self.detail == "brief" and len(layers) > MANY_LAYERS
        metrics = {
            f"{split}routing/{name}/{key}": value
            for name, values in layers.items()
            for key, value in values.items()
            if not many or key in HEADLINES
        }
        if len(layers) > MANY_LAYERS:
            for key in dict.fromkeys(key for values in layers.values() for key in values):
                over = [values[key] for values in layers.values() if key in values]
                metrics |= {
                    f"{split}all_layers/{key}_mean": sum(over) / len(over),
                    f"{split}all_layers/{key}_min": min(over),
                    f"{split}all_layers/{key}_max": max(over),
                }
        return metrics

    def _training_statistics(
        self, trainer: L.Trainer, name: str, sums: dict[str, Tensor], state: dict[str, Tensor]
    ) -> dict[str, float]:
        values = router_statistics(state)
        if "default_ED" in state:
            values |= vector_statistics(sums, state, self._vectors.get(name))
            self._vectors[name] = state["default_ED"]
        active_E = state["active_E"].bool()
        history = self.history.setdefault(name, RoutingHistory())
        history.add(trainer.global_step, sums["load_E"], active_E)
        self._experts[name] = {"load": utilisation(sums["load_E"], active_E)[active_E]}
        for key, value_E in slot_state(state).items():
            self._experts[name][key] = value_E[active_E]
        return values

    def _add_histograms(self, trainer: L.Trainer) -> None:
        """Of the last training interval, once for each step; nothing in the brief tier."""
        if self.detail == "brief" or self._drawn_step == trainer.global_step:
            return
        self._drawn_step = trainer.global_step
        for logger in trainer.loggers:
            add_histogram = getattr(logger.experiment, "add_histogram", None)
            for name, values in self._experts.items() if add_histogram else ():
                for key, value in values.items():
                    add_histogram(f"histograms/{name}/{key}", value, trainer.global_step)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sums": self._sums[""].state_dict(),
            "vectors": dict(self._vectors),
            "logged_step": self._logged_step,
            "history": {name: each.state_dict() for name, each in self.history.items()},
            "taking": {split: dict(layers) for split, layers in self.taking.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._logged_step = state["logged_step"]
        self._sums[""] = Sums.from_state_dict(state["sums"])
        self._vectors = dict(state["vectors"])
        self.history = {
            name: RoutingHistory.from_state_dict(each) for name, each in state["history"].items()
        }
        self.taking |= {split: dict(layers) for split, layers in state["taking"].items()}


def _by_layer(values: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Values named `<layer>/<name>`, by layer and name."""
    layers: dict[str, dict[str, Tensor]] = {}
    for key, value in values.items():
        layer, _, name = key.rpartition("/")
        layers.setdefault(layer, {})[name] = value
    return layers


def spread_layers(names: list[str], count: int) -> list[str]:
    """Up to `count` of the names, evenly spread, the first and the last among them."""
    if len(names) <= count:
        return names
    if count == 1:
        return names[-1:]
    return [names[round(i * (len(names) - 1) / (count - 1))] for i in range(count)]
