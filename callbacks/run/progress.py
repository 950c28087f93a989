"""The progress bar."""

from __future__ import annotations

import math
import time
from datetime import timedelta

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar

SECONDS_BETWEEN_READS = 0.5
PICTURES_PER_SECOND = 10  # Lightning's 100 keep a core busy with drawing


class ProgressBar(RichProgressBar):
    """Lightning's rich bar, with the time left of the whole fit beside that of the epoch."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=PICTURES_PER_SECOND, leave=False)
        self._started = (0.0, 0)
        self._read_at, self._read = -math.inf, {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._started = (time.monotonic(), trainer.global_step)

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        # Reading a metric makes the host wait for the GPU: not after every step.
        now = time.monotonic()
        if trainer.training and now - self._read_at < SECONDS_BETWEEN_READS:
            return self._read
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        left = self._seconds_left(trainer, pl_module)
        if left is not None:
            metrics["left"] = str(timedelta(seconds=round(left)))
        self._read_at, self._read = now, metrics
        return metrics

    def _seconds_left(self, trainer: L.Trainer, pl_module: L.LightningModule) -> float | None:
        begun, first = self._started
        done = trainer.global_step - first
        if not trainer.training or not done or not hasattr(pl_module, "total_steps"):
            return None
        steps = pl_module.total_steps() - trainer.global_step
        return (time.monotonic() - begun) / done * max(0, steps)
