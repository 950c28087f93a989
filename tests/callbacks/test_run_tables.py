"""metrics.csv, predictions.csv, the progress bar and the random generators across a resume."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from callbacks import MetricsTable, PredictionTable, ProgressBar, RandomState, RoutingMonitor
from callbacks.run import progress as progress_module
from tests.callbacks.callback_support import (
    digits,
    make_trainer,
    read_rows,
    read_scalars,
    same,
    vision_task,
)

SHORT = {"limit_train_batches": 3, "limit_val_batches": 1}


def run(folder: Path, *callbacks, ckpt_path=None, task=None, **options):
    task = task or vision_task(drop=0.2)
    trainer = make_trainer(folder, *callbacks, **(SHORT | {"max_epochs": 3} | options))
    trainer.fit(task, digits(), ckpt_path=ckpt_path)
    return trainer, task


def test_metrics_table(tmp_path):
    """One row an epoch, with what TensorBoard has; none for the sanity check or `validate`."""
    trainer, task = run(tmp_path, MetricsTable(), num_sanity_val_steps=2)
    rows, scalars = read_rows(tmp_path / "log" / "metrics.csv"), read_scalars(tmp_path / "log")
    trainer.validate(task, digits(), verbose=False)
    assert read_rows(tmp_path / "log" / "metrics.csv") == rows
    assert list(rows[0])[:2] == ["epoch", "step"]
    assert {"val/accuracy", "val/accuracy_top5", "val/loss", "train/loss"} <= set(rows[0])
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "3"), ("1", "6"), ("2", "9")]
    for name in ("val/accuracy", "val/loss"):
        logged = [value for _, value in scalars[name]]
        assert [float(row[name]) for row in rows] == pytest.approx(logged, rel=1e-5)
    assert not list((tmp_path / "log").glob("*.tmp"))


def test_cost_columns(tmp_path):
    """Time, parameters in use, FLOPs and experts: as TensorBoard has them, on a resume too."""
    saving = ModelCheckpoint(None, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    _, task = run(tmp_path, RoutingMonitor(), MetricsTable(), saving, max_epochs=2)
    rows, scalars = read_rows(tmp_path / "log" / "metrics.csv"), read_scalars(tmp_path / "log")
    monitored = [key for key in rows[0] if key.startswith("val_")]
    layers = len(task.blocks)
    assert layers and len(monitored) == 1 + 4 * layers
    for key in monitored:
        logged = [value for _, value in scalars[key]]
        assert [float(row[key]) for row in rows] == pytest.approx(logged, rel=1e-5)
    block = next(iter(task.blocks.values()))
    unused = (block.slots - int(block.active_E.sum())) * layers
    per_slot = sum(weight[0].numel() for weight in block.experts.parameters())
    assert unused
    expected = sum(p.numel() for p in task.parameters()) - unused * per_slot
    assert [int(row["parameters"]) for row in rows] == [expected] * 2
    first, second = (float(row["seconds"]) for row in rows)
    assert 0 < first < second
    path = tmp_path / "log" / "checkpoints" / "epoch=1.ckpt"
    run(tmp_path / "on", RoutingMonitor(), MetricsTable(), ckpt_path=path)
    resumed = read_rows(tmp_path / "on" / "log" / "metrics.csv")
    assert resumed[:2] == rows and float(resumed[2]["seconds"]) > second


def test_metrics_within_an_epoch(tmp_path):
    """With several evaluations an epoch, one row for each."""
    run(tmp_path, MetricsTable(), max_epochs=1, val_check_interval=1)
    rows = read_rows(tmp_path / "log" / "metrics.csv")
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "1"), ("0", "2"), ("0", "3")]


def test_training_accuracy_of_an_epoch_is_in_the_row_of_that_epoch(tmp_path):
    run(tmp_path, MetricsTable())
    rows = read_rows(tmp_path / "log" / "metrics.csv")
    logged = [value for _, value in read_scalars(tmp_path / "log")["train/accuracy"]]
    assert [float(row["train/accuracy"] or "nan") for row in rows] == pytest.approx(logged)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_resumed_table_goes_on(tmp_path, epoch):
    """From the end of an epoch: the rows before it once, then the rest, as uninterrupted."""
    saving = ModelCheckpoint(None, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    run(tmp_path / "whole", MetricsTable(), RandomState(), saving)
    whole = read_rows(tmp_path / "whole" / "log" / "metrics.csv")
    path = tmp_path / "whole" / "log" / "checkpoints" / f"epoch={epoch}.ckpt"
    run(tmp_path / "resumed", MetricsTable(), RandomState(), ckpt_path=path)
    resumed = read_rows(tmp_path / "resumed" / "log" / "metrics.csv")
    assert [(row["epoch"], row["step"]) for row in resumed] == [("0", "3"), ("1", "6"), ("2", "9")]
    for key in ("val/loss", "val/accuracy", "train/loss"):
        assert [row[key] for row in resumed] == [row[key] for row in whole]


def test_random_state_makes_dropout_resume(tmp_path):
    """With the callback the resumed weights are the same to the bit; without they are not."""
    saving = ModelCheckpoint(None, "{step}", every_n_train_steps=1, save_top_k=-1)
    _, whole = run(tmp_path / "whole", RandomState(), saving)
    path = tmp_path / "whole" / "log" / "checkpoints" / "step=4.ckpt"
    for callbacks, equal in (([RandomState()], True), ([], False)):
        torch.manual_seed(99)
        _, resumed = run(tmp_path / "resumed", *callbacks, ckpt_path=path)
        assert same(dict(resumed.state_dict()), dict(whole.state_dict())) == equal


class OneProcess:
    world_size, global_rank = 1, 0


def test_random_state_of_every_generator(tmp_path):
    """torch, NumPy and Python go on where they were, through a file without pickled code."""

    def draw():
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(),
                torch.rand(1).item(), torch.randn(1).item()]  # fmt: skip

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    draw()
    torch.save(RandomState().state_dict(), tmp_path / "state.pt")
    expected = draw()
    callback = RandomState()
    callback.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() != expected
    callback.on_train_start(OneProcess, None)
    assert draw() == expected
    callback.on_train_start(OneProcess, None)  # restored once, not at every start of training
    assert draw() != expected


def test_random_state_of_another_number_of_processes(caplog):
    """One line says that it can't be given back; nothing is drawn otherwise for it."""
    callback = RandomState()
    callback.load_state_dict({"ranks": 2 * callback.state_dict()["ranks"]})
    torch.manual_seed(5)
    with caplog.at_level("INFO"):
        callback.on_train_start(OneProcess, None)
    assert "holds the random state of 2 processes and there are 1" in caplog.text
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)


