"""Checkpoints that a run can go on from, whenever they were written."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor


class Checkpoint(ModelCheckpoint):
    """Lightning's ModelCheckpoint, with three gaps of its `save_last` closed (seen in 2.6.6).

    - With `save_top_k: 0`, `last.ckpt` is written whenever a checkpoint is due, and not only when
      training ends: a run that is killed has one to go on from.
    - Training that ends between two checkpoints writes a last one.
    - A checkpoint written when training ends says where in its epoch that was. Lightning counts
      the epoch as finished, so that a run resumed with a larger `max_steps` would skip the rest
      of its data, or a whole epoch.
    """

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # The step that loggers see. Resuming right after a validation would leave it one ahead.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.save_last and not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def _save_topk_checkpoint(
        self, trainer: L.Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        if self.save_top_k == 0:
            self._last_global_step_saved = trainer.global_step  # what makes the last one due
        super()._save_topk_checkpoint(trainer, monitor_candidates)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Corrects the counters of an epoch that training has left.

        What stands for "after its last batch" is "before the next epoch's first"; anything else is
        "after so many batches".
        """
        counters = checkpoint["loops"]["fit_loop"]
        epoch, batch = counters["epoch_progress"], counters["epoch_loop.batch_progress"]
        if epoch["current"]["processed"] < epoch["current"]["started"]:
            return  # written within the epoch
        at_end = batch["current"]["ready"] >= trainer.num_training_batches
        finished = at_end or batch["is_last_batch"]  # where the number of batches is not known
        for count in (epoch["total"], epoch["current"]):
            count["processed"] = count["completed"] = count["started"] - (not finished)
        if finished:
            batch["current"], batch["is_last_batch"] = dict.fromkeys(batch["current"], 0), False
