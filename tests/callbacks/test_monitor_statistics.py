"""What the routing monitor logs, against a recomputation token by token."""

import math
from functools import partial

import pytest
import torch
from callback_support import (
    Recorder,
    Toy,
    digits,
    fit,
    make_trainer,
    read_scalars,
    tokens,
    toy_block,
    vision_task,
)

from app.flops import forward_flops
from app.models import Decoder
from app.moe import Dense, MoEBlock, SwiGLUExperts, Ternary, TopAny, TopK, TopP
from app.tasks import LanguageModeling
from callbacks import DefaultVectors, LossFreeBalance, RoutingMonitor
from data.text import TextData

STATISTICS = {
    "active_experts", "experts_per_token", "unrouted_fraction", "router_entropy", "load_cv",
    "load_max",
}  # fmt: skip
OWN_STATISTICS = {
    TopAny: {"threshold_mean", "share_k0", "share_k1", "share_k2", "share_k3plus"},
    Ternary: {
        "executed_experts", "flops_saved", "share_positive", "share_negative", "share_null",
    },
}  # fmt: skip


def naive(routings, active: list[int], top_any: bool) -> dict[str, float]:
    """The statistics of several batches, with plain loops in Python."""
    tokens = pairs = unrouted = entropy = 0
    load = dict.fromkeys(active, 0)
    for routing in routings:
        probs = getattr(routing, "probs_TE", routing.gates_TE).detach().double().tolist()
        if hasattr(routing, "logits_TR"):  # all levels apart, and the nulls
            probs = routing.logits_TR.detach().double().softmax(1).tolist()
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


def naive_own(routings, router: type) -> dict[str, float]:
    """What one kind of routing has in addition, token by token."""
    if router is TopAny:
        counts = [sum(row) for r in routings for row in (r.hard_gates_TE > 0.5).tolist()]
        shares = {f"share_k{k}": counts.count(k) / len(counts) for k in range(3)}
        more = sum(count >= 3 for count in counts) / len(counts)
        return shares | {"share_k3plus": more, "threshold_mean": 0.1}
    if router is not Ternary:
        return {}
    positive = negative = null = executed = count = 0
    for routing in routings:
        chosen = routing.chosen_TLE.tolist()
        for (plus, minus), nulls in zip(chosen, routing.chosen_null_T.tolist(), strict=True):
            count += 1
            positive += sum(plus)
            negative += sum(minus)
            null += nulls
            executed += len({e for e in range(len(plus)) if plus[e] or minus[e]})
    assert positive + negative + null == 2 * count
    return {
        "executed_experts": executed / count,
        "flops_saved": 1 - executed / count / 2,
        "share_positive": positive / (2 * count),
        "share_negative": negative / (2 * count),
        "share_null": null / (2 * count),
    }


@pytest.mark.parametrize("router", [TopAny, Dense, TopK, TopP, Ternary])
def test_statistics(tmp_path, router):
    """Training statistics of each interval and validation statistics of each run, every tag."""
    task, recorder = vision_task(router, num_experts=4, slots=6), Recorder()
    if router is TopAny:
        with torch.no_grad():
            for block in task.blocks.values():
                block.router.threshold.fill_(0.1)
                block.router.threshold.requires_grad_(False)
    trainer = make_trainer(
        tmp_path, recorder, RoutingMonitor(3), limit_train_batches=7, limit_val_batches=2,
        max_epochs=2, num_sanity_val_steps=1,
    )  # fmt: skip
    trainer.fit(task, digits())
    scalars = read_scalars(tmp_path / "log")
    tags = {tag for tag in scalars if "routing/" in tag}
    assert tags == {
        f"{kind}/blocks.{layer}/{statistic}"
        for kind in ("routing", "val_routing") for layer in (0, 1)
        for statistic in STATISTICS | OWN_STATISTICS.get(router, set())
    }  # fmt: skip
    train = {3: slice(0, 3), 6: slice(3, 6), 9: slice(6, 9), 12: slice(9, 12)}
    val = {7: slice(0, 2), 14: slice(2, 4)}
    for kind, kept, intervals in (
        ("routing", recorder.train, train), ("val_routing", recorder.val, val)
    ):  # fmt: skip
        for layer in ("blocks.0", "blocks.1"):
            for statistic in STATISTICS | OWN_STATISTICS.get(router, set()):
                logged = scalars[f"{kind}/{layer}/{statistic}"]
                assert [step for step, _ in logged] == list(intervals)
                for (_, value), part in zip(logged, intervals.values(), strict=True):
                    routings = [each[layer] for each in kept[part]]
                    expected = naive(routings, [0, 1, 2, 3], router is TopAny)
                    expected |= naive_own(routings, router)
                    assert value == pytest.approx(expected[statistic], rel=1e-5, abs=1e-6), (
                        statistic
                    )


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
    scalars = read_scalars(tmp_path / "log")
    assert not [tag for tag in scalars if "routing" in tag]
    cost = {
        value for tag in scalars if "compute/gflops_per_image" in tag for _, value in scalars[tag]
    }
    assert len(cost) == 1 and cost.pop() > 0


def test_interval_must_be_positive():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        RoutingMonitor(0)