def test_predictions(tmp_path):
    """One row a sample: what identifies it, its class and the probability of that."""
    task, data = vision_task(), digits()
    trainer = make_trainer(tmp_path, PredictionTable(tmp_path / "new" / "folder"), logger=False)
    batches = trainer.predict(task, data)
    rows = read_rows(tmp_path / "new" / "folder" / "predictions.csv")
    assert list(rows[0]) == ["sample", "class", "class_name", "probability"]
    assert [row["sample"] for row in rows] == data.predict_names and len(rows) == 359
    with torch.no_grad():
        images = torch.cat([images for images, _ in data.predict_dataloader()])
        probability, label = task.eval()(images).softmax(1).max(1)
    assert [int(row["class"]) for row in rows] == label.tolist()
    assert all(row["class_name"] == row["class"] for row in rows)
    given = [float(row["probability"]) for row in rows]
    assert given == pytest.approx(probability.tolist(), abs=1e-5)
    assert len(batches) == 2


def test_predictions_without_names(tmp_path):
    """A data module that names neither samples nor classes: their numbers."""

    class Nameless:
        pass

    class Owner:
        datamodule, world_size, global_rank = Nameless(), 1, 0

    batch = {
        "index": torch.tensor([4, 2]), "class": torch.tensor([1, 0]),
        "probability": torch.tensor([0.5, 1.0]),
    }  # fmt: skip
    PredictionTable(tmp_path).write_on_epoch_end(Owner(), None, [batch], None)
    assert [tuple(row.values()) for row in read_rows(tmp_path / "predictions.csv")] == [
        ("4", "1", "1", "0.500000"), ("2", "0", "0", "1.000000"),
    ]  # fmt: skip
    PredictionTable(tmp_path / "none").write_on_epoch_end(Owner(), None, [torch.zeros(1)], None)
    assert not (tmp_path / "none").exists()


class Bar(ProgressBar):
    """Keeps what the bar shows at each step."""

    def __init__(self):
        super().__init__()
        self.shown = []

    def on_train_batch_end(self, trainer, pl_module, *arguments):
        super().on_train_batch_end(trainer, pl_module, *arguments)
        self.shown.append(self.get_metrics(trainer, pl_module))


def test_progress_bar_tells_the_time_left(tmp_path, monkeypatch):
    """Two seconds a step and nine steps in all: 16 s left after the first, 0 after the last."""
    bar = Bar()
    monkeypatch.setattr(
        progress_module.time, "monotonic", lambda: 1000.0 + 2.0 * bar._trainer.global_step
    )
    run(tmp_path, bar, enable_progress_bar=True)
    left = [metrics["left"] for metrics in bar.shown]
    assert left == [f"0:00:{seconds:02}" for seconds in range(16, -1, -2)]
    assert all("v_num" not in metrics and "train/loss" in metrics for metrics in bar.shown)


def test_progress_bar_after_a_resume(tmp_path, monkeypatch):
    """Only the steps of this sitting count for the speed."""
    saving = ModelCheckpoint(None, "{step}", every_n_train_steps=1, save_top_k=-1)
    run(tmp_path / "whole", saving)
    path = tmp_path / "whole" / "log" / "checkpoints" / "step=6.ckpt"
    bar = Bar()
    monkeypatch.setattr(
        progress_module.time, "monotonic", lambda: 1000.0 + 2.0 * bar._trainer.global_step
    )
    run(tmp_path / "resumed", bar, ckpt_path=path, enable_progress_bar=True)
    assert [metrics["left"] for metrics in bar.shown] == ["0:00:04", "0:00:02", "0:00:00"]
