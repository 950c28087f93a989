"""Two processes that share each batch do what one process does, and never wait for ever."""

import os
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
    RoutingPictures,
)
from tests.callbacks.callback_support import (
    DDP,
    Recorder,
    Toy,
    digits,
    fit,
    make_trainer,
    on_two_processes,
    read_rows,
    read_scalars,
    same,
    tokens,
    toy_block,
    vision_task,
)

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def adaptive_run(folder: Path, options: dict, ckpt_path: Path | None = None) -> dict:
    """DynMoE with births and deaths, validation and tables; the batch is 32 over all processes."""
    adaptive, recorder = AdaptiveExperts(min_load_fraction=0.4), Recorder()
    task = vision_task(num_experts=3, slots=5, losses={"topany": 1e-2})
    with torch.no_grad():
        for block in task.blocks.values():
            block.router.threshold.fill_(0.1)
    saving = ModelCheckpoint(None, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        folder, recorder, adaptive, RoutingMonitor(2), RoutingPictures(layers=1), MetricsTable(),
        RandomState(), saving, max_epochs=2, limit_train_batches=9, limit_val_batches=1, **options,
    )  # fmt: skip
    trainer.fit(task, digits(), ckpt_path=ckpt_path)
    return {
        "events": adaptive.events,
        "masks": {name: block.active_E for name, block in task.blocks.items()},
        "losses": torch.tensor(recorder.losses),
        "weights": dict(task.network.state_dict()),
        "metrics": trainer.callback_metrics,
    }


@pytest.fixture(scope="module")
def adaptive_pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adaptive")
    one = adaptive_run(folder / "one", {})
    return folder, one, on_two_processes(adaptive_run, folder / "two", DDP)


def test_same_births_and_deaths(adaptive_pair):
    """On both ranks and as in one process: events with all their counts, and the masks."""
    _, one, two = adaptive_pair
    assert {event["event"] for event in one["events"]} >= {"birth", "death"}
    for rank in two:
        assert rank["events"] == one["events"]
        assert same(rank["masks"], one["masks"])


