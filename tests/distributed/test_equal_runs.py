"""1, 2 and 4 processes on the same batches, and FSDP2, run the same trajectory.

In float64, so that only the order of sums differs: everything agrees to 1e-9 of its size. With
experts born and gone, and a validation set that no number of processes divides.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision

from app.errors import DivergedError
from app.moe import Ternary, TopAny, TopK
from app.moe.sharded import full
from app.tasks.sharding import FSDP2
from callbacks import (
    AdaptiveExperts,
    Checkpoint,
    DefaultVectors,
    LossFreeBalance,
    MetricsTable,
    NumericalGuards,
    RoutingMonitor,
)
from tests.callbacks.callback_support import (
    Recorder,
    Toy,
    digits,
    fit,
    make_trainer,
    on_processes,
    read_rows,
    read_scalars,
    same,
    tokens,
    toy_block,
    vision_task,
)

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def task_and_callbacks(method: str) -> tuple[Any, list[Any]]:
    """DynMoE, Default MoE with balancing biases, TC-MoE: as their methods are configured."""
    adamw = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.05)
    if method == "dynmoe":
        task = vision_task(TopAny, 3, 5, adamw, losses={"topany": 1e-2, "efficiency": 1e-2})
        for block in task.blocks.values():
            torch.nn.init.constant_(block.router.threshold, 0.1)
        return task, [AdaptiveExperts(min_load_fraction=0.4)]
    options = {"losses": {"load_balance": 1e-2}, "balance_over": "ranks"}
    if method == "default":
        block = {"default_vectors": "ema", "shared_experts": 1}
        task = vision_task(partial(TopK, k=1), 4, 4, adamw, block=block, **options)
        return task, [DefaultVectors(0.9), LossFreeBalance(0.01)]
    options["losses"] |= {"reward": 1e-2, "entropy": 1e-2}
    return vision_task(partial(Ternary, k=2), 4, 4, adamw, **options), []


def run(folder: Path, method: str, options: dict[str, Any], ckpt_path: Any = None) -> dict:
    """18 steps of 32 samples over all processes, in two epochs, and what they led to."""
    task, callbacks = task_and_callbacks(method)
    task.double()
    recorder = Recorder()
    trainer = make_trainer(
        folder, recorder, *callbacks, NumericalGuards(), RoutingMonitor(3), MetricsTable(),
        Checkpoint(filename="{step}", save_top_k=-1, every_n_train_steps=5),
        plugins=[DoublePrecision()], max_epochs=2, limit_train_batches=9, **options,
    )  # fmt: skip
    data = digits(batch_size=32, eval_batch_size=20, val_fraction=0.031)
    trainer.fit(task, data, ckpt_path=ckpt_path)
    adaptive = [each for each in callbacks if isinstance(each, AdaptiveExperts)]
    state = {name: full(value).clone() for name, value in task.network.state_dict().items()}
    moments = {}
    for index, parameter in enumerate(task.network.parameters()):
        held = trainer.optimizers[0].state[parameter]
        moments |= {f"{index}.{key}": full(held[key]).clone() for key in ("exp_avg", "exp_avg_sq")}
    return {
        "events": adaptive[0].events if adaptive else [],
        "losses": torch.tensor(recorder.losses, dtype=torch.float64),
        "state": state,
        "moments": moments,
    }


METHODS = ("dynmoe", "default", "tcmoe")
BETWEEN = "log/checkpoints/step=5.ckpt"  # within a recording window


def runs(folder: Path, world: int) -> dict[str, Any]:
    """All methods by DDP; on two processes by FSDP2 as well, each resumed from the other's."""
    ddp = {"devices": world, "strategy": "ddp" if world > 1 else "auto"}
    results: dict[str, Any] = {method: run(folder / method, method, ddp) for method in METHODS}
    if world == 2:
        fsdp2 = {"devices": 2, "strategy": FSDP2()}
        for method in METHODS:
            name = f"{method}_fsdp2"
            results[name] = run(folder / name, method, fsdp2 | {"strategy": FSDP2()})
        for name, options, source in (
            ("dynmoe_to_ddp", ddp, "dynmoe_fsdp2"),
            ("dynmoe_to_fsdp2", fsdp2, "dynmoe"),
        ):
            results[name] = run(folder / name, "dynmoe", options, folder / source / BETWEEN)
        results["guarded"] = guarded_runs(folder, ddp | {"use_distributed_sampler": False})
    return results


