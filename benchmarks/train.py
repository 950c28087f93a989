"""`python -m app fit` whose tables end up in a folder that outlives the run.

python benchmarks/train.py OUT RUNS ARGUMENTS...: fits with the arguments, in RUNS; copies
metrics.csv, expert_events.csv and config.yaml to OUT at every evaluation.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import lightning as L

import callbacks
from app.cli import main as cli

KEPT = ("metrics.csv", "expert_events.csv", "config.yaml")


class CopyTables(L.Callback):
    """Copies the small files of the run folder after each epoch."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name in KEPT:
            path = Path(trainer.log_dir) / name
            if path.is_file():
                shutil.copy(path, self.out / name)


class _Fit(cli.App):
    def instantiate_trainer(self, **kwargs: object) -> L.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        # Behind MetricsTable, which writes at the same moments.
        trainer.callbacks.insert(len(trainer.callbacks) - 1, CopyTables(Path(sys.argv[1])))
        return trainer


if __name__ == "__main__":
    assert callbacks  # importing it lets a config name its classes
    cli.App = _Fit
    sys.exit(cli.main(["fit", "--runs", sys.argv[2], *sys.argv[3:]]))