def test_same_weights_on_both_ranks(adaptive_pair):
    _, one, two = adaptive_pair
    assert same(two[0]["weights"], two[1]["weights"])
    for name, value in one["weights"].items():
        torch.testing.assert_close(two[0]["weights"][name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_same_loss_curve(adaptive_pair):
    """18 steps, births and deaths between them: the mean of the ranks is the one process's."""
    _, one, two = adaptive_pair
    mean = (two[0]["losses"] + two[1]["losses"]) / 2
    assert len(mean) == 18 and one["losses"][0] != one["losses"][-1]
    torch.testing.assert_close(mean, one["losses"], rtol=1e-4, atol=0)
    assert not torch.equal(two[0]["losses"], two[1]["losses"]), "each rank has its own images"


def test_one_process_writes_the_tables(adaptive_pair):
    """The same files as of one process; the routing statistics are over both ranks."""
    folder, _, _ = adaptive_pair
    one, two = folder / "one" / "log", folder / "two" / "log"
    assert read_rows(two / "expert_events.csv") == read_rows(one / "expert_events.csv")
    left, right = read_rows(one / "metrics.csv"), read_rows(two / "metrics.csv")
    assert [row["step"] for row in left] == [row["step"] for row in right] == ["9", "18"]
    for a, b in zip(left, right, strict=True):
        assert float(a["val/loss"]) == pytest.approx(float(b["val/loss"]), rel=1e-4)
        assert float(a["val/accuracy"]) == pytest.approx(float(b["val/accuracy"]), abs=0.006)
    pictures = sorted(path.name for path in (one / "pictures").iterdir())
    assert len(pictures) == 4 and "patches.png" in pictures
    assert sorted(path.name for path in (two / "pictures").iterdir()) == pictures
    alone, shared = read_scalars(one), read_scalars(two)
    tags = {tag for tag in alone if "routing/" in tag or tag.startswith("experts/")}
    assert {"compute/gflops_per_image", "val_compute/gflops_per_image"} <= set(alone)
    assert len(tags) == 2 * (20 + 18 + 4) and tags <= set(shared)
    for tag in tags:
        assert [step for step, _ in alone[tag]] == [step for step, _ in shared[tag]]
        values = [value for _, value in alone[tag]]
        assert [value for _, value in shared[tag]] == pytest.approx(values, rel=1e-4, abs=1e-6)


def resumed_run(folder: Path, options: dict) -> dict:
    path = folder.parent / "two" / "log" / "checkpoints" / "step=4.ckpt"
    return adaptive_run(folder / "resumed", options, path)


def test_resumed_within_a_window(adaptive_pair):
    """Records of both ranks are in the checkpoint: events and weights as uninterrupted."""
    folder, _, two = adaptive_pair
    resumed = on_two_processes(resumed_run, folder / "again", DDP)
    for rank, whole in zip(resumed, two, strict=True):
        assert rank["events"] == whole["events"]
        for name, value in whole["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=1e-5, atol=1e-6)
    logged = read_scalars(folder / "again" / "resumed" / "log")
    before = read_scalars(folder / "two" / "log")
    for tag in (tag for tag in logged if "routing/" in tag):
        expected = [value for step, value in before[tag] if step > 4]
        assert [value for _, value in logged[tag]] == pytest.approx(expected, rel=1e-5)


def vectors_run(folder: Path, options: dict, ckpt_path: Path | None = None) -> dict:
    """Default vectors and balancing biases over 20 steps of 2 micro-batches."""
    task = vision_task(
        partial(TopK, k=1), 4, 4, partial(torch.optim.AdamW, lr=1e-3),
        block={"default_vectors": "ema"}, schedule="constant", warmup=0.0,
    )  # fmt: skip
    recorder = Recorder()
    trainer = make_trainer(
        folder, recorder, DefaultVectors(0.9), LossFreeBalance(0.001), RoutingMonitor(5),
        max_epochs=1, max_steps=20, accumulate_grad_batches=2, limit_val_batches=0, **options,
    )  # fmt: skip
    trainer.fit(task, digits())
    return {
        "steps": trainer.global_step,
        "vectors": {name: block.default_ED for name, block in task.blocks.items()},
        "seen": {name: block.default_seen_E for name, block in task.blocks.items()},
        "biases": {name: block.router.balance_bias_E for name, block in task.blocks.items()},
        "losses": torch.tensor(recorder.losses),
    }


def test_same_default_vectors(tmp_path):
    """Bit-identical on both ranks after 20 steps, and those of one process within rounding."""
    one = vectors_run(tmp_path / "one", {})
    two = on_two_processes(vectors_run, tmp_path / "two", DDP)
    assert [run["steps"] for run in (one, *two)] == [20, 20, 20]
    for part in ("vectors", "seen", "biases"):
        assert same(two[0][part], two[1][part]), part
    for layer, vectors in one["vectors"].items():
        assert vectors.abs().max() > 1e-3
        torch.testing.assert_close(two[0]["vectors"][layer], vectors, rtol=1e-3, atol=1e-5)
        assert torch.equal(two[0]["seen"][layer], one["seen"][layer])
        torch.testing.assert_close(two[0]["biases"][layer], one["biases"][layer], **CLOSE)
    mean = (two[0]["losses"] + two[1]["losses"]) / 2
    torch.testing.assert_close(mean, one["losses"], rtol=1e-4, atol=0)


# What each rank sees. Expert 1 has tokens on rank 0 only, 2 on rank 1 only, 3 on none; in the
# second batch rank 1 routes nothing at all.
ONE_SIDED = {0: ("0011", "0017", "0011"), 1: ("0002", "6666", "0002")}


def one_sided_run(folder: Path, options: dict) -> dict:
    block = toy_block(num_experts=4, slots=5)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in block.experts.parameters():
            parameter.normal_(std=0.3)
    batches = [tokens(text) for text in ONE_SIDED[int(os.environ["LOCAL_RANK"])]]
    adaptive = AdaptiveExperts("average", window=(0.0, 0.67))
    task = Toy(block, optimizer=partial(torch.optim.SGD, lr=1e-3, momentum=0.9))
    trainer = fit(folder, task, batches, adaptive, **options)
    return {
        "events": [(e["event"], e["slot"], e["tokens"], e["unrouted_tokens"])
                   for e in adaptive.events],
        "active": block.active_slots(),
        "vector": block.router.weight[3].detach(),
        "weights": dict(block.state_dict()),
        "steps": trainer.global_step,
    }  # fmt: skip


def test_an_expert_with_tokens_on_one_rank_only(tmp_path):
    """It neither dies nor hangs; one without tokens on any rank dies; R_S is over both ranks."""
    options = DDP | {"use_distributed_sampler": False}
    two = on_two_processes(one_sided_run, tmp_path, options, seconds=60)
    for rank in two:
        assert rank["steps"] == 3
        assert rank["events"] == [("death", 3, 16, 5), ("birth", 3, 16, 5)]
        assert rank["active"] == [0, 1, 2, 3]
    assert same(two[0]["weights"], two[1]["weights"])
    expected = tokens("7")[0] + 4 * tokens("6")[0]
    torch.testing.assert_close(two[0]["vector"], expected / expected.norm(), rtol=0, atol=1e-2)


def failing_run(folder: Path) -> None:
    raise RuntimeError("on purpose")


def waiting_run(folder: Path) -> None:
    if os.environ["LOCAL_RANK"] == "0":
        import time

        time.sleep(60)


@pytest.mark.parametrize("function", [failing_run, waiting_run])
def test_the_harness_sees_errors_and_hangs(tmp_path, function):
    with pytest.raises(pytest.fail.Exception, match=r"on purpose|within 2 s"):
        on_two_processes(function, tmp_path, seconds=2 if function is waiting_run else 60)
