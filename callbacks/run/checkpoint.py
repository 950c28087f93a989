"""Checkpoints from which a run goes on as if it had never stopped, whenever and however it did."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from app.files import write_whole

from ..common import disk_error
from .stopping import Stopped, StopSignals, requeue


class Checkpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint for exact resuming: written whole, and between two batches.

    Lightning saves when a checkpoint is due, which may be before the step's metrics are logged,
    before the validation that follows the step, or within an optimizer step of several
    micro-batches. A run that goes on from there lacks the rest (seen in 2.6.6). Here a checkpoint
    that is due is written when the next optimizer step begins, or when training ends: nothing of
    the past is left to do then. Place the callback before those that log at the start of a batch.

    A signal to stop (SIGTERM, Ctrl-C, SLURM's requeue signal) is heard at the same place: the step,
    and a validation that is under way, are finished and a checkpoint written before training ends
    with `Stopped`.

    A file takes the name of the one before only when it lies on the disk completely.

    Args:
        every_minutes: writes `last.ckpt` whenever that much time has passed since a checkpoint;
            null to write it only when Lightning's options say so.
        **options: of Lightning's ModelCheckpoint.
    """

    def __init__(self, every_minutes: float | None = 10.0, **options: Any) -> None:
        super().__init__(**options)
        if every_minutes is not None and every_minutes <= 0:
            raise ValueError(f"every_minutes must be positive or null, got {every_minutes}")
        self.every_minutes = every_minutes
        self._due: dict[str, Tensor] | None = None  # the metrics that name the checkpoint
        self._written_at = 0.0
        self._signals = StopSignals()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:  # not one of the user's own
            trainer.strategy.checkpoint_io = WholeFiles()
        super().setup(trainer, pl_module, stage)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_global_step_saved = trainer.global_step
        self._written_at = time.monotonic()
        self._signals.listen(trainer)

    # ------------------------------------------------------------------ when it is due

    def _save_topk_checkpoint(
        self, trainer: L.Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        # Lightning calls this, and `_save_last_checkpoint` after it, when a checkpoint is due.
        self._due = monitor_candidates
        self._last_global_step_saved = trainer.global_step

    def _save_last_checkpoint(
        self, trainer: L.Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        pass

    # ------------------------------------------------------------------ when it is written

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # The step that loggers see. Resuming right after a validation would leave it one ahead.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        if batch_idx % trainer.accumulate_grad_batches:
            return  # within an optimizer step
        signal, late = self._agree(trainer)
        if self._due is not None or late or signal:
            self._write(trainer)
        if signal:
            requeue(trainer, signal)
            raise Stopped(signal, trainer.global_step, self.last_model_path)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._due is not None or not self._should_skip_saving_checkpoint(trainer):
            self._write(trainer)

    def _agree(self, trainer: L.Trainer) -> tuple[int, bool]:
        """The signal to stop at (0 for none) and whether time is up, for any of the processes."""
        late = False
        if self.every_minutes is not None:
            late = time.monotonic() - self._written_at >= 60 * self.every_minutes
        code = 2 * self._signals.received + late
        if trainer.world_size > 1:
            device = trainer.strategy.root_device
            code = int(trainer.strategy.reduce(torch.tensor(code, device=device), reduce_op="max"))
        return code // 2, bool(code % 2)

    def _write(self, trainer: L.Trainer) -> None:
        if trainer.fast_dev_run:
            return
        due, self._due = self._due, None
        if due is not None:
            super()._save_topk_checkpoint(trainer, due)
        super()._save_last_checkpoint(trainer, due or self._monitor_candidates(trainer))
        self._last_global_step_saved = trainer.global_step
        self._written_at = time.monotonic()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Makes Lightning's counters say "after so many batches of an epoch".

        It counts a batch that has been fetched and not begun, and an epoch that training has left
        as finished: a run resumed with a larger `max_steps` would skip the rest of its data, or a
        whole epoch. What stands for "after its last batch" is "before the next epoch's first".
        """
        counters = checkpoint["loops"]["fit_loop"]
        epoch, batch = counters["epoch_progress"], counters["epoch_loop.batch_progress"]
        if epoch["current"]["processed"] == epoch["current"]["started"]:  # it has left the epoch
            at_end = batch["current"]["ready"] >= trainer.num_training_batches
            finished = at_end or batch["is_last_batch"]  # the number of batches may be unknown
            for count in (epoch["total"], epoch["current"]):
                count["processed"] = count["completed"] = count["started"] - (not finished)
        elif batch["current"]["started"] < batch["current"]["ready"]:  # between two batches
            finished = batch["current"]["started"] == 0
            batch["is_last_batch"] = False
            for count in (batch["total"], batch["current"]):
                count["ready"] = count["started"]
            if finished:
                for count in (epoch["total"], epoch["current"]):
                    count["ready"] = count["started"] = count["processed"]
        else:
            return  # written by another callback, within a batch
        if finished:
            batch["current"], batch["is_last_batch"] = dict.fromkeys(batch["current"], 0), False


class WholeFiles(TorchCheckpointIO):
    """Checkpoint files that are complete or absent, on a local disk; read without unpickling code.

    Lightning's own writes into the system's temporary folder first: a move from there to another
    disk is no atomic one, and a killed run leaves a file behind.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Writes beside `path` and takes its place.

        Raises:
            MisconfigurationException: if that fails; what was at `path` is left as it was.
        """
        if not _is_local_file_protocol(str(path)):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)

        def write(temporary: Path) -> None:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())

        try:
            write_whole(path, write)
            _sync_folder(path.parent)
        except (OSError, RuntimeError) as error:  # torch raises its own in place of the disk's
            cause = disk_error(error)
            if cause is None:
                raise
            kept = "; the one written there before is whole" if path.is_file() else ""
            raise MisconfigurationException(
                f"cannot write the checkpoint {path}: {cause.strerror}{kept}. Make room or allow "
                "writing there, then go on with --ckpt_path last"
            ) from error

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads a checkpoint; `weights_only` is true whatever is given."""
        return super().load_checkpoint(path, map_location, weights_only=True)


def _sync_folder(folder: Path) -> None:
    """Makes a new name in a folder outlast a power cut, where the system can do that."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
