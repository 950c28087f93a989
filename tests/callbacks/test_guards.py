"""Numbers that stop being finite: what is said, what is skipped, what is never written."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from app.cli import main as cli
from app.errors import DivergedError
from app.moe import TopK
from callbacks import Checkpoint, NumericalGuards
from tests.callbacks.callback_support import At, Recorder, Toy, fit, same, tokens, toy_block

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
BATCHES = [tokens(text) for text in ("0011", "0120", "2210", "0212", "1102", "0001")]


def toy(**options) -> Toy:
    torch.manual_seed(0)
    blocks = [toy_block(**options), toy_block(**options)]
    return Toy(*blocks, optimizer=ADAMW)


def saving(folder) -> Checkpoint:
    return Checkpoint(dirpath=folder, save_top_k=0, save_last=True, every_n_train_steps=1)


def ruin(tensor: torch.Tensor, value: float = math.nan) -> None:
    with torch.no_grad():
        tensor[0] = value


def ruin_in_forward(block: torch.nn.Module) -> None:
    """Not before: a checkpoint of the step before may still be to be written, with good weights."""
    block.register_forward_pre_hook(lambda module, _: ruin(module.experts.up))


def nan_gradient(parameter: torch.Tensor) -> None:
    parameter.register_hook(lambda gradient: gradient * math.nan)


FAULTS = {
    "the output of blocks.1": lambda task: ruin_in_forward(task.network.blocks[1]),
    "the loss": lambda task: setattr(task, "loss_scale", math.inf),
    "the gradient of blocks.0.router.weight": (
        lambda task: nan_gradient(task.network.blocks[0].router.weight)
    ),
}


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("what", FAULTS)
def test_stops_and_names_the_cause(tmp_path, what, lag):
    """The step, what was not finite first, and a checkpoint of the steps before, which is good.

    One step late, as on a GPU: the weights are ruined by then, and still the cause is named.
    """
    guards, recorder = NumericalGuards(), Recorder()
    at = At({0: lambda task: setattr(guards, "lag", lag), 3: FAULTS[what]})
    with pytest.raises(DivergedError) as caught:
        fit(tmp_path, toy(), BATCHES, at, recorder, guards, saving(tmp_path))
    assert len(recorder.steps) == 3 + lag, "a checkpoint that is due brings a late verdict out"
    assert str(caught.value).startswith(f"step 4: {what} is not finite; training stops.")
    assert str(tmp_path / "last.ckpt") in str(caught.value)
    kept = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert kept["global_step"] == 3
    assert all(value.isfinite().all() for value in kept["state_dict"].values())


def test_late_without_a_checkpoint(tmp_path):
    """Also in the last step, after which no other one reads the verdict."""
    for step, steps in ((3, 5), (5, 6)):
        guards, recorder = NumericalGuards(), Recorder()
        at = At({0: lambda _, g=guards: setattr(g, "lag", 1), step: FAULTS["the loss"]})
        with pytest.raises(DivergedError, match=f"^step {step + 1}: the loss is not finite"):
            fit(tmp_path / str(step), toy(), BATCHES, at, recorder, guards)
        assert recorder.steps[-1] == min(step + 1, steps)


def test_no_checkpoint_before(tmp_path):
    with pytest.raises(DivergedError, match="No checkpoint was written before"):
        fit(tmp_path, toy(), BATCHES, At({0: FAULTS["the loss"]}), NumericalGuards())


def test_a_batch_that_is_not_finite(tmp_path):
    batches = [BATCHES[0], BATCHES[1] * math.nan]
    with pytest.raises(DivergedError, match=r"^step 2: the batch is not finite"):
        fit(tmp_path, toy(), batches, NumericalGuards())


def test_any_micro_batch_of_a_step(tmp_path):
    """Six micro-batches, two a step: the third one makes the second step bad."""
    batches = [*BATCHES[:2], BATCHES[2] / 0.0, *BATCHES[3:]]
    with pytest.raises(DivergedError, match=r"^step 2: the batch is not finite"):
        fit(tmp_path, toy(), batches, NumericalGuards(), accumulate_grad_batches=2)


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_a_bad_checkpoint_is_never_written(tmp_path, part):
    """Weights or moments that went bad in no update: found when they are about to be written."""
    task = toy()

    class Ruin(Recorder):
        def on_train_batch_end(self, trainer, pl_module, *args) -> None:
            if trainer.global_step == 3:
                weight = task.network.blocks[0].experts.down
                state = trainer.optimizers[0].state[weight]
                ruin(weight if part == "weights" else state["exp_avg_sq"], math.inf)

    with pytest.raises(DivergedError, match="no checkpoint of it is written") as caught:
        fit(tmp_path, task, BATCHES, Ruin(), NumericalGuards(), saving(tmp_path))
    assert "blocks.0.experts.down is" in str(caught.value)
    assert ("exp_avg_sq" in str(caught.value)) == (part == "optimizer")
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


def test_skipped_updates_leave_no_trace(tmp_path):
    """Weights and moments as of a run without the bad batches; it is said and counted."""
    bad = BATCHES[0] * math.nan
    left, right = toy(), toy()
    guards = NumericalGuards("skip")
    with pytest.warns(UserWarning, match=r"step 2: the batch is not finite; its update is skipped"):
        one = fit(tmp_path / "a", left, [BATCHES[0], bad, bad, *BATCHES[1:]], guards)
    two = fit(tmp_path / "b", right, BATCHES)
    assert guards.skipped == [2, 3] and one.global_step == 8
    assert same(dict(left.state_dict()), dict(right.state_dict()))
    assert same(one.optimizers[0].state_dict(), two.optimizers[0].state_dict())


def test_too_many_skips(tmp_path):
    guards = NumericalGuards("skip", max_skips=2)
    with (
        pytest.raises(DivergedError, match="step 4: the loss is not finite, after 2 skipped"),
        pytest.warns(UserWarning, match="is skipped"),
    ):
        fit(tmp_path, toy(), BATCHES, At({1: FAULTS["the loss"]}), guards)


CLOSE_LOOKS = {
    "the thresholds of blocks.1": (
        {}, lambda task: ruin(task.network.blocks[1].router.threshold)
    ),
    "the router logits of blocks.1": (
        {"router": TopK}, lambda task: ruin(task.network.blocks[1].router.weight)
    ),
    "the default vectors of blocks.1": (
        {"router": TopK, "default_vectors": "ema"},
        lambda task: ruin(task.network.blocks[1].default_ED),
    ),
    "the expert outputs of blocks.1": (
        {}, lambda task: ruin(task.network.blocks[1].experts.up)
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CLOSE_LOOKS)
def test_check_layers_looks_inside_the_block(tmp_path, what):
    """Slots not in use have logits of -inf: those are no fault."""
    options, fault = CLOSE_LOOKS[what]
    with pytest.raises(DivergedError, match=f"^step 3: {what} is not finite"):
        fit(tmp_path, toy(**options), BATCHES, At({2: fault}), NumericalGuards(check_layers=True))


def test_a_good_run_is_not_touched(tmp_path):
    left, right = toy(), toy()
    fit(tmp_path / "a", left, BATCHES, NumericalGuards(check_layers=True))
    fit(tmp_path / "b", right, BATCHES)
    assert same(dict(left.state_dict()), dict(right.state_dict()))
    assert not any(module._forward_hooks for module in left.modules()), "hooks are gone"
    assert not any("forward" in vars(module) for module in left.modules())


def test_command_line(tmp_path, monkeypatch, capsys):
    """On by default: exit status 1 and one line."""
    monkeypatch.chdir(tmp_path)
    config = cli.__file__.replace("app/cli/main.py", "configs/quickstart.yaml")
    arguments = ["fit", "--config", config, "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]
    arguments += ["--model.optimizer.lr=1e38", "--trainer.limit_train_batches=12"]
    assert cli.main([*arguments, "--trainer.enable_progress_bar=false"]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and "is not finite; training stops. No checkpoint was" in lines[0]


def test_bad_settings():
    with pytest.raises(ValueError, match="nonfinite must be stop or skip"):
        NumericalGuards("ignore")
    with pytest.raises(ValueError, match="max_skips"):
        NumericalGuards(max_skips=-1)