def test_default_vectors(tmp_path):
    """Norm, drift and distance of V from copies that the test takes itself, step by step."""
    block = toy_block(TopK, 4, 5, default_vectors="ema")

    class Copies(RoutingMonitor):
        """Keeps V and the batches' mean outputs; runs just before the monitor that logs."""

        def on_train_batch_end(self, trainer, pl_module, *_):
            vectors.append(block.default_ED[:4].double().clone())
            sums.append((block.output_sums.sum_ED[:4].double(), block.output_sums.weight_E[:4]))

        def on_validation_batch_end(self, *_):
            pass

    vectors, sums = [], []
    batches = [tokens(text) for text in ("01230123", "00112", "2", "001123", "0123", "0012")]
    task = Toy(block, optimizer=partial(torch.optim.SGD, lr=0.1))
    copies = Copies(100)
    fit(tmp_path, task, batches, copies, DefaultVectors(0.5), RoutingMonitor(2), val=batches[:1])
    scalars = read_scalars(tmp_path / "log")
    assert not [tag for tag in scalars if "val_routing" in tag and "default" in tag]
    logged = {
        name: [value for _, value in scalars[f"routing/blocks.0/default_{name}"]]
        for name in ("norm", "drift", "distance")
    }
    assert [len(values) for values in logged.values()] == [3, 2, 3]
    for i, step in enumerate((1, 3, 5)):
        V = vectors[step]
        assert logged["norm"][i] == pytest.approx(V.norm(dim=1).mean().item(), rel=1e-5)
        if i:
            drift = (V - vectors[step - 2]).norm() / vectors[step - 2].norm()
            assert logged["drift"][i - 1] == pytest.approx(drift.item(), rel=1e-5)
        distances = []
        for expert in range(4):
            weight = sum(sums[j][1][expert] for j in (step - 1, step))
            if weight > 0:
                mean = sum(sums[j][0][expert] for j in (step - 1, step)) / weight
                distances.append(((mean - V[expert]).norm() / V[expert].norm()).item())
        mean = sum(distances) / len(distances)
        assert logged["distance"][i] == pytest.approx(mean, rel=1e-5) and mean > 0.01


def test_balancing_biases(tmp_path):
    """The largest and the smallest of the active experts, after the step's move."""
    block = toy_block(partial(TopK, k=1), 3, 5)
    monitor, balance = RoutingMonitor(1), LossFreeBalance(0.01)
    fit(tmp_path, Toy(block), [tokens("0001"), tokens("0000")], balance, monitor)
    scalars = read_scalars(tmp_path / "log")
    # Loads 3 1 0 around 4/3, then 4 0 0: biases -0.01 0.01 0.01, then -0.02 0.02 0.02.
    for name, expected in (("max", [0.01, 0.02]), ("min", [-0.01, -0.02])):
        logged = [value for _, value in scalars[f"routing/blocks.0/bias_{name}"]]
        assert logged == pytest.approx(expected)
    fit(tmp_path / "without", Toy(toy_block(TopK)), [tokens("01")], RoutingMonitor(1))
    assert not [tag for tag in read_scalars(tmp_path / "without" / "log") if "bias" in tag]


class Passes(Recorder):
    """Also keeps the FLOPs of each batch, from a pass of its own with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, list[tuple[int, float]]] = {"": [], "val_": []}

    def _measure(self, split: str, task, inputs) -> None:
        records = {name: block.routing for name, block in task.blocks.items()}
        units = inputs.shape[0] if inputs.is_floating_point() else inputs.numel()
        self.flops[split].append((units, forward_flops(task.network, inputs)))
        for name, block in task.blocks.items():
            block.routing = records[name]

    @staticmethod
    def _inputs(batch):
        return batch[0] if isinstance(batch, list | tuple) else batch[:, :-1].clamp_min(0)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._measure("", pl_module, self._inputs(batch))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, *_) -> None:
        self._measure("val_", pl_module, self._inputs(batch))

    def mean(self, split: str, part: slice) -> float:
        kept = self.flops[split][part]
        return sum(units * flops for units, flops in kept) / sum(units for units, _ in kept) / 1e9


@pytest.mark.parametrize("modality", ["image", "token"])
def test_compute(tmp_path, modality):
    """GFLOPs are the mean over images or tokens, though batches differ in size and routing.

    Weights stay as they are (learning rate 0), so that a second pass routes as the first did.
    """
    still = partial(torch.optim.SGD, lr=0.0)
    torch.manual_seed(0)
    if modality == "image":
        task, data = vision_task(TopAny, 4, 4, still), digits(eval_batch_size=200)
    else:
        moe = partial(MoEBlock, router=TopAny, experts=SwiGLUExperts)
        network = Decoder(dim=16, depth=2, num_heads=2, max_length=16, moe=moe, moe_blocks=[1])
        task = LanguageModeling(network, still, sample_tokens=0)
        (tmp_path / "book.txt").write_text("It was the best of times, it was the worst. " * 40)
        data = TextData(
            str(tmp_path / "book.txt"), block_size=16, batch_size=4, eval_batch_size=5,
            cache_dir=str(tmp_path),
        )  # fmt: skip
    passes = Passes()
    trainer = make_trainer(tmp_path, RoutingMonitor(2), passes, max_epochs=1, limit_train_batches=4)
    trainer.fit(task, data)
    scalars = read_scalars(tmp_path / "log")
    train = scalars[f"compute/gflops_per_{modality}"]
    assert [step for step, _ in train] == [2, 4]
    for (_, value), part in zip(train, (slice(0, 2), slice(2, 4)), strict=True):
        assert value == pytest.approx(passes.mean("", part), rel=1e-6)
    ((_, value),) = scalars[f"val_compute/gflops_per_{modality}"]
    assert len(passes.flops["val_"]) > 1
    assert value == pytest.approx(passes.mean("val_", slice(None)), rel=1e-6)
    assert len({flops for _, flops in passes.flops[""]}) > 1, "the routing differs by batch"
