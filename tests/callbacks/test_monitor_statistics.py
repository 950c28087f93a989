"""What the routing monitor logs, against a recomputation token by token."""

import math
from functools import partial

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.models import Decoder
from app.moe import Dense, MoEBlock, SwiGLUExperts, Ternary, TopAny, TopK, TopP
from app.moe.flops import forward_flops
from app.tasks import LanguageModeling
from callbacks import DefaultVectors, LossFreeBalance, RoutingMonitor, common
from callbacks.routing.monitor import HEADLINES
from data.text.module import TextData
from tests.callbacks.callback_support import (
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

BOTH = {
    "active_experts", "experts_per_token", "unrouted_fraction", "router_entropy",
    "router_entropy_marginal", "load_cv", "load_max", "load_min", "share_k0", "share_k1",
    "share_k2", "share_k3plus", "gate_mean", "gate_max", "gate_sum",
}  # fmt: skip
TRAINING = {"vector_similarity", "vector_similarity_max"}
OWN_STATISTICS = {
    TopAny: {"threshold_mean", "threshold_min", "threshold_max"},
    Ternary: {
        "executed_experts", "flops_saved", "share_positive", "share_negative", "share_null",
    },
}  # fmt: skip


def naive(routings, active: list[int], top_any: bool) -> dict[str, float]:
    """The statistics of several batches, with plain loops in Python."""
    tokens = pairs = entropy = 0
    gate_sizes = gate_sum = gate_top = 0.0
    load = dict.fromkeys(active, 0)
    taking, total = [], None
    for routing in routings:
        probs = getattr(routing, "probs_TE", routing.gates_TE).detach().double().tolist()
        if hasattr(routing, "logits_TR"):  # all levels apart, and the nulls
            probs = routing.logits_TR.detach().double().softmax(1).tolist()
        hard = (routing.mask_TE if not top_any else routing.hard_gates_TE.detach() > 0).tolist()
        gates = routing.gates_TE.detach().double().tolist()
        for taken, own, p, g in zip(routing.mask_TE.tolist(), hard, probs, gates, strict=True):
            tokens += 1
            pairs += sum(taken)
            taking.append(sum(own))
            entropy -= sum(each * math.log(each) for each in p if each > 0)
            total = p if total is None else [x + y for x, y in zip(total, p, strict=True)]
            executed = [g[expert] for expert in active if taken[expert]]
            gate_sizes += sum(abs(gate) for gate in executed)
            gate_sum += sum(executed)
            gate_top += max((abs(gate) for gate in executed), default=0.0)
            for expert in active:
                load[expert] += taken[expert]
    mean = sum(load.values()) / len(active)
    variance = sum((n - mean) ** 2 for n in load.values()) / len(active)
    marginal = [each / sum(total) for each in total]
    shares = {f"share_k{k}": taking.count(k) / tokens for k in range(3)}
    return shares | {
        "share_k3plus": sum(k >= 3 for k in taking) / tokens,
        "active_experts": len(active),
        "experts_per_token": pairs / tokens,
        "unrouted_fraction": shares["share_k0"],
        "router_entropy": entropy / tokens,
        "router_entropy_marginal": -sum(each * math.log(each) for each in marginal if each > 0),
        "load_cv": math.sqrt(variance) / mean,
        "load_max": max(load.values()) / mean,
        "load_min": min(load.values()) / mean,
        "gate_mean": gate_sizes / pairs,
        "gate_max": gate_top / tokens,
        "gate_sum": gate_sum / tokens,
    }


def naive_similarity(vectors: list[list[float]]) -> dict[str, float]:
    """Cosines of all pairs of routing vectors."""
    cosines = [
        sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)
        for i, a in enumerate(vectors)
        for b in vectors[:i]
    ]
    return {
        "vector_similarity": sum(cosines) / len(cosines),
        "vector_similarity_max": max(cosines),
    }


def naive_own(routings, router: type) -> dict[str, float]:
    """What one kind of routing has in addition, token by token."""
    if router is TopAny:
        return {"threshold_mean": 0.1, "threshold_min": 0.04, "threshold_max": 0.16}
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