def guarded_runs(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The second process has a bad third batch: one run stops, one skips it."""
    batches = [tokens(text) for text in ("0011", "0120", "2210", "0212")]
    if os.environ["LOCAL_RANK"] == "1":
        batches[2] = batches[2] / 0.0
    results: dict[str, Any] = {}
    for mode in ("stop", "skip"):
        torch.manual_seed(0)
        task = Toy(toy_block(), optimizer=partial(torch.optim.AdamW, lr=1e-3))
        guards = NumericalGuards(mode)
        try:
            fit(folder / mode, task, batches, guards, **options)
        except DivergedError as error:
            results["said"] = str(error)
        results[mode] = dict(task.state_dict())
    return results | {"skipped": guards.skipped}


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory):
    """Folder, and by number of processes what each process has of each run."""
    folder = tmp_path_factory.mktemp("equal")
    return folder, {
        1: [runs(folder / "1", 1)],
        2: on_processes(2, runs, folder / "2", 2, seconds=200),
        4: on_processes(4, runs, folder / "4", 4, seconds=200),
    }


CASES = [(world, method, method) for world in (2, 4) for method in METHODS]
CASES += [(2, method, f"{method}_fsdp2") for method in METHODS]


@pytest.mark.parametrize(("world", "method", "name"), CASES)
def test_same_trajectory(all_runs, world, method, name):
    """Losses of all steps, weights, default vectors, biases, moments of the optimizer, events."""
    _, results = all_runs
    one, ranks = results[1][0][method], [rank[name] for rank in results[world]]
    losses = torch.stack([rank["losses"] for rank in ranks]).mean(0)
    torch.testing.assert_close(losses, one["losses"], **CLOSE)
    for rank in ranks:
        for part in ("state", "moments"):
            for key, value in one[part].items():
                torch.testing.assert_close(rank[part][key], value, **CLOSE, msg=f"{part} {key}")
        assert rank["events"] == one["events"]
        assert same(rank["state"], ranks[0]["state"]), "bit for bit on all processes"
    kinds = {event["event"] for event in one["events"]}
    assert kinds >= ({"birth", "death"} if method == "dynmoe" else set())


@pytest.mark.parametrize(("world", "method", "name"), CASES)
def test_same_tables_and_statistics(all_runs, world, method, name):
    """metrics.csv, expert_events.csv and TensorBoard; each of the 43 samples is validated once, in
    batches of 20, 20 and 3, or 20 and 23 where 3 are fewer than the processes."""
    folder, _ = all_runs
    one, many = folder / "1" / method / "log", folder / str(world) / name / "log"
    left, right = read_rows(one / "metrics.csv"), read_rows(many / "metrics.csv")
    assert len(left) == len(right) == 2
    for a, b in zip(left, right, strict=True):
        for column in ("val/loss", "val/accuracy", "val/accuracy_top5", "train/accuracy"):
            # Single precision: so Lightning and torchmetrics keep their sums.
            assert float(b[column]) == pytest.approx(float(a[column]), rel=1e-5), column
        right_ones = 43 * float(b["val/accuracy"])
        assert right_ones == pytest.approx(round(right_ones), abs=1e-4)
    if method == "dynmoe":
        assert read_rows(many / "expert_events.csv") == read_rows(one / "expert_events.csv")
    alone, shared = read_scalars(one), read_scalars(many)
    tags = [tag for tag in alone if "routing/" in tag or tag.startswith(("experts/", "compute"))]
    assert len(tags) > 20
    for tag in tags:
        values = [value for _, value in alone[tag]]
        assert [value for _, value in shared[tag]] == pytest.approx(
            values,
            rel=1e-6,
            abs=1e-6,  # TensorBoard keeps single precision
        ), tag


@pytest.mark.parametrize("name", ["dynmoe_to_ddp", "dynmoe_to_fsdp2"])
def test_resumed_under_the_other_strategy(all_runs, name):
    """A checkpoint is the same file whoever wrote it: DDP goes on where FSDP2 stopped, and back."""
    _, results = all_runs
    one = results[1][0]["dynmoe"]
    for rank in results[2]:
        assert len(rank[name]["losses"]) == 13 and rank[name]["events"] == one["events"]
        for part in ("state", "moments"):
            for key, value in one[part].items():
                torch.testing.assert_close(rank[name][part][key], value, **CLOSE, msg=key)


def test_all_processes_stop_or_skip_together(all_runs):
    """What one of them saw, both act on, in the same step and with the same words."""
    _, results = all_runs
    first, second = (rank["guarded"] for rank in results[2])
    assert first["said"] == second["said"]
    assert first["said"].startswith("step 3: the batch is not finite; training stops")
    assert first["skipped"] == second["skipped"] == [3]
    for mode in ("stop", "skip"):
        assert same(first[mode], second[mode])
        assert all(value.isfinite().all() for value in first[mode].values())
