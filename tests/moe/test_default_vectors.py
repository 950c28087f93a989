"""Default MoE in the block: y = sum_{top-k} p_i E_i(x) + sum_{the others} p_i V_i."""

from functools import partial

import pytest
import torch
from torch import Tensor

from app.moe import Dense, MoEBlock, OutputSums, Ternary, TopAny, TopK, TopP

from . import naive
from .cases import (
    ACTIVE,
    CASES,
    DIM,
    EXPERTS,
    HIDDEN,
    NAIVE_EXPERTS,
    SLOTS,
    assert_same_gradients,
    leaves,
    make_block,
    naive_choices,
    naive_output,
    tokens,
)

CAN = ["top1", "top2", "top5-of-4", "topp", "topp-0.9", "ternary-raw"]


def with_vectors(name: str, seed: int = 0, kind: str = "ema", **options) -> MoEBlock:
    """A block whose default vectors are random, those of inactive slots too."""
    block = make_block(CASES[name].router, seed, default_vectors=kind, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        block.default_ED.normal_(generator=generator)
    return block


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["ema", "trained"])
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("name", CAN)
def test_output_and_gradients_equal_naive_loop(
    name: str, experts: str, kind: str, seed: int
) -> None:
    """The executed experts with p, all other active experts' vectors with p, not renormalised.

    V gets no gradient as a moving average, and the naive one as a parameter.
    """
    block = with_vectors(name, seed, kind, experts=EXPERTS[experts])
    x_TD = tokens(seed)
    actual_TD = block(x_TD)
    choices = naive_choices(CASES[name], block, x_TD)
    expected_TD = naive_output(block, x_TD, choices, default_ED=block.default_ED)
    torch.testing.assert_close(actual_TD, expected_TD, rtol=1e-10, atol=1e-12)
    assert_same_gradients(actual_TD.square().sum(), expected_TD.square().sum(), leaves(block, x_TD))
    is_parameter = "default_ED" in dict(block.named_parameters())
    assert is_parameter == (kind == "trained") == block.default_ED.requires_grad


def test_all_gates_and_vectors_together_cover_the_distribution() -> None:
    """With E_i = V_i the block is the dense mixture: executed and default weights sum to 1."""
    block = with_vectors("top2")
    block(tokens(0))
    routing = block.routing
    total_T = (routing.gates_TE + routing.default_weights_TE()).sum(1)
    torch.testing.assert_close(total_T, torch.ones_like(total_T))
    assert not (routing.default_weights_TE()[:, [1, 4]]).any()
    assert not (routing.default_weights_TE() * routing.mask_TE).any()


def test_perfect_vectors_give_the_dense_mixture_and_its_router_gradient() -> None:
    """Constant experts (down = 0) whose vectors are their outputs: nothing differs from dense."""
    sparse, dense = with_vectors("top1"), make_block(CASES["dense"].router)
    with torch.no_grad():
        for block in (sparse, dense):
            block.experts.down.zero_()
            block.experts.down_bias.copy_(sparse.default_ED)
        dense.router.weight.copy_(sparse.router.weight)
    x_TD = tokens(0)
    for block in (sparse, dense):
        block(x_TD).square().sum().backward()
    torch.testing.assert_close(sparse(x_TD), dense(x_TD))
    torch.testing.assert_close(sparse.router.weight.grad, dense.router.weight.grad)


@pytest.mark.parametrize("name", [n for n in CAN if n != "top5-of-4"])
def test_router_gradient_reaches_every_active_expert(name: str) -> None:
    """One token: top-k alone teaches through few experts, default vectors through all of them.

    The gradient of an unselected logit is not only that of the softmax's denominator: it differs
    when that expert's vector differs.
    """
    block = with_vectors(name)
    grads = []
    for scale in (1.0, 3.0):
        with torch.no_grad():
            block.default_ED.mul_(scale)
        block.zero_grad()
        block(tokens(1, 1, DIM)).sum().backward()
        grads.append(block.router.weight.grad.clone())
    rows = [e for e in ACTIVE]
    assert (grads[0][rows].abs().amax(1) > 1e-9).all()
    assert (grads[0][rows] != grads[1][rows]).any(1).all()
    assert not grads[0][[1, 4]].any()