class Vectors(Recorder):
    """Also keeps the routing vectors of the four active experts (or of all ternary outputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors: list[dict[str, list[list[float]]]] = []

    def on_train_batch_end(self, trainer, pl_module, *arguments) -> None:
        super().on_train_batch_end(trainer, pl_module, *arguments)
        kept = {}
        for name, block in pl_module.blocks.items():
            weight = block.router.weight.detach().double()
            ternary = isinstance(block.router, Ternary)
            kept[name] = (weight if ternary else weight[:4]).tolist()
        self.vectors.append(kept)


@pytest.mark.parametrize("router", [TopAny, Dense, TopK, TopP, Ternary])
def test_statistics(tmp_path, router):
    """Training statistics of each interval and validation statistics of each run, every tag."""
    slots = 4 if router is Ternary else 6
    task, recorder = vision_task(router, num_experts=4, slots=slots), Vectors()
    if router is TopAny:
        with torch.no_grad():
            for block in task.blocks.values():
                block.router.threshold[:4] = torch.tensor([0.04, 0.1, 0.1, 0.16])
                block.router.threshold.requires_grad_(False)
    trainer = make_trainer(
        tmp_path, recorder, RoutingMonitor(3), limit_train_batches=7, limit_val_batches=2,
        max_epochs=2, num_sanity_val_steps=1,
    )  # fmt: skip
    trainer.fit(task, digits())
    scalars = read_scalars(tmp_path / "log")
    own = BOTH | OWN_STATISTICS.get(router, set())
    statistics = {"routing": own | TRAINING, "val_routing": own}
    tags = {tag for tag in scalars if "routing/" in tag}
    assert tags == {
        f"{kind}/blocks.{layer}/{statistic}"
        for kind, keys in statistics.items() for layer in (0, 1) for statistic in keys
    }  # fmt: skip
    train = {3: slice(0, 3), 6: slice(3, 6), 9: slice(6, 9), 12: slice(9, 12)}
    val = {7: slice(0, 2), 14: slice(2, 4)}
    for kind, kept, intervals in (
        ("routing", recorder.train, train), ("val_routing", recorder.val, val)
    ):  # fmt: skip
        for layer in ("blocks.0", "blocks.1"):
            for number, (step, part) in enumerate(intervals.items()):
                routings = [each[layer] for each in kept[part]]
                expected = naive(routings, [0, 1, 2, 3], router is TopAny)
                expected |= naive_own(routings, router)
                if kind == "routing":
                    expected |= naive_similarity(recorder.vectors[step - 1][layer])
                for statistic in statistics[kind]:
                    logged = scalars[f"{kind}/{layer}/{statistic}"]
                    assert [at for at, _ in logged] == list(intervals)
                    value = logged[number][1]
                    assert value == pytest.approx(expected[statistic], rel=2e-5, abs=2e-6), (
                        statistic
                    )


def test_each_expert(tmp_path):
    """The detailed tier: loads, gates and thresholds by slot; histograms after each validation."""
    task, recorder = vision_task(TopAny, num_experts=3, slots=5), Recorder()
    trainer = make_trainer(
        tmp_path, recorder, RoutingMonitor(2, "detailed"), limit_train_batches=4,
        limit_val_batches=1, max_epochs=2,
    )  # fmt: skip
    trainer.fit(task, digits())
    scalars = read_scalars(tmp_path / "log")
    slots = {tag.rsplit("/", 1)[1] for tag in scalars if tag.startswith("experts/")}
    assert slots == {"00", "01", "02"}
    for number, part in enumerate((slice(0, 2), slice(2, 4))):
        masks = torch.cat([each["blocks.1"].mask_TE for each in recorder.train[part]])
        gates = torch.cat([each["blocks.1"].gates_TE.detach() for each in recorder.train[part]])
        load = [masks[:, e].sum().item() for e in range(3)]
        for e in range(3):
            expected = {
                "load": load[e] / (sum(load) / 3),
                "gate": gates[:, e][masks[:, e]].double().mean().item(),
            }
            for key, value in expected.items():
                logged = scalars[f"experts/blocks.1/{key}/{e:02}"][number][1]
                assert logged == pytest.approx(value, rel=1e-5)
    threshold = task.blocks["blocks.1"].router.threshold[2].item()
    assert scalars["experts/blocks.1/threshold/02"][-1] == (8, pytest.approx(threshold))
    assert [step for step, _ in scalars["val_experts/blocks.0/load/01"]] == [4, 8]
    events = EventAccumulator(str(tmp_path / "log"), size_guidance={"histograms": 0}).Reload()
    for layer in ("blocks.0", "blocks.1"):
        histograms = events.Histograms(f"histograms/{layer}/load")
        assert [each.step for each in histograms] == [4, 8]
        assert histograms[0].histogram_value.num == 3


def test_a_hundred_layers_log_a_bounded_number_of_tags(tmp_path):
    """Six headlines for each layer; of everything else the mean, the least and the largest."""
    monitor = RoutingMonitor(1)
    blocks = [toy_block(partial(TopK, k=1)) for _ in range(100)]
    fit(tmp_path, Toy(*blocks), [tokens("0011"), tokens("0122")], monitor, val=[tokens("01")])
    scalars = read_scalars(tmp_path / "log")
    layers = [tag for tag in scalars if tag.startswith(("routing/", "val_routing/"))]
    assert len(layers) == 100 * 2 * len(HEADLINES) and len(scalars) < 1400
    for split in ("", "val_"):
        own = [scalars[f"{split}routing/blocks.{i}/load_cv"][-1][1] for i in range(100)]
        for part, value in (("mean", sum(own) / 100), ("min", min(own)), ("max", max(own))):
            logged = scalars[f"{split}all_layers/load_cv_{part}"][-1][1]
            assert logged == pytest.approx(value, rel=1e-5)
    assert "all_layers/vector_similarity_mean" in scalars
    assert "all_layers/share_k3plus_max" in scalars


def test_reading_is_one_sum_over_all_processes(tmp_path, monkeypatch):
    """However many layers: one reduction for each interval, and nothing is read in between."""
    calls = []
    monkeypatch.setattr(common, "sum_over_ranks", lambda *each: calls.append(each))
    task = Toy(*(toy_block(TopK) for _ in range(7)))
    fit(tmp_path, task, [tokens("0123")] * 6, RoutingMonitor(3))
    assert [len(each) for each in calls] == [1, 1]


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


def test_settings_are_checked():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        RoutingMonitor(0)
    with pytest.raises(ValueError, match="brief or detailed, got long"):
        RoutingMonitor(detail="long")


def test_default_vectors(tmp_path):
    """Norm, drift and distance of V from copies that the test takes itself, step by step."""
    block = toy_block(TopK, 4, 5, default_vectors="ema")

    class Copies(RoutingMonitor):
        """Keeps V and the batches' mean outputs; runs just before the monitor that logs."""

        def on_train_batch_end(self, trainer, pl_module, *_):
            vectors.append(block.default_ED[:4].double().clone())
            sums.append(
                (block.defaults.observed.sum_ED[:4].double(), block.defaults.observed.weight_E[:4])
            )

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
