"""Tables in the run folder: metrics.csv of evaluations, predictions.csv of predictions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn

from app.files import write_csv
from app.moe import moe_blocks


class MetricsTable(L.Callback):
    """Writes metrics.csv: a row for each evaluation.

    Columns: `epoch` and `step`; `seconds` that the fit has taken up to there, evaluations included
    and the time between a stop and a resume not; `parameters` of the network without those of
    unused expert slots; every metric; from the RoutingMonitor the active FLOPs and each layer's
    number of experts, experts per token, largest and smallest load in this evaluation.

    The rows travel in the checkpoint, so that a resumed run goes on with the table as it was.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._seconds, self._started = 0.0, 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.monotonic() - self._seconds
        if trainer.ckpt_path:  # the file may know more than the checkpoint, or be another's
            self._write(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        row: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "seconds": round(time.monotonic() - self._started, 3),
            "parameters": _parameters_in_use(pl_module),
        }
        row |= _metrics(trainer, ("val/", "train/"), skip="train/accuracy")
        routing = _metrics(trainer, ("val_routing/", "val_compute/"))
        row |= {name: value for name, value in routing.items() if name.endswith(FROM_MONITOR)}
        self.rows.append(row)
        self._write(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Only now is the training accuracy of the epoch complete.
        if self.rows and self.rows[-1]["step"] == trainer.global_step:
            self.rows[-1] |= _metrics(trainer, ("train/accuracy",))
            self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        folder = trainer.log_dir  # a broadcast: all processes have to ask
        if trainer.is_global_zero:
            columns = dict.fromkeys(key for each in self.rows for key in each)
            write_csv(Path(folder) / "metrics.csv", self.rows, list(columns))

    def state_dict(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._started if self._started else self._seconds
        return {"rows": self.rows, "seconds": seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows, self._seconds = list(state["rows"]), state.get("seconds", 0.0)


FROM_MONITOR = (
    "/active_experts",
    "/experts_per_token",
    "/load_max",
    "/load_min",
    "/gflops_per_image",
    "/gflops_per_token",
)


def _parameters_in_use(module: nn.Module) -> int:
    unused = 0
    for block in moe_blocks(module).values():
        per_slot = sum(parameter.shape[1:].numel() for parameter in block.experts.parameters())
        unused += (block.slots - int(block.active_E.sum())) * per_slot
    return sum(parameter.numel() for parameter in module.parameters()) - unused


def _metrics(trainer: L.Trainer, prefixes: tuple[str, ...], skip: str = "") -> dict[str, float]:
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if name.startswith(prefixes) and name != skip and not name.endswith(("_step", "_epoch"))
    }


class PredictionTable(BasePredictionWriter):
    """Writes predictions.csv: file or index, predicted class and its probability.

    Args:
        folder: where to write it.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("epoch")
        self.folder = folder

    def write_on_epoch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        predictions: Any,
        batch_indices: Any,
    ) -> None:
        data = trainer.datamodule
        batches = [batch for batch in predictions if isinstance(batch, dict) and "class" in batch]
        if not batches:
            return
        columns = {key: torch.cat([b[key] for b in batches]).tolist() for key in batches[0]}
        names = getattr(data, "predict_names", None)
        classes = getattr(data, "class_names", None)
        rows = [
            {
                "sample": names[index] if names else index,
                "class": label,
                "class_name": classes[label] if classes else label,
                "probability": f"{probability:.6f}",
            }
            for index, label, probability in zip(
                columns["index"], columns["class"], columns["probability"], strict=True
            )
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = f".{trainer.global_rank}" if trainer.world_size > 1 else ""
        path = self.folder / f"predictions{rank}.csv"
        write_csv(path, rows, ["sample", "class", "class_name", "probability"])
        print(f"wrote {len(rows)} predictions to {path}")
