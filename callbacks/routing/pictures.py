"""Pictures of the routing, in TensorBoard and in the run folder."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from matplotlib.figure import Figure
from torch import Tensor

from app.figures import as_image, save_image
from app.moe import MoEBlock, moe_blocks
from app.tasks.samples import ImageSamples, TextSamples

from ..methods.expert_events import births_and_deaths
from .figures import load_figure, similarity_figure, taking_figure
from .monitor import RoutingMonitor, spread_layers
from .samples import Choices, patches_picture, tokens_html, tokens_picture
from .statistics import similarity, to_host

SAMPLE_LAYERS = 4
"""Layers whose samples are drawn: more would not fit a page."""


class RoutingPictures(L.Callback):
    """Draws the routing after validations, and once more when training ends.

    Tags in TensorBoard, and files in `<run>/pictures/`: `load_<layer>` (heat map of the load,
    experts by time, with births and deaths), `experts_per_token` (bars), `similarity_<layer>` (of
    the routing vectors), and of a few fixed validation samples `patches` (images) or `tokens`
    (text, also as a page, tokens.html). Files hold the newest picture, TensorBoard all of them.

    A task tells what can be looked at by its method `samples`. Needs the RoutingMonitor.

    Args:
        enabled: whether to draw at all.
        time_share: largest share of the training time to spend on drawing; where that is used up,
            pictures wait for a later validation. The first ones and those at the end are always
            drawn. 1 draws after every validation.
        samples: images to show, or texts on the page; a quarter as many texts in the picture.
        layers: MoE layers to draw at most, evenly spread over the network's depth.
    """

    def __init__(
        self, enabled: bool = True, time_share: float = 0.01, samples: int = 8, layers: int = 8
    ) -> None:
        if not 0.0 < time_share <= 1.0:
            raise ValueError(f"pictures time_share must lie in (0, 1], got {time_share}")
        for name, value in (("samples", samples), ("layers", layers)):
            if value < 1:
                raise ValueError(f"pictures {name} must be at least 1, got {value}")
        self.enabled, self.time_share = enabled, time_share
        self.samples, self.layers = samples, layers
        self.blocks: dict[str, MoEBlock] = {}
        self.monitor: RoutingMonitor | None = None
        self._shown: list[tuple[ImageSamples | TextSamples, dict[str, Choices]]] = []
        self._started = self._spent = 0.0
        self._drawn_step = -1

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        blocks = (
            moe_blocks(pl_module) if self.enabled and stage == "fit" and trainer.loggers else {}
        )
        self.blocks = {name: blocks[name] for name in spread_layers(list(blocks), self.layers)}
        monitors = [each for each in trainer.callbacks if isinstance(each, RoutingMonitor)]
        if self.blocks and not monitors:
            raise MisconfigurationException(
                "RoutingPictures draws what the RoutingMonitor has counted: add that callback "
                "before it, or set pictures.enabled: false"
            )
        self.monitor = monitors[0] if monitors else None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started, self._spent = time.monotonic(), 0.0

    # ------------------------------------------------------------------ samples

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._shown = []

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not self.blocks or trainer.sanity_checking or dataloader_idx:
            return
        count = self._wanted(trainer, batch_idx)
        samples = getattr(pl_module, "samples", lambda batch, count: None)
        shown = samples(batch, count) if count else None
        if shown is not None:
            layers = spread_layers(list(self.blocks), SAMPLE_LAYERS)
            choices = {
                name: Choices.of(self.blocks[name].routing, shown.rows, shown.length)
                for name in layers
            }
            self._shown.append((shown, choices))

    def _wanted(self, trainer: L.Trainer, batch_idx: int) -> int:
        """How many samples of this batch are drawn: they are spread over all batches."""
        batches = trainer.num_val_batches[0]
        if batches == float("inf"):
            return self.samples if batch_idx == 0 else 0
        return sum(i * int(batches) // self.samples == batch_idx for i in range(self.samples))

    # ------------------------------------------------------------------ when

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._draw_if_due(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.enable_validation:
            self._draw_if_due(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.blocks and self._drawn_step != trainer.global_step:
            self._draw(trainer)

    def _draw_if_due(self, trainer: L.Trainer) -> None:
        if not self.blocks or trainer.state.fn != "fit":
            return
        due = self._spent <= self.time_share * (time.monotonic() - self._started)
        if trainer.strategy.broadcast(due):  # sharded weights are gathered by all processes
            self._draw(trainer)

    # ------------------------------------------------------------------ what

    def _draw(self, trainer: L.Trainer) -> None:
        begun = time.monotonic()
        self._drawn_step = trainer.global_step
        vectors = to_host({name: similarity(block) for name, block in self.blocks.items()})
        folder = trainer.log_dir  # a broadcast: all processes have to ask
        if trainer.is_global_zero:
            for name, picture in self._pictures(Path(folder), vectors):
                drawn = isinstance(picture, np.ndarray)
                pixels = picture if drawn else as_image(picture, dpi=110)
                save_image(pixels, Path(folder) / "pictures" / f"{name}.png")
                for logger in trainer.loggers:
                    add_image = getattr(logger.experiment, "add_image", None)
                    if add_image is not None:
                        tag = f"pictures/{name}"
                        add_image(tag, pixels, trainer.global_step, dataformats="HWC")
            self._write_page(Path(folder) / "pictures" / "tokens.html", trainer.global_step)
        self._spent += time.monotonic() - begun

    def _pictures(
        self, folder: Path, vectors: dict[str, Tensor]
    ) -> Iterator[tuple[str, Figure | np.ndarray]]:
        monitor, layers = self.monitor, list(self.blocks)
        for layer in layers:
            history = monitor.history.get(layer)
            if history is not None:
                yield f"load_{layer}", load_figure(layer, history, births_and_deaths(folder, layer))
        shares = {
            split: monitor.taking[key]
            for split, key in (("training", ""), ("validation", "val_"))
            if monitor.taking[key]
        }
        if shares:
            yield "experts_per_token", taking_figure(shares, layers, self._note(len(layers)))
        for layer, similarity_RR in vectors.items():
            active_E = self.blocks[layer].active_E.cpu()
            if len(similarity_RR) > 1:
                figure = similarity_figure(layer, similarity_RR.float(), active_E)
                yield f"similarity_{layer}", figure
        samples, choices = self._samples()
        note = self._note(len(choices))
        if isinstance(samples, ImageSamples):
            yield "patches", patches_picture(samples, choices, note)
        elif samples is not None:
            yield "tokens", tokens_picture(samples, choices, note, texts=max(1, self.samples // 4))

    def _samples(self) -> tuple[ImageSamples | TextSamples | None, dict[str, Choices]]:
        """What the batches of the last validation gave, as one."""
        if not self._shown:
            return None, {}
        parts = [samples for samples, _ in self._shown]
        choices = {
            layer: Choices.join([each[layer] for _, each in self._shown])
            for layer in self._shown[0][1]
        }
        return type(parts[0]).join(parts), choices

    def _note(self, drawn: int) -> str:
        total = len(self.monitor.blocks)
        return "" if drawn == total else f" ({drawn} of {total} layers)"

    def _write_page(self, path: Path, step: int) -> None:
        samples, choices = self._samples()
        if isinstance(samples, TextSamples):
            title = f"Tokens by expert, step {step}{self._note(len(choices))}"
            path.write_text(tokens_html(samples, choices, title), encoding="utf-8")
