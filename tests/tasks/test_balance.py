"""What the load of the load-balance loss is counted over, against plain loops."""

import os
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch

from app.moe import Routing, TopK
from tests.callbacks.callback_support import (
    DDP,
    Toy,
    fit,
    on_two_processes,
    tokens,
    toy_block,
)

SLOTS, ACTIVE = 5, 4
# Seven batches of two processes: two steps of three micro-batches, and a last one of one.
TEXTS = {
    0: ("0011", "0017", "3211", "0000", "0123", "0333", "0122"),
    1: ("0002", "6666", "1112", "3333", "3210", "2222", "1111"),
}


class Losses(L.Callback):
    """Keeps the logged loss of every batch, and the routing it was taken from."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.routings: list[Routing] = []

    def on_train_batch_end(self, trainer, pl_module, *_) -> None:
        self.values.append(float(trainer.callback_metrics["train/aux/load_balance"]))
        self.routings.append(pl_module.blocks["blocks.0"].routing)


def run(folder: Path, balance_over: str, rank: int | None = None, **options) -> dict:
    """Two epochs of one process's batches; the weights move, so that the routing does."""
    rank = int(os.environ["LOCAL_RANK"]) if rank is None else rank
    block = toy_block(partial(TopK, k=2), ACTIVE, SLOTS)
    task = Toy(block, optimizer=partial(torch.optim.SGD, lr=0.5), losses={"load_balance": 1.0})
    task.balance_over = balance_over
    losses = Losses()
    batches = [tokens(text) for text in TEXTS[rank]]
    fit(folder, task, batches, losses, accumulate_grad_batches=3, max_epochs=2, **options)
    return {
        "values": losses.values,
        "masks": [routing.mask_TE.tolist() for routing in losses.routings],
        "probs": [routing.probs_TE.detach().tolist() for routing in losses.routings],
    }


def ddp_run(folder: Path, balance_over: str) -> dict:
    return run(folder, balance_over, use_distributed_sampler=False, **DDP)


def naive(own: dict, everyone: list[dict], batch: int, balance_over: str) -> float:
    """E * sum_e f_e P_e, with P of one process's batch and f counted as `balance_over` says."""
    first = batch - batch % 7 % 3 if balance_over == "step" else batch
    load = [0] * SLOTS
    for each in [own] if balance_over == "batch" else everyone:
        for past in range(first, batch + 1):
            for row in each["masks"][past]:
                for expert, taken in enumerate(row):
                    load[expert] += taken
    probs = own["probs"][batch]
    total = 0.0
    for expert in range(ACTIVE):
        mean = sum(row[expert] for row in probs) / len(probs)
        total += load[expert] / sum(load) * mean
    return ACTIVE * total


@pytest.mark.parametrize("balance_over", ["batch", "ranks", "step"])
def test_one_process(tmp_path, balance_over):
    """A step's last micro-batch sees the load of all of it; the next step starts anew."""
    logged = run(tmp_path, balance_over, rank=0)
    expected = [naive(logged, [logged], batch, balance_over) for batch in range(14)]
    assert logged["values"] == pytest.approx(expected, rel=1e-5)
    alone = [naive(logged, [logged], batch, "batch") for batch in range(14)]
    apart = [abs(a - b) > 1e-3 for a, b in zip(expected, alone, strict=True)]
    assert any(apart) == (balance_over == "step")
    assert not any(apart[::7]) and not any(apart[3::7]) and not any(apart[6::7])


@pytest.mark.parametrize("balance_over", ["ranks", "step"])
def test_two_processes(tmp_path, balance_over):
    """Load of both, importance of each; unlike the loss that counts one of them alone."""
    both = on_two_processes(ddp_run, tmp_path, balance_over)
    for own in both:
        expected = [naive(own, both, batch, balance_over) for batch in range(14)]
        assert own["values"] == pytest.approx(expected, rel=1e-5)
        alone = [naive(own, [own], batch, balance_over) for batch in range(14)]
        assert own["values"] != pytest.approx(alone, rel=1e-2)


def test_a_run_resumed_within_a_step(tmp_path):
    """Its gradients of the step's first micro-batches are lost; so are the loads of these."""
    task = Toy(toy_block(TopK, ACTIVE, SLOTS), losses={"load_balance": 1.0})
    task.balance_over = "step"
    task.trainer = type("Trainer", (), {"accumulate_grad_batches": 4})()
    block = task.blocks["blocks.0"]
    block(tokens("0011"))
    load_E = task._balance_load("blocks.0", block, 2)
    assert torch.equal(load_E, block.routing.load_E())