def test_zero_vectors_change_nothing() -> None:
    """The start, V = 0, is plain top-k in output."""
    plain = make_block(CASES["top2"].router)
    start = make_block(CASES["top2"].router, default_vectors="ema")
    x_TD = tokens(0)
    assert torch.equal(plain(x_TD), start(x_TD))
    assert not start.default_ED.any() and not start.default_seen_E.any()


@pytest.mark.parametrize("estimator", ["plain", "sparsemixer"])
def test_sparsemixer_with_vectors(estimator: str) -> None:
    """The authors ran the two together: gates of the draw, p of the softmax for the others."""
    router = partial(TopK, k=1, estimator=estimator)
    block = make_block(router, default_vectors="ema")
    block.router.balance_bias_E.zero_()
    block.default_ED.normal_(generator=torch.Generator().manual_seed(0))
    x_TD = tokens(0)
    torch.manual_seed(1)
    y_TD = block(x_TD)
    routing = block.routing
    for t, x_D in enumerate(x_TD):
        probs = naive.router_probs(block.router.weight, x_D, ACTIVE)
        drawn = int(routing.mask_TE[t].nonzero())
        weights = dict(block.experts.named_parameters())
        expected_D = routing.gates_TE[t, drawn] * naive.gelu_expert(weights, drawn, x_D)
        for e in ACTIVE:
            if e != drawn:
                expected_D = expected_D + probs[e] * block.default_ED[e]
        torch.testing.assert_close(y_TD[t], expected_D, rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------------- collected sums


def naive_sums(block: MoEBlock, name: str, x_TD: Tensor, weighting: str) -> tuple[Tensor, Tensor]:
    """sum_j S_ij E_i(x_j) and sum_j S_ij over the tokens routed to i, S = 1 or p."""
    sum_ED = torch.zeros(SLOTS, DIM, dtype=torch.float64)
    weight_E = torch.zeros(SLOTS, dtype=torch.float64)
    weights = dict(block.experts.named_parameters())
    expert = NAIVE_EXPERTS[type(block.experts)]
    for x_D, choice in zip(x_TD, naive_choices(CASES[name], block, x_TD), strict=True):
        for e in choice.gates:
            weight = choice.probs[e].detach() if weighting == "router" else 1.0
            sum_ED[e] += weight * expert(weights, e, x_D).detach()
            weight_E[e] += weight
    return sum_ED, weight_E


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("weighting", ["uniform", "router"])
@pytest.mark.parametrize("name", CAN)
def test_collected_sums_equal_naive(name: str, weighting: str, experts: str, seed: int) -> None:
    """The sums, their weights and the weighted mean (divided by the sum of weights, not by K)."""
    block = with_vectors(name, seed, experts=EXPERTS[experts])
    block.defaults.follow(0.0, weighting)
    x_TD = tokens(seed)
    block(x_TD)
    sum_ED, weight_E = naive_sums(block, name, x_TD, weighting)
    sums = block.defaults.observed
    close = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False}
    torch.testing.assert_close(sums.sum_ED, sum_ED, **close)
    torch.testing.assert_close(sums.weight_E, weight_E, **close)
    mean_ED = torch.stack([s / w if w else s * 0 for s, w in zip(sum_ED, weight_E, strict=True)])
    torch.testing.assert_close(sums.mean_ED(), mean_ED, **close)
    assert not sums.sum_ED.requires_grad and not sums.weight_E.requires_grad


@pytest.mark.parametrize("weighting", ["uniform", "router"])
def test_mean_does_not_grow_with_the_batch(weighting: str) -> None:
    """The same tokens twice give the same mean (the printed formula would give it twice)."""
    block = with_vectors("top2")
    block.defaults.follow(0.0, weighting)
    x_TD = tokens(0)
    block(x_TD)
    once = block.defaults.observed
    block(torch.cat([x_TD, x_TD]))
    twice = block.defaults.observed
    torch.testing.assert_close(twice.mean_ED(), once.mean_ED())
    torch.testing.assert_close(twice.weight_E, 2 * once.weight_E)


def test_nothing_is_collected_in_evaluation_or_unasked() -> None:
    block = with_vectors("top2")
    block(tokens(0))
    assert block.defaults.observed is None
    block.defaults.follow(0.0, "uniform")
    block.eval()(tokens(0))
    assert block.defaults.observed is None
    block.train()(tokens(0))
    kept = block.defaults.observed
    block.eval()(tokens(1))
    assert block.defaults.observed is kept


