"""Default vectors are the moving averages that the equations say, computed naively beside them."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from app.moe import Ternary, TopK, TopP
from callbacks import AdaptiveExperts, DefaultVectors
from tests.callbacks.callback_support import Recorder, Toy, fit, toy_block

SGD = partial(torch.optim.SGD, lr=0.1)


TOP_2 = partial(TopK, k=2)


def softmax_block(router=TOP_2, num_experts=4, slots=5, **options):
    torch.manual_seed(3)
    return toy_block(router, num_experts, slots, default_vectors="ema", **options)


def random_batches(count: int, size: int = 16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 8, generator=generator) for _ in range(count)]


def naive_outputs(block, x_TD):
    """All experts on all tokens, one by one: {(token, expert): E_e(x_t)}."""
    up, up_bias, down, down_bias = (p.detach() for p in block.experts.parameters())
    return {
        (t, e): F.linear(F.gelu(F.linear(x, up[e], up_bias[e])), down[e], down_bias[e])
        for t, x in enumerate(x_TD)
        for e in range(block.slots)
    }


class Naive(Callback):
    """The moving average by its equation, token by token, from the weights of each forward pass."""

    def __init__(self, beta: float, weighting: str) -> None:
        self.beta, self.weighting = beta, weighting
        self.vectors: dict[int, torch.Tensor] = {}
        self.sums: dict[int, list] = {}
        self.history: list[dict[int, torch.Tensor]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        block = pl_module.blocks["blocks.0"]
        with torch.no_grad():
            routing = block.router(batch, block.active_E)
            outputs = naive_outputs(block, batch)
        for t, e in routing.mask_TE.nonzero().tolist():
            weight = float(routing.probs_TE[t, e]) if self.weighting == "router" else 1.0
            total = self.sums.setdefault(e, [torch.zeros(8, dtype=torch.float64), 0.0])
            total[0] += weight * outputs[t, e].double()
            total[1] += weight

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        for e, (total, weight) in self.sums.items():
            mean = total / weight
            old = self.vectors.get(e)
            self.vectors[e] = mean if old is None else self.beta * old + (1 - self.beta) * mean
        self.sums = {}
        self.history.append(dict(self.vectors))

    def table(self, block) -> torch.Tensor:
        rows = torch.zeros(block.slots, 8, dtype=torch.float64)
        for e, vector in self.vectors.items():
            rows[e] = vector
        return rows


@pytest.mark.parametrize(
    "router", [partial(TopK, k=1), partial(TopK, k=2), TopP, partial(Ternary, k=2, gates="raw")]
)
@pytest.mark.parametrize("weighting", ["uniform", "router"])
@pytest.mark.parametrize("update", ["after", "before"])
def test_moving_average(tmp_path, router, weighting, update):
    """Six steps of training with two micro-batches each; no row for an expert never taken."""
    block = softmax_block(router)
    naive = Naive(0.9, weighting)
    vectors = DefaultVectors(0.9, weighting, update)
    task = Toy(block, optimizer=SGD)
    fit(tmp_path, task, random_batches(12), naive, vectors, accumulate_grad_batches=2)
    assert len(naive.history) == 6 and len(naive.vectors) >= 2
    torch.testing.assert_close(block.default_ED.double(), naive.table(block), rtol=1e-4, atol=1e-6)
    assert block.default_seen_E.tolist() == [e in naive.vectors for e in range(5)]


def test_first_observation_then_average(tmp_path):
    """One expert, one token: V = E(x) at first, then beta V + (1 - beta) E(x')."""
    block = softmax_block(partial(TopK, k=1), num_experts=1, slots=1)
    first, second = random_batches(2, size=1)
    outputs = [naive_outputs(block, x)[0, 0] for x in (first, second)]
    fit(tmp_path / "a", Toy(block), [first], DefaultVectors(0.75))
    torch.testing.assert_close(block.default_ED[0], outputs[0])
    fit(tmp_path / "b", Toy(block), [second], DefaultVectors(0.75))
    torch.testing.assert_close(block.default_ED[0], 0.75 * outputs[0] + 0.25 * outputs[1])


def test_an_expert_without_a_token_keeps_its_vector(tmp_path):
    """All tokens take expert 0; the vector of 1, seen before, does not move; 2's stays empty."""
    block = softmax_block(partial(TopK, k=1), num_experts=3, slots=3)
    with torch.no_grad():
        block.router.weight.zero_()
        block.router.weight[0, 0] = 50.0
        block.default_ED[1], block.default_seen_E[1] = 0.7, True
    batches = [x.abs() for x in random_batches(3)]
    fit(tmp_path, Toy(block), batches, DefaultVectors(0.9))
    assert block.default_seen_E.tolist() == [True, True, False]
    assert block.default_ED[0].abs().min() > 0
    assert (block.default_ED[1] == 0.7).all() and (block.default_ED[2] == 0).all()


def test_router_weighting_does_not_grow_with_the_batch(tmp_path):
    """The same tokens twice over give the same vectors: weights are divided by their sum."""
    [x] = random_batches(1)
    tables = []
    for batch in (x, torch.cat([x, x])):
        block = softmax_block()
        fit(tmp_path, Toy(block), [batch], DefaultVectors(weighting="router"))
        tables.append(block.default_ED)
    torch.testing.assert_close(*tables)


@pytest.mark.parametrize("update", ["after", "before"])
def test_what_a_forward_pass_uses(tmp_path, update):
    """`after`: V as the steps before left it; `before`: V with this batch's outputs in it."""
    block = softmax_block()
    naive, outputs = Naive(0.5, "router"), []
    block.register_forward_hook(lambda module, args, y: outputs.append(y.detach()))
    batches = random_batches(4)
    fit(tmp_path, Toy(block), batches, naive, DefaultVectors(0.5, "router", update))
    for step, (x, y) in enumerate(zip(batches, outputs, strict=True)):
        at = step if update == "before" else step - 1
        known = naive.history[at] if at >= 0 else {}
        routing, experts = block.router(x, block.active_E), naive_outputs(block, x)
        for t in range(len(x)):
            expected = torch.zeros(8)
            for e in range(4):
                taken = bool(routing.mask_TE[t, e])
                value = experts[t, e] if taken else known.get(e, torch.zeros(8)).float()
                expected += float(routing.probs_TE[t, e].detach()) * value
            torch.testing.assert_close(y[t], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("update", ["after", "before"])
def test_evaluation_moves_no_vector(tmp_path, update):
    """Validation after every batch, and a run of validation alone, change nothing."""
    tables = []
    for val in (None, random_batches(2, seed=9)):
        block = softmax_block()
        options = {"val_check_interval": 1, "num_sanity_val_steps": 1} if val else {}
        vectors = DefaultVectors(0.9, update=update)
        task = Toy(block, optimizer=SGD)
        trainer = fit(tmp_path, task, random_batches(4), vectors, val=val, **options)
        tables.append(block.default_ED.clone())
        if val:
            trainer.validate(task, torch.utils.data.DataLoader(val, batch_size=None), verbose=False)
            assert torch.equal(block.default_ED, tables[-1])
    assert torch.equal(*tables)


@pytest.mark.parametrize("weighting", ["uniform", "router"])
def test_one_large_batch_and_four_small_ones_give_the_same_vectors(tmp_path, weighting):
    """1 x 64 and 4 x 16 tokens, five optimizer steps."""
    whole = random_batches(5, size=64)
    parts = [part for batch in whole for part in batch.split(16)]
    tables = []
    for batches, accumulate in ((whole, 1), (parts, 4)):
        block = softmax_block()
        task, vectors = Toy(block, optimizer=SGD), DefaultVectors(0.9, weighting)
        fit(tmp_path, task, batches, vectors, accumulate_grad_batches=accumulate)
        tables.append(block.default_ED)
    assert tables[0].abs().max() > 0.1
    torch.testing.assert_close(*tables, rtol=1e-4, atol=1e-5)


def test_a_step_cut_short_by_the_end_of_an_epoch_counts_once(tmp_path):
    """Three micro-batches of four, then the epoch ends: one update from these three."""
    block, batches = softmax_block(), random_batches(3)
    naive = Naive(0.9, "uniform")
    vectors = DefaultVectors(0.9, "uniform")
    fit(tmp_path, Toy(block), batches, naive, vectors, accumulate_grad_batches=4)
    assert len(naive.history) == 1
    torch.testing.assert_close(block.default_ED.double(), naive.table(block), rtol=1e-4, atol=1e-6)


def test_a_reused_slot_starts_without_a_vector():
    block = softmax_block()
    block.default_ED.fill_(3.0)
    block.default_seen_E.fill_(True)
    block.deactivate(2)
    block.activate(2)
    assert (block.default_ED[2] == 0).all() and not block.default_seen_E[2]
    assert (block.default_ED[[0, 1, 3, 4]] == 3.0).all()
    assert block.default_seen_E[[0, 1, 3, 4]].all()


def test_with_dying_experts(tmp_path):
    """Experts below the smallest share die; no output then depends on their vectors."""
    block = softmax_block(partial(TopK, k=1), num_experts=5)
    adaptive = AdaptiveExperts(min_load_fraction=0.25, window=(0.0, 0.5))
    recorder = Recorder()
    batches = random_batches(4)
    fit(tmp_path, Toy(block, optimizer=SGD), batches, adaptive, DefaultVectors(0.9), recorder)
    dead = [event["slot"] for event in adaptive.events if event["event"] == "death"]
    assert dead and set(dead) | set(block.active_slots()) == set(range(5))
    assert all(not r["blocks.0"].mask_TE[:, dead].any() for r in recorder.train[2:])
    x = batches[0]
    before = block.eval()(x)
    block.default_ED[dead] = 1e6
    assert torch.equal(block(x), before)


def test_networks_without_such_vectors_are_refused(tmp_path):
    with pytest.raises(MisconfigurationException, match="no MoE block has default_vectors: ema"):
        fit(tmp_path, Toy(toy_block(TopK)), random_batches(1), DefaultVectors())


@pytest.mark.parametrize("beta", [-0.1, 1.0])
def test_beta_out_of_range(beta):
    with pytest.raises(ValueError, match=f"got {beta}"):
        DefaultVectors(beta)
