"""A run stopped and resumed at any step ends like the run that was not, to the bit."""

from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from app.moe import TopK
from callbacks import (
    AdaptiveExperts,
    DefaultVectors,
    LossFreeBalance,
    MetricsTable,
    RandomState,
    RoutingMonitor,
)
from tests.callbacks.callback_support import digits, make_trainer, read_rows, same, vision_task

EPOCHS, BATCHES = 3, 9  # the window of an epoch is its batches 3, 4 and 5: decisions at 6, 15, 24


def adaptive_run(folder: Path, *more, ckpt_path=None, initialization="last_removed", **options):
    """DynMoE with dropout, deaths and births; returns (trainer, task, AdaptiveExperts)."""
    adaptive = AdaptiveExperts(initialization, min_load_fraction=0.4)
    task = vision_task(num_experts=3, slots=5, drop=0.2, losses={"topany": 1e-2})
    with torch.no_grad():
        for block in task.blocks.values():
            block.router.threshold.fill_(0.1)
    trainer = make_trainer(
        folder, adaptive, RoutingMonitor(2), MetricsTable(), RandomState(), *more,
        max_epochs=EPOCHS, limit_train_batches=BATCHES, limit_val_batches=1, **options,
    )  # fmt: skip
    trainer.fit(task, digits(), ckpt_path=ckpt_path)
    return trainer, task, adaptive


def final(trainer, task, adaptive):
    """All that a run leaves behind."""
    return {
        "weights": dict(task.state_dict()),
        "optimizer": trainer.optimizers[0].state_dict(),
        "events": adaptive.events,
        "metrics": [
            {key: row[key] for key in ("epoch", "step", "val/loss", "val/accuracy", "train/loss")}
            for row in read_rows(Path(trainer.log_dir) / "metrics.csv")
        ],
        "table": read_rows(Path(trainer.log_dir) / "expert_events.csv"),
    }