def test_sums_are_float32_under_autocast() -> None:
    block = make_block(CASES["top2"].router, default_vectors="ema", double=False)
    for weighting in ("uniform", "router"):
        block.defaults.follow(0.0, weighting)
        with torch.autocast("cpu", torch.bfloat16):
            y_TD = block(tokens(0, double=False))
        assert y_TD.isfinite().all() and y_TD.dtype == torch.float32
        assert block.defaults.observed.sum_ED.dtype == torch.float32
        assert block.defaults.observed.weight_E.dtype == torch.float32


def test_empty_batch_collects_zeros() -> None:
    block = with_vectors("top2")
    block.defaults.follow(0.0, "router")
    block(tokens(0, 0, DIM))
    assert not block.defaults.observed.sum_ED.any() and not block.defaults.observed.weight_E.any()
    assert not block.defaults.observed.mean_ED().any()


def test_mean_of_unused_experts_is_zero() -> None:
    sums = OutputSums(torch.zeros(3, 2), torch.zeros(3))
    assert torch.equal(sums.mean_ED(), torch.zeros(3, 2))


def test_update_before_the_forward_pass_while_training_only() -> None:
    """Update before the forward pass: V of this very batch, and no gradient through it."""
    block = with_vectors("top2")
    x_TD = tokens(0)
    block.default_seen_E.copy_(torch.arange(SLOTS) % 2 == 0)
    stored_ED = block.default_ED.clone()
    before_TD = block.eval()(x_TD)
    block.defaults.follow(0.75, "uniform", before=True)
    assert torch.equal(block(x_TD), before_TD)
    actual_TD = block.train()(x_TD)
    sums = block.defaults.observed
    used_ED = stored_ED.clone()
    for e in sums.weight_E.nonzero().flatten().tolist():
        beta = 0.75 if block.default_seen_E[e] else 0.0
        used_ED[e] = beta * stored_ED[e] + (1 - beta) * sums.mean_ED()[e]
    assert not torch.equal(used_ED, stored_ED)
    choices = naive_choices(CASES["top2"], block, x_TD)
    expected_TD = naive_output(block, x_TD, choices, default_ED=used_ED)
    torch.testing.assert_close(actual_TD, expected_TD)
    assert_same_gradients(actual_TD.square().sum(), expected_TD.square().sum(), leaves(block, x_TD))
    assert torch.equal(block.default_ED, stored_ED)


# ---------------------------------------------------------------------- slots and refusals


@pytest.mark.parametrize("kind", ["ema", "trained"])
def test_reused_slot_starts_without_vector(kind: str) -> None:
    block = with_vectors("top2", kind=kind)
    if kind == "ema":
        block.default_seen_E.fill_(True)
    others = [e for e in range(SLOTS) if e != 2]
    before_ED = block.default_ED.detach().clone()
    block.deactivate(2)
    block.activate(2)
    assert not block.default_ED[2].any()
    assert torch.equal(block.default_ED[others], before_ED[others])
    if kind == "ema":
        assert block.default_seen_E.tolist() == [e != 2 for e in range(SLOTS)]
        assert {"default_ED", "default_seen_E"} <= set(block.state_dict())


@pytest.mark.parametrize("kind", ["ema", "trained"])
@pytest.mark.parametrize(
    ("router", "words"),
    [
        (TopAny, "thresholds are independent"),
        (partial(TopK, k=2, normalize=True), "set normalize: false"),
        (partial(TopP, normalize=True), "set normalize: false"),
        (Dense, "every expert is executed"),
        (partial(Ternary, gates="selected"), "set gates: raw"),
        (partial(Ternary, gates="always_null"), "set gates: raw"),
    ],
)
def test_what_cannot_combine_says_so(router, words: str, kind: str) -> None:
    """At construction, in one clear sentence that names the option and the router."""
    with pytest.raises(ValueError, match=words) as error:
        MoEBlock(DIM, HIDDEN, router, default_vectors=kind)
    message = str(error.value)
    name = getattr(router, "func", router).__name__
    assert message.startswith(f"default_vectors: {kind} can't be combined with the router {name}:")
    assert "\n" not in message and ". " not in message


def test_topany_routing_has_no_default_weights() -> None:
    block = make_block(TopAny)
    block(tokens(0))
    with pytest.raises(ValueError, match="no probability"):
        block.routing.default_weights_TE()
