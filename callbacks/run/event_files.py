"""TensorBoard event files across a resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

PATTERN = "events.out.tfevents.*"


class EventFiles(L.Callback):
    """Notes in every checkpoint how long the event files of the run were when it was written.

    A run that was killed has logged steps that its last checkpoint does not know of; resumed, it
    would log them twice.
    """

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.is_global_zero and isinstance(trainer.logger, TensorBoardLogger):
            trainer.logger.experiment.flush()
            checkpoint["event_files"] = {
                path.name: path.stat().st_size
                for path in Path(trainer.logger.log_dir).glob(PATTERN)
            }


def rewind(folder: Path, sizes: dict[str, int]) -> None:
    """Takes from the event files in a run's folder what was logged after a checkpoint.

    Args:
        folder: the run's folder.
        sizes: of the event files when the checkpoint was written, in bytes by name.
    """
    for path in folder.glob(PATTERN):
        if path.name not in sizes:
            path.unlink()
        elif path.stat().st_size > sizes[path.name]:
            os.truncate(path, sizes[path.name])
