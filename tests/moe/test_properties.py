"""What holds for any input: properties of all routers, checked on random blocks and batches."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.moe import LOSSES, Dense, MoEBlock, Router, Ternary, TopAny, TopK, TopP

from .cases import DIM, make_block, tokens

few = settings(max_examples=12, deadline=None)
SEEDS = st.integers(0, 10_000)
PATTERNS = st.lists(st.booleans(), min_size=2, max_size=8).filter(any)
NAMES = {
    "dense": Dense,
    "top1": partial(TopK, k=1),
    "top2": partial(TopK, k=2, normalize=True),
    "top2-noisy": partial(TopK, k=2, noise=True, jitter=0.1),
    "sparsemixer": partial(TopK, k=2, estimator="sparsemixer"),
    "topp": partial(TopP, p=0.6),
    "topany": TopAny,
    "topany-score": partial(TopAny, gates="score"),
    "ternary-selected": partial(Ternary, k=2, gates="selected"),
    "ternary-always-null": partial(Ternary, k=2, gates="always_null"),
    "ternary-raw": partial(Ternary, k=2, gates="raw"),
}
RANDOM = ("top2-noisy", "sparsemixer")


def random_block(router, pattern: list[bool], seed: int, train: bool = True, **options) -> MoEBlock:
    active = [e for e, used in enumerate(pattern) if used]
    return make_block(router, seed, active, slots=len(pattern), train=train, **options)


def everything(block: MoEBlock, x_TD: Tensor) -> dict[str, Tensor]:
    """Output, losses and the gradients of their sum, rows of inactive slots left out."""
    block.zero_grad()
    x_TD = x_TD.detach().clone().requires_grad_()
    torch.manual_seed(0)
    y_TD = block(x_TD)
    results, total = {"y": y_TD.detach()}, y_TD.square().sum()
    for name, loss in LOSSES.items():
        try:
            value = loss(block.routing)
        except ValueError:
            continue
        results[name] = value.detach()
        total = total + value
    total.backward()
    results["grad x"] = x_TD.grad
    for name, parameter in block.named_parameters():
        grad = parameter.grad
        if grad is None:  # the noise of noisy top-k, in evaluation
            assert name == "router.noise_weight" and not block.training
            continue
        if parameter.ndim and len(grad) == block.slots:
            assert not grad[~block.active_E].any(), f"{name}: an inactive slot got a gradient"
            grad = grad[block.active_E]
        results[f"grad {name}"] = grad
    for name in ("load_E", "importance_E"):
        results[name] = getattr(block.routing, name)().detach()
    return results


@torch.no_grad()
def disturb(block: MoEBlock, seed: int) -> None:
    """Overwrites all that belongs to inactive slots."""
    generator = torch.Generator().manual_seed(seed)
    idle = (~block.active_E).nonzero().flatten()
    owners = [p for p in block.parameters() if p.ndim and len(p) == block.slots]
    owners += [b for n, b in block.named_buffers() if n.endswith(("balance_bias_E", "default_ED"))]
    for tensor in owners:
        noise = torch.randn(tensor[idle].shape, generator=generator, dtype=torch.float64)
        tensor[idle] = (noise * 1e6).to(tensor)
    if isinstance(block.router, Ternary):
        for level in range(len(block.router.levels_L)):
            rows = idle + level * block.slots
            block.router.weight[rows] = (
                torch.randn(len(rows), DIM, generator=generator, dtype=torch.float64) * 1e6
            )


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", NAMES)
@few
@given(pattern=PATTERNS, seed=SEEDS)
def test_inactive_slots_influence_nothing(
    name: str, train: bool, pattern: list[bool], seed: int
) -> None:
    """Not the output, not a loss, not a statistic, not a gradient: identical to the last bit."""
    if name in ("top2", "sparsemixer", "top2-noisy") and len(pattern) < 2:
        return
    block = random_block(NAMES[name], pattern, seed, train)
    x_TD = tokens(seed)
    before = everything(block, x_TD)
    disturb(block, seed)
    after = everything(block, x_TD)
    assert before.keys() == after.keys()
    for key, value in before.items():
        torch.testing.assert_close(
            after[key], value, rtol=0, atol=0, equal_nan=True, msg=lambda m, k=key: f"{k}: {m}"
        )
        assert value.isfinite().all(), key


@pytest.mark.parametrize("name", ["top1", "topp", "ternary-raw"])
@few
@given(pattern=PATTERNS, seed=SEEDS)
def test_default_vectors_of_inactive_slots_influence_nothing(
    name: str, pattern: list[bool], seed: int
) -> None:
    block = random_block(NAMES[name], pattern, seed, default_vectors="ema")
    with torch.no_grad():
        block.default_ED.normal_()
    before = everything(block, tokens(seed))
    disturb(block, seed)
    after = everything(block, tokens(seed))
    for key, value in before.items():
        assert torch.equal(after[key], value), key


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", NAMES)
@few
@given(pattern=PATTERNS, seed=SEEDS, count=st.integers(0, 12))
def test_every_routed_pair_is_active_and_gated(
    name: str, train: bool, pattern: list[bool], seed: int, count: int
) -> None:
    """Gates are finite, float, and 0 outside the mask; the default weights too."""
    block = random_block(NAMES[name], pattern, seed, train)
    block(tokens(seed, count, DIM))
    routing = block.routing
    assert not (routing.mask_TE & ~block.active_E).any()
    assert not routing.gates_TE[~routing.mask_TE].any()
    assert routing.gates_TE.isfinite().all()
    assert routing.mask_TE.shape == routing.gates_TE.shape == (count, len(pattern))
    assert torch.equal(routing.unrouted_T(), ~routing.mask_TE.any(1)) or (
        name.startswith("topany") and not train
    )


def route(router: Router, pattern: list[bool], seed: int, train: bool = True):
    block = random_block(router, pattern, seed, train)
    if isinstance(block.router, TopK):
        block.router.balance_bias_E.zero_()
    block(tokens(seed))
    return block.routing, sum(pattern)


@few
@given(pattern=PATTERNS, seed=SEEDS, k=st.integers(1, 8), normalize=st.booleans())
def test_topk_takes_exactly_k_or_all(
    pattern: list[bool], seed: int, k: int, normalize: bool
) -> None:
    """min(k, active) experts; gates sum to 1 if normalised and to at most 1 if raw."""
    k = min(k, len(pattern))
    normalize = normalize and k > 1
    routing, active = route(partial(TopK, k=k, normalize=normalize), pattern, seed)
    assert (routing.mask_TE.sum(1) == min(k, active)).all()
    total_T = routing.gates_TE.sum(1)
    if normalize or k >= active:
        torch.testing.assert_close(total_T, torch.ones_like(total_T))
    assert (total_T <= 1 + 1e-12).all() and (routing.gates_TE >= 0).all()
    # nothing left out is larger than what was kept
    kept_T = routing.probs_TE.masked_fill(~routing.mask_TE, 2.0).amin(1)
    left_T = routing.probs_TE.masked_fill(routing.mask_TE, -1.0).amax(1)
    assert (kept_T >= left_T).all()


@few
@given(pattern=PATTERNS, seed=SEEDS, k=st.integers(1, 2))
def test_sparsemixer_takes_exactly_k_or_all(pattern: list[bool], seed: int, k: int) -> None:
    routing, active = route(partial(TopK, k=k, estimator="sparsemixer"), pattern, seed)
    assert (routing.mask_TE.sum(1) == min(k, active)).all()
    assert (routing.gates_TE[routing.mask_TE] > 0).all()


@few
@given(pattern=PATTERNS, seed=SEEDS, goal=st.floats(0.01, 1.0), normalize=st.booleans())
def test_topp_covers_p_with_the_fewest_experts(
    pattern: list[bool], seed: int, goal: float, normalize: bool
) -> None:
    """At least one; the sum reaches p; without the least of them it would not."""
    routing, _ = route(partial(TopP, p=goal, normalize=normalize), pattern, seed)
    mask_TE, probs_TE = routing.mask_TE, routing.probs_TE
    covered_T = (probs_TE * mask_TE).sum(1)
    least_T = probs_TE.masked_fill(~mask_TE, 2.0).amin(1)
    assert (mask_TE.sum(1) >= 1).all()
    assert (covered_T >= goal - 1e-9).all()
    assert ((covered_T - least_T < goal) | (mask_TE.sum(1) == 1)).all()
    assert (least_T >= probs_TE.masked_fill(mask_TE, -1.0).amax(1)).all()
    if normalize:
        total_T = routing.gates_TE.sum(1)
        torch.testing.assert_close(total_T, torch.ones_like(total_T))
    else:
        torch.testing.assert_close(routing.gates_TE, probs_TE * mask_TE)


@pytest.mark.parametrize("gates", ["equal", "score"])
@few
@given(pattern=PATTERNS, seed=SEEDS, height=st.floats(-1.0, 2.0))
def test_topany_gates(gates: str, pattern: list[bool], seed: int, height: float) -> None:
    """Sum 1 where a token took experts, else 0; top1 in evaluation leaves no token without."""
    kinds = {}
    for fallback in ("top1", "none"):
        for train in (True, False):
            router = partial(TopAny, gates=gates, fallback=fallback)
            block = random_block(router, pattern, seed, train)
            with torch.no_grad():
                block.router.threshold.add_(height)
            block(tokens(seed))
            routing = kinds[fallback, train] = block.routing
            routed_T = routing.mask_TE.any(1)
            torch.testing.assert_close(routing.gates_TE.sum(1), routed_T.double())
            if gates == "equal":
                for gates_E, mask_E in zip(routing.gates_TE, routing.mask_TE, strict=True):
                    assert len(set(gates_E[mask_E].tolist())) <= 1
    evaluated = kinds["top1", False]
    assert (evaluated.mask_TE.sum(1) >= 1).all()
    train_TE = kinds["top1", True].mask_TE
    assert torch.equal(kinds["none", False].mask_TE, train_TE)
    assert torch.equal(kinds["none", True].mask_TE, train_TE)
    routed_T = train_TE.any(1)
    assert torch.equal(evaluated.mask_TE[routed_T], train_TE[routed_T])
    assert (evaluated.mask_TE[~routed_T].sum(1) == 1).all()


@pytest.mark.parametrize("form", ["selected", "always_null", "raw"])
@few
@given(pattern=PATTERNS, seed=SEEDS, k=st.integers(1, 3))
def test_ternary_gates(form: str, pattern: list[bool], seed: int, k: int) -> None:
    """k selections; gates and null gates sum to 1 in absolute value (at most, if raw)."""
    routing, active = route(partial(Ternary, k=k, gates=form), pattern, seed)
    assert (routing.chosen_TLE.sum((1, 2)) + routing.chosen_null_T == k).all()
    assert (routing.mask_TE.sum(1) <= min(k, active)).all()
    assert torch.equal(routing.mask_TE, routing.chosen_TLE.any(1))
    total_T = routing.gates_TE.abs().sum(1) + routing.null_gate_T
    assert (total_T <= 1 + 1e-12).all()
    lone_T = ~routing.chosen_TLE.all(1).any(1)  # no expert with both signs
    if form != "raw":
        torch.testing.assert_close(total_T[lone_T], torch.ones_like(total_T[lone_T]))
    one_sign_TE = routing.chosen_TLE[:, 0] ^ routing.chosen_TLE[:, 1]
    sign_TE = routing.chosen_TLE[:, 0].long() - routing.chosen_TLE[:, 1].long()
    assert (routing.gates_TE.sign() == sign_TE)[one_sign_TE].all()


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", [n for n in NAMES if n not in RANDOM])
@few
@given(pattern=PATTERNS, seed=SEEDS)
def test_tokens_are_permutation_equivariant(
    name: str, train: bool, pattern: list[bool], seed: int
) -> None:
    """Dropless: a token's output depends neither on its place nor on its neighbours."""
    block = random_block(NAMES[name], pattern, seed, train)
    x_TD = tokens(seed)
    order_T = torch.randperm(len(x_TD), generator=torch.Generator().manual_seed(seed))
    y_TD = block(x_TD)
    torch.testing.assert_close(block(x_TD[order_T]), y_TD[order_T], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(block(x_TD[:1]), y_TD[:1], rtol=1e-11, atol=1e-12)


@few
@given(seed=SEEDS, count=st.integers(1, 400))
def test_dropless_whatever_the_imbalance(seed: int, count: int) -> None:
    """All tokens on one expert: every one of them is computed."""
    block = make_block(partial(TopK, k=1), seed)
    with torch.no_grad():
        block.router.balance_bias_E[3] = 5.0
    block(tokens(seed, count, DIM))
    assert block.routing.load_E()[3] == count == block.routing.pairs().count_E[3]


@few
@given(seed=SEEDS, scale=st.sampled_from([1e4, 1e8, 1e20]))
@pytest.mark.parametrize("name", NAMES)
def test_huge_logits_decide_and_stay_finite(name: str, seed: int, scale: float) -> None:
    """Softmax saturates without NaN in output, gates and gradients (float32)."""
    block = make_block(NAMES[name], seed, double=False)
    with torch.no_grad():
        block.router.weight.mul_(scale)
    x_TD = tokens(seed, double=False)
    y_TD = block(x_TD)
    y_TD.sum().backward()
    assert y_TD.isfinite().all() and block.routing.gates_TE.isfinite().all()
    assert x_TD.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in block.parameters())
