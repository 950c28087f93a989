"""1, 2 and 4 processes on the same batches, and FSDP2, run the same trajectory.

In float64, so that only the order of sums differs: everything agrees to 1e-9 of its size. With
experts born and gone, and a validation set that no number of processes divides.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from callback_support import (
    Recorder,
    digits,
    make_trainer,
    on_processes,
    same,
    vision_task,
)
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor

from app.moe import Ternary, TopAny, TopK
from app.moe.sharded import full
from app.sharding import FSDP2
from callbacks import (
    AdaptiveExperts,
    Checkpoint,
    DefaultVectors,
    LossFreeBalance,
    MetricsTable,
    NumericalGuards,
    RoutingMonitor,
)

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
VALIDATED = 43  # in batches of 20: the last has 3 samples, fewer than 4 processes


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
    options["losses"] |= {"reward": 1e-2}
    return vision_task(partial(Ternary, k=2), 4, 4, adamw, **options), []


def run(folder: Path, method: str, options: dict[str, Any], ckpt_path: Any = None) -> dict:
    """18 steps of 32 samples over all processes, in two epochs, and what they led to."""
    task, callbacks = task_and_callbacks(method)
    task.double()
    recorder = Recorder()
    trainer = make_trainer(
        folder, recorder, *callbacks, NumericalGuards(), RoutingMonitor(3), MetricsTable(),
        Checkpoint(save_top_k=0, save_last=True, every_n_train_steps=7),
        plugins=[DoublePrecision()], max_epochs=2, limit_train_batches=9, **options,
    )  # fmt: skip
    data = digits(batch_size=32, eval_batch_size=20, val_fraction=0.03)
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
        "validated": data.num_val if hasattr(data, "num_val") else None,
    }


METHODS = ("dynmoe", "default", "tcmoe")


def runs(folder: Path, world: int) -> dict[str, dict]:
    """All methods by DDP, on two processes by FSDP2 as well."""
    ddp = {"devices": world, "strategy": "ddp" if world > 1 else "auto"}
    results = {method: run(folder / method, method, ddp) for method in METHODS}
    if world == 2:
        for method in METHODS:
            options = {"devices": 2, "strategy": FSDP2()}
            results[f"{method}_fsdp2"] = run(folder / f"{method}_fsdp2", method, options)
    return results


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory):
    """Folder, and by number of processes what each process has of each run."""
    folder = tmp_path_factory.mktemp("equal")
    return folder, {
        1: [runs(folder / "1", 1)],
        2: on_processes(2, runs, folder / "2", 2),
        4: on_processes(4, runs, folder / "4", 4),
    }


CASES = [(world, method, method) for world in (2, 4) for method in METHODS]
CASES += [(2, method, f"{method}_fsdp2") for method in METHODS]


def mean_loss(ranks: list[dict], name: str) -> Tensor:
    return torch.stack([rank[name]["losses"] for rank in ranks]).mean(0)


@pytest.mark.parametrize(("world", "method", "name"), CASES)
def test_same_trajectory(all_runs, world, method, name):
    """Losses of all steps, weights, default vectors, biases, moments of the optimizer, events."""
    _, results = all_runs
    one, ranks = results[1][0][method], results[world]
    torch.testing.assert_close(mean_loss(ranks, name), one["losses"], **CLOSE)
    for part in ("state", "moments"):
        for key, value in one[part].items():
            for rank in ranks:
                torch.testing.assert_close(rank[name][part][key], value, **CLOSE, msg=key)
    for rank in ranks:
        assert rank[name]["events"] == one["events"]
        assert same(rank[name]["state"], ranks[0][name]["state"]), "bit for bit on all processes"
