"""What the routing monitor logs, against a recomputation token by token."""

import math
from functools import partial

import pytest
import torch
from callback_support import Recorder, digits, make_trainer, read_scalars, vision_task

from app.moe import Dense, Ternary, TopAny, TopK, TopP
from callbacks import RoutingMonitor

STATISTICS = {
    "active_experts", "experts_per_token", "unrouted_fraction", "router_entropy", "load_cv",
    "load_max",
}  # fmt: skip


def naive(routings, active: list[int], top_any: bool) -> dict[str, float]:
    """The statistics of several batches, with plain loops in Python."""
    tokens = pairs = unrouted = entropy = 0
    load = dict.fromkeys(active, 0)
    for routing in routings:
        probs = getattr(routing, "probs_TE", routing.gates_TE).detach().double().tolist()
        hard = routing.mask_TE if not top_any else routing.hard_gates_TE.detach() > 0
        for taken, own, p in zip(routing.mask_TE.tolist(), hard.tolist(), probs, strict=True):
            tokens += 1
            pairs += sum(taken)
            unrouted += not any(own)
            entropy -= sum(each * math.log(each) for each in p if each > 0)
            for expert in active:
                load[expert] += taken[expert]
    mean = sum(load.values()) / len(active)
    variance = sum((n - mean) ** 2 for n in load.values()) / len(active)
    return {
        "active_experts": len(active),
        "experts_per_token": pairs / tokens,
        "unrouted_fraction": unrouted / tokens,
        "router_entropy": entropy / tokens,
        "load_cv": math.sqrt(variance) / mean,
        "load_max": max(load.values()) / mean,
    }


@pytest.mark.parametrize("router", [TopAny, Dense, TopK, TopP, Ternary])
def test_statistics(tmp_path, router):
    """Training statistics of each interval and validation statistics of each run, every tag."""
    task, recorder = vision_task(router, num_experts=4, slots=6), Recorder()
    if router is TopAny:
        with torch.no_grad():
            for block in task.blocks.values():
                block.router.threshold.fill_(0.1)
    trainer = make_trainer(
        tmp_path, recorder, RoutingMonitor(3), limit_train_batches=7, limit_val_batches=2,
        max_epochs=2, num_sanity_val_steps=1,
    )  # fmt: skip
    trainer.fit(task, digits())
    scalars = read_scalars(tmp_path / "log")
    tags = {tag for tag in scalars if "routing/" in tag}
    assert tags == {
        f"{kind}/blocks.{layer}/{statistic}"
        for kind in ("routing", "val_routing") for layer in (0, 1) for statistic in STATISTICS
    }  # fmt: skip
    train = {3: slice(0, 3), 6: slice(3, 6), 9: slice(6, 9), 12: slice(9, 12)}
    val = {7: slice(0, 2), 14: slice(2, 4)}
    for kind, kept, intervals in (
        ("routing", recorder.train, train), ("val_routing", recorder.val, val)
    ):  # fmt: skip
        for layer in ("blocks.0", "blocks.1"):
            for statistic in STATISTICS:
                logged = scalars[f"{kind}/{layer}/{statistic}"]
                assert [step for step, _ in logged] == list(intervals)
                for (_, value), part in zip(logged, intervals.values(), strict=True):
                    routings = [each[layer] for each in kept[part]]
                    expected = naive(routings, [0, 1, 2, 3], router is TopAny)[statistic]
                    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6), statistic


def test_steps_and_not_micro_batches_are_counted(tmp_path):
    """With four micro-batches a step: logged once each second step, over all eight batches."""
    task, recorder = vision_task(TopK, 4, 4), Recorder()
    trainer = make_trainer(
        tmp_path, recorder, RoutingMonitor(2), limit_train_batches=18, limit_val_batches=0,
        accumulate_grad_batches=4,
    )  # fmt: skip
    trainer.fit(task, digits())
    logged = read_scalars(tmp_path / "log")["routing/blocks.1/load_max"]
    assert [step for step, _ in logged] == [2, 4]
    for (_, value), part in zip(logged, (slice(0, 8), slice(8, 16)), strict=True):
        routings = [each["blocks.1"] for each in recorder.train[part]]
        assert value == pytest.approx(naive(routings, [0, 1, 2, 3], False)["load_max"], rel=1e-5)


def test_training_is_the_same_with_and_without(tmp_path):
    states = []
    for callbacks in ([], [RoutingMonitor(1)]):
        task = vision_task(partial(TopK, k=1), 4, 4)
        make_trainer(tmp_path, *callbacks, limit_train_batches=3).fit(task, digits())
        states.append(task.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_dense_network_logs_nothing(tmp_path):
    task = vision_task()
    for block in task.network.blocks:
        block.mlp = torch.nn.Identity()
    task.blocks = {}
    trainer = make_trainer(tmp_path, RoutingMonitor(1), limit_train_batches=2, limit_val_batches=1)
    trainer.fit(task, digits())
    assert not [tag for tag in read_scalars(tmp_path / "log") if "routing" in tag]


def test_interval_must_be_positive():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        RoutingMonitor(0)
