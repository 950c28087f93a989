"""What TensorBoard shows of a run besides curves: config, settings, and how to chart layers."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
from torch.utils.tensorboard.summary import hparams as hparams_summaries

from app.moe import MoEBlock, moe_blocks

from ..routing.monitor import HEADLINES, MANY_LAYERS, spread_layers

FINAL_METRICS = ("val/accuracy", "val/loss", "val/perplexity")
"""What the HPARAMS tab compares runs by, where a task logs it: always the newest value."""

CHARTED_LAYERS = 8
"""Curves in one chart, where a network has more layers than can be told apart."""


class Dashboard(L.Callback):
    """Writes the resolved config as text, the layout of the custom scalars and the hparams.

    A run that goes on in its folder has config and layout there already; the config is written
    again if it has changed.

    Args:
        config: the resolved config, as YAML.
        settings: short names and values for the HPARAMS tab; those of the MoE blocks are added.
    """

    def __init__(self, config: str, settings: dict[str, Any] | None = None) -> None:
        self.config, self.settings = config, dict(settings or {})
        self._settings_written = False
        self._written: dict[str, str] = {}  # the config as last written, by folder

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._settings_written = False
        writer = _writer(trainer)
        if writer is not None:
            blocks = moe_blocks(pl_module)
            self.settings = block_settings(blocks) | self.settings
            folder = str(writer.log_dir)
            if self._written.get(folder) != self.config:
                writer.add_text("config", f"```yaml\n{self.config}```", trainer.global_step)
            if folder not in self._written:
                writer.add_custom_scalars(layout(blocks))
            self._written = {folder: self.config}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._write_settings(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write_settings(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"written": dict(self._written)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._written = dict(state["written"])

    def _write_settings(self, trainer: L.Trainer) -> None:
        """Once: the metrics have to be known by name, their values are read from the curves."""
        writer = _writer(trainer)
        if writer is None or self._settings_written:
            return
        self._settings_written = True
        metrics = dict.fromkeys((m for m in FINAL_METRICS if m in trainer.callback_metrics), 0.0)
        for summary in hparams_summaries(self.settings, metrics):
            writer.file_writer.add_summary(summary)


def _writer(trainer: L.Trainer) -> Any:
    """The SummaryWriter of the first logger that has one, on the process that logs."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if hasattr(logger.experiment, "add_custom_scalars"):
            return logger.experiment
    return None


def block_settings(blocks: dict[str, MoEBlock]) -> dict[str, Any]:
    """Router, k, experts and slots of the first MoE block, and how many blocks there are."""
    if not blocks:
        return {"router": "none (dense network)"}
    block = next(iter(blocks.values()))
    settings = {
        "router": type(block.router).__name__,
        "experts": len(block.active_slots()),
        "slots": block.slots,
        "moe_layers": len(blocks),
        "default_vectors": block.default_vectors,
    }
    for key in ("k", "p"):
        if hasattr(block.router, key):
            settings[key] = getattr(block.router, key)
    return settings


def layout(blocks: dict[str, MoEBlock]) -> dict[str, dict[str, list[Any]]]:
    """Charts of the custom-scalars page: one for each statistic, with the curves of all layers.

    Of many layers: a band from the smallest to the largest value around the mean of all layers, and
    the curves of some.
    """
    charts: dict[str, dict[str, list[Any]]] = {}
    if blocks:
        own = [key for block in blocks.values() for key in _own_statistics(block)]
        for split, title in (("", "Routing in training"), ("val_", "Routing in validation")):
            charts[title] = {
                title_of: chart
                for key in dict.fromkeys([*HEADLINES, "router_entropy_marginal", *own])
                if split == "" or not key.startswith(("default_", "bias_", "vector_"))
                for title_of, chart in _charts(split, key, list(blocks))
            }
    charts["Learning"] = {
        "loss": _multiline("train/loss", "val/loss"),
        "accuracy": _multiline("train/accuracy", "val/accuracy"),
        "auxiliary losses": ["Multiline", ["^train/aux/.*"]],
        "learning rate": ["Multiline", ["^lr.*"]],
    }
    charts["Cost"] = {"forward GFLOPs": ["Multiline", [r"^(val_)?compute/gflops_.*"]]}
    return charts


def _charts(split: str, key: str, layers: list[str]) -> list[tuple[str, list[Any]]]:
    title = key.replace("_", " ")
    if len(layers) <= MANY_LAYERS:
        return [(title, _multiline(*(f"{split}routing/{layer}/{key}" for layer in layers)))]
    band = [f"{split}all_layers/{key}_{part}" for part in ("mean", "min", "max")]
    charts: list[tuple[str, list[Any]]] = [(f"{title}, all layers", ["Margin", band])]
    if key in HEADLINES:
        some = spread_layers(layers, CHARTED_LAYERS)
        lines = _multiline(*(f"{split}routing/{layer}/{key}" for layer in some))
        charts.append((f"{title}, {len(some)} of {len(layers)} layers", lines))
    return charts


def _multiline(*tags: str) -> list[Any]:
    return ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]]


def _own_statistics(block: MoEBlock) -> list[str]:
    keys = ["vector_similarity", *block.router.own_statistics]
    if block.default_vectors != "none":
        keys += ["default_norm", "default_drift", "default_distance"]
    return keys
