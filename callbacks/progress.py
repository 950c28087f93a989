"""The progress bar."""

from __future__ import annotations

import time
from datetime import timedelta

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Lightning's rich bar, with the time left of the whole fit beside that of the epoch."""

    def __init__(self) -> None:
        super().__init__(leave=False)
        self._started = (0.0, 0)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._started = (time.monotonic(), trainer.global_step)

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        left = self._seconds_left(trainer, pl_module)
        if left is not None:
            metrics["left"] = str(timedelta(seconds=round(left)))
        return metrics

    def _seconds_left(self, trainer: L.Trainer, pl_module: L.LightningModule) -> float | None:
        begun, first = self._started
        done = trainer.global_step - first
        if not trainer.training or not done or not hasattr(pl_module, "total_steps"):
            return None
        steps = pl_module.total_steps() - trainer.global_step
        return (time.monotonic() - begun) / done * max(0, steps)