def every_step() -> ModelCheckpoint:
    return ModelCheckpoint(None, "{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run = adaptive_run(folder, every_step())
    kinds = {event["event"] for event in run[2].events}
    assert kinds >= {"birth", "death"}, "the run must show both"
    assert {event["step"] for event in run[2].events} == {6, 15, 24}
    return folder / "log" / "checkpoints", final(*run)


@pytest.mark.parametrize("step", [2, 4, 5, 6, 7, 10, 14, 15, 19, 23])
def test_resumed_at_a_step(tmp_path, whole, step):
    """Before, within and after the window; 6 and 15 lie between a birth and its first step."""
    folder, expected = whole
    resumed = final(*adaptive_run(tmp_path, ckpt_path=folder / f"step={step}.ckpt"))
    for part in ("events", "table", "optimizer", "weights", "metrics"):
        assert same(resumed[part], expected[part]), part


@pytest.mark.parametrize("step", [9, 18])
def test_resumed_after_the_last_step_of_an_epoch(tmp_path, whole, step):
    """Saved before the validation of that epoch, which Lightning does not make up for."""
    folder, expected = whole
    resumed = final(*adaptive_run(tmp_path, ckpt_path=folder / f"step={step}.ckpt"))
    for part in ("events", "table", "optimizer", "weights"):
        assert same(resumed[part], expected[part]), part
    assert resumed["metrics"] == [row for row in expected["metrics"] if row["step"] != str(step)]


@pytest.mark.parametrize("initialization", ["weighted_average", "random"])
def test_resumed_within_a_window_with_other_initialisations(tmp_path, initialization):
    options = {"initialization": initialization}
    expected = final(*adaptive_run(tmp_path / "whole", every_step(), **options))
    path = tmp_path / "whole" / "log" / "checkpoints" / "step=14.ckpt"
    resumed = final(*adaptive_run(tmp_path / "resumed", ckpt_path=path, **options))
    assert same(resumed, expected)


def test_resumed_in_a_window_of_accumulated_steps(tmp_path):
    """Two micro-batches a step, 5 steps an epoch, of which the second and third are the window."""
    options = {"accumulate_grad_batches": 2}
    expected = final(*adaptive_run(tmp_path / "whole", every_step(), **options))
    assert {event["step"] for event in expected["events"]} == {3, 8, 13}
    for step in (2, 3, 7, 8):
        path = tmp_path / "whole" / "log" / "checkpoints" / f"step={step}.ckpt"
        resumed = final(*adaptive_run(tmp_path / f"{step}", ckpt_path=path, **options))
        assert same(resumed, expected), step


def test_the_record_is_in_the_checkpoint(whole):
    """Within a window the sums of its batches so far; after it none, but the newborn experts."""
    folder, _ = whole

    def state(step):
        callbacks = torch.load(folder / f"step={step}.ckpt", weights_only=True)["callbacks"]
        return next(value for key, value in callbacks.items() if key.startswith("AdaptiveExperts"))

    tokens = 32 * 5  # a batch of images of 4 patches and a class token
    assert not state(3)["records"]
    for batches, step in ((1, 4), (2, 5)):
        for load_E, unrouted_D, counts in state(step)["records"].values():
            assert counts[1] == batches * tokens and load_E.shape == (5,)
            assert unrouted_D.shape == (16,)
    births = [(e["layer"], e["slot"]) for e in state(6)["events"] if e["event"] == "birth"]
    assert births and [tuple(each) for each in state(6)["newborn"]] == births
    assert not state(6)["records"] and not state(7)["newborn"]


# ---------------------------------------------------------------------- default vectors, balancing


def default_run(folder, *more, ckpt_path=None, lr=3e-3, accumulate=4, steps=8):
    task = vision_task(
        partial(TopK, k=1), 4, 4, partial(torch.optim.AdamW, lr=lr),
        block={"default_vectors": "ema"}, schedule="constant", warmup=0.0,
    )  # fmt: skip
    vectors, balance = DefaultVectors(beta=0.9), LossFreeBalance(0.01)
    trainer = make_trainer(
        folder, vectors, balance, RandomState(), *more, max_epochs=1, max_steps=steps,
        accumulate_grad_batches=accumulate, limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(task, digits(), ckpt_path=ckpt_path)
    return {"weights": dict(task.state_dict()), "step": trainer.global_step}


@pytest.mark.parametrize("step", [1, 4])
def test_vectors_and_biases_resumed_between_accumulated_steps(tmp_path, step):
    expected = default_run(tmp_path / "whole", every_step())
    path = tmp_path / "whole" / "log" / "checkpoints" / f"step={step}.ckpt"
    assert same(default_run(tmp_path / "resumed", ckpt_path=path), expected)


class SaveAt(ModelCheckpoint):
    """Saves after one given batch, wherever in an accumulation that is."""

    def __init__(self, batch: int, path: Path) -> None:
        super().__init__(path.parent, save_top_k=0)
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch_idx == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("batch", [4, 5, 6])
def test_sums_survive_in_the_middle_of_an_accumulation(tmp_path, batch):
    """Saved within micro-batches 4 to 7: that step's V and bias still count all four of them.

    With a learning rate of 0, since no checkpoint of Lightning's carries a half-summed gradient.
    """
    path = tmp_path / "middle.ckpt"
    options = {"lr": 0.0, "steps": 3}
    expected = default_run(tmp_path / "whole", SaveAt(batch, path), **options)
    saved = torch.load(path, weights_only=True)["callbacks"]["LossFreeBalance"]
    for (load_E,) in saved.values():
        assert load_E.sum() == (batch - 3) * 32 * 5  # images of 4 patches and a class token
    resumed = default_run(tmp_path / "resumed", ckpt_path=path, **options)
    assert resumed["step"] == expected["step"] == 3
    assert same(resumed, expected)


class Elsewhere:
    """A trainer and a task on a device that is not the CPU."""

    num_training_batches, device, ckpt_path = 1, torch.device("meta"), None


@pytest.mark.parametrize(
    ("callback", "state"),
    [
        (
            AdaptiveExperts(),
            {"records": {"blocks.0": [torch.ones(5), torch.ones(8), torch.ones(2)]}, "banks": {},
             "events": [], "newborn": [], "start_counts": {}},
        ),
        (DefaultVectors(), {"blocks.0": [torch.ones(5, 8), torch.ones(5)]}),
        (LossFreeBalance(), {"blocks.0": torch.ones(5)}),
        (
            RoutingMonitor(),
            {"sums": {"total": torch.ones(9), "shapes": {"blocks.0/load_E": [9]}, "counts": []},
             "vectors": {}, "logged_step": 0, "history": {}, "taking": {}},
        ),
    ],
)  # fmt: skip
def test_sums_from_a_checkpoint_follow_the_model(callback, state):
    """A checkpoint is read to the CPU; the sums must be where the next batches are."""
    callback.load_state_dict(state)
    callback.on_train_start(Elsewhere(), Elsewhere())

    def tensors(value):
        if isinstance(value, dict | list | tuple):
            parts = value.values() if isinstance(value, dict) else value
            return [each for part in parts for each in tensors(part)]
        return [value] if isinstance(value, torch.Tensor) else []

    found = tensors(callback.state_dict())
    assert len(found) == len(tensors(state))
    assert {each.device.type for each in found} == {"meta"}
