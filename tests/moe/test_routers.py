"""What each router promises beyond the naive loop: signs, draws, noise, bias and reports."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from app.moe import MoEBlock, Ternary, TopAny, TopK

from . import naive
from .cases import (
    ACTIVE,
    CASES,
    DIM,
    HIDDEN,
    SLOTS,
    assert_same_gradients,
    leaves,
    make_block,
    naive_output,
    tokens,
)


def matmul_flops(run: Callable[[], object]) -> int:
    """FLOPs of the matrix products that were really executed."""
    with FlopCounterMode(display=False) as counter:
        run()
    counts = counter.get_flop_counts().get("Global", {})
    return sum(counts.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))


# ---------------------------------------------------------------------- top-k


def test_bias_moves_the_selection_and_not_the_gates() -> None:
    """Loss-free balancing: a large bias wins every token, but its gate stays the unbiased p."""
    block = make_block(partial(TopK, k=1))
    x_TD = tokens(0)
    block.router.balance_bias_E.zero_()
    block(x_TD)
    before = block.routing
    assert not before.mask_TE[:, 5].all()
    block.router.balance_bias_E[5] = 2.0
    block.router.balance_bias_E[4] = 9.0  # inactive
    block(x_TD)
    assert block.routing.mask_TE.nonzero()[:, 1].eq(5).all()
    assert torch.equal(block.routing.probs_TE, before.probs_TE)
    torch.testing.assert_close(block.routing.gates_TE[:, 5], before.probs_TE[:, 5])


@pytest.mark.parametrize("normalize", [False, True])
def test_noisy_topk(normalize: bool) -> None:
    """H = W x + noise * softplus(W_noise x) while training (arXiv 1701.06538 eq. 4)."""
    router = partial(TopK, k=2, noise=True, normalize=normalize)
    block = make_block(router)
    x_TD = tokens(0)
    torch.manual_seed(5)
    actual_TD = block(x_TD)
    torch.manual_seed(5)
    noise_TE = torch.randn(len(x_TD), SLOTS, dtype=torch.float64)
    choices = []
    for t, x_D in enumerate(x_TD):
        logits = {}
        for e in ACTIVE:
            spread = torch.log(1.0 + torch.exp((block.router.noise_weight[e] * x_D).sum()))
            logits[e] = (block.router.weight[e] * x_D).sum() + noise_TE[t, e] * spread
        probs = naive.softmax(logits)
        choices.append(naive.top_k(probs, 2, normalize, block.router.balance_bias_E))
    expected_TD = naive_output(block, x_TD, choices)
    torch.testing.assert_close(actual_TD, expected_TD, rtol=1e-9, atol=1e-11)
    assert (block.routing.mask_TE.sum(1) == 2).all()
    assert not block.routing.mask_TE[:, [1, 4]].any()
    assert_same_gradients(actual_TD.square().sum(), expected_TD.square().sum(), leaves(block, x_TD))
    block.router.zero_grad()
    actual_TD.square().sum().backward()
    assert block.router.noise_weight.grad[ACTIVE].abs().amax(1).min() > 0


def test_noise_and_jitter_are_for_training_only() -> None:
    block = make_block(partial(TopK, k=2, noise=True, jitter=0.3))
    x_TD = tokens(0)
    first, second = block(x_TD), block(x_TD)
    assert not torch.equal(first, second)
    block.eval()
    assert torch.equal(block(x_TD), block(x_TD))


def test_jitter_multiplies_the_router_s_input() -> None:
    """Uniform in [1 - jitter, 1 + jitter], per element; the experts see the input itself."""
    block = make_block(partial(TopK, k=2, jitter=0.25))
    x_TD = tokens(0)
    torch.manual_seed(3)
    actual_TD = block(x_TD)
    torch.manual_seed(3)
    factor_TD = torch.empty(x_TD.shape, dtype=torch.float64).uniform_(0.75, 1.25)
    router = block.router
    choices = [
        naive.top_k(naive.router_probs(router.weight, x_D, ACTIVE), 2, bias_E=router.balance_bias_E)
        for x_D in x_TD * factor_TD
    ]
    torch.testing.assert_close(actual_TD, naive_output(block, x_TD, choices))
    assert torch.equal(block.routing.features_TD, x_TD.detach())


# ---------------------------------------------------------------------- SparseMixer


def sparsemixer_orders(
    logits: dict[int, torch.Tensor], drawn: list[int], gates: dict[int, float]
) -> list[dict[int, torch.Tensor]]:
    """All ways in which the drawn experts and their gate values can have come about.

    One draw after the other from the softmax over the experts not drawn yet. The gate is p, or
    p / 3 where the draw is not the most probable one; its gradient is that of p in either case.
    """
    found = []
    for order in {tuple(drawn), tuple(reversed(drawn))}:
        left, built = dict(logits), {}
        for e in order:
            probs = naive.softmax(left)
            best = max(probs, key=lambda key: float(probs[key].detach()))
            scales = [1.0] if e == best else [1.0, 1.0 / 3.0]
            for scale in scales:
                if abs(float(probs[e].detach()) * scale - gates[e]) < 1e-7:  # 1/3 is a float32
                    built[e] = probs[e] + (probs[e] * (scale - 1.0)).detach()
            del left[e]
        if len(built) == len(order):
            found.append(built)
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [1, 2])
def test_sparsemixer_gates_and_gradient(k: int, seed: int) -> None:
    """Each draw's gate has a value that the method allows, and the gradient of p (2310.00811)."""
    block = make_block(partial(TopK, k=k, estimator="sparsemixer"), seed)
    x_TD = tokens(seed)
    torch.manual_seed(seed)
    block(x_TD)
    routing = block.routing
    assert (routing.mask_TE.sum(1) == k).all() and not routing.mask_TE[:, [1, 4]].any()
    assert not routing.gates_TE[~routing.mask_TE].any()
    target_TE = torch.randn(len(x_TD), SLOTS, dtype=torch.float64)
    expected = 0.0
    for t, x_D in enumerate(x_TD):
        drawn = routing.mask_TE[t].nonzero().flatten().tolist()
        gates = {e: float(routing.gates_TE[t, e].detach()) for e in drawn}
        logits = {e: (block.router.weight[e] * x_D).sum() for e in ACTIVE}
        orders = sparsemixer_orders(logits, drawn, gates)
        assert len(orders) == 1, f"gates {gates} are not those of a draw"
        expected = expected + sum(target_TE[t, e] * gate for e, gate in orders[0].items())
    actual = (routing.gates_TE * target_TE).sum()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert_same_gradients(actual, expected, {"x": x_TD, "weight": block.router.weight})


def test_sparsemixer_draws_from_p() -> None:
    """Frequencies follow p; what is not the best is scaled by 1/3 three times in four."""
    torch.manual_seed(0)
    logits_E = torch.tensor([0.5, 1.2, -0.3, 0.0])
    router = TopK(1, 4, k=1, estimator="sparsemixer").train()
    with torch.no_grad():
        router.weight.copy_(logits_E[:, None])
    active_E = torch.tensor([True, True, False, True])
    routing = router(torch.ones(40_000, 1), active_E)
    probs_E = logits_E.masked_fill(~active_E, -torch.inf).softmax(0)
    torch.testing.assert_close(routing.mask_TE.float().mean(0), probs_E, rtol=0.0, atol=0.01)
    for e in (0, 3):
        full_N = routing.gates_TE[routing.mask_TE[:, e], e] > probs_E[e] * 0.9
        assert abs(float(full_N.float().mean()) - 0.25) < 0.02
    assert (routing.gates_TE[routing.mask_TE[:, 1], 1] > probs_E[1] * 0.999).all()


def test_sparsemixer_jitter_excludes_far_experts() -> None:
    """Only experts within 2 * jitter (relative) of the best logit are drawn."""
    router = TopK(1, 4, k=1, estimator="sparsemixer", jitter=0.1).train()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[10.0], [9.0], [7.0], [1.0]]))
    mask_TE = router(torch.ones(2000, 1), torch.ones(4, dtype=torch.bool)).mask_TE
    assert mask_TE[:, :2].any(0).all()
    assert not mask_TE[:, 2:].any()


@pytest.mark.parametrize("k", [1, 2])
def test_sparsemixer_evaluates_by_topk(k: int) -> None:
    """No randomness in evaluation: the k most probable experts."""
    block = make_block(partial(TopK, k=k, estimator="sparsemixer"), train=False)
    block.router.balance_bias_E.zero_()
    x_TD = tokens(0)
    block(x_TD)
    for t, x_D in enumerate(x_TD):
        choice = naive.top_k(naive.router_probs(block.router.weight, x_D, ACTIVE), k)
        assert sorted(choice.gates) == block.routing.mask_TE[t].nonzero().flatten().tolist()


@pytest.mark.parametrize("k", [1, 2])
def test_sparsemixer_evaluates_with_the_gates_it_trains_with(k: int) -> None:
    """Where training draws the best experts in order, so that nothing is scaled, evaluation has
    the same gates: a network must not meet other weights than it was trained with.
    """
    block = make_block(partial(TopK, k=k, estimator="sparsemixer"))
    block.router.balance_bias_E.zero_()
    with torch.no_grad():
        # The order of the draws is all but certain, and both are taken all the same.
        block.router.weight.copy_(torch.tensor([8.0, 0, 4.0, -4.0, 0, -9.0])[:, None] / DIM)
    x_TD = torch.ones(50, DIM, dtype=torch.float64)
    torch.manual_seed(0)
    block(x_TD)
    trained = block.routing
    block.eval()(x_TD)
    same_T = (trained.mask_TE == block.routing.mask_TE).all(1)
    best_T = trained.gates_TE[:, 0] > 0.9
    assert (same_T & best_T).sum() > 40
    torch.testing.assert_close(
        trained.gates_TE[same_T & best_T], block.routing.gates_TE[same_T & best_T]
    )


def test_sparsemixer_with_fewer_active_experts_than_k() -> None:
    block = make_block(partial(TopK, k=2, estimator="sparsemixer"), active=[3])
    x_TD = tokens(0)
    block(x_TD).sum().backward()
    assert block.routing.mask_TE.nonzero()[:, 1].eq(3).all()
    assert torch.equal(block.routing.gates_TE.sum(1), torch.ones(9, dtype=torch.float64))
    assert all(p.grad.isfinite().all() for p in block.parameters())


# ---------------------------------------------------------------------- top-any


def test_topany_gradient_by_hand() -> None:
    """Two of three experts taken: d gate / d G_e = -sigmoid'(G_e) / 2 where taken, else 0."""
    router = TopAny(2, 3).double().train()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[2.0, 0.0], [1.0, 1.0], [-1.0, 0.0]]))
        router.threshold.copy_(torch.tensor([0.5, 0.25, 0.75]))
    x_TD = torch.tensor([[3.0, 0.0]], dtype=torch.float64)
    routing = router(x_TD, torch.ones(3, dtype=torch.bool))
    assert routing.gates_TE.tolist() == [[0.5, 0.5, 0.0]]
    routing.gates_TE.sum().backward()
    slope_E = torch.sigmoid(router.threshold) * (1 - torch.sigmoid(router.threshold))
    expected_E = -0.5 * slope_E.detach() * torch.tensor([1.0, 1.0, 0.0])
    torch.testing.assert_close(router.threshold.grad, expected_E)
    assert not router.weight.grad[2].any(), "an expert that was not taken got a gradient"


def test_topany_starts_with_zero_thresholds() -> None:
    router = TopAny(DIM, SLOTS)
    assert not router.threshold.any() and float(router.log_temperature.exp()) == 1.0


def test_topany_equality_takes_nothing() -> None:
    """sigmoid(s) > sigmoid(G) is strict: a token orthogonal to all vectors takes no expert."""
    router = TopAny(2, 2)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[0.0, 1.0], [0.0, -3.0]]))
    routing = router(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), torch.ones(2, dtype=torch.bool))
    assert not routing.mask_TE.any()


def test_topany_fallback_never_takes_an_inactive_slot() -> None:
    """The most similar slot is inactive: the best active one is taken."""
    router = TopAny(2, 3).eval()
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.1], [-1.0, 0.0]]))
    routing = router(torch.tensor([[1.0, 0.0]]), torch.tensor([False, True, True]))
    assert routing.mask_TE.tolist() == [[False, True, False]]
    assert routing.gates_TE.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("temperature", [0.1, 1.0, 5.0])
def test_topany_temperature_changes_no_decision(temperature: float) -> None:
    """It is on both sides of the comparison: gradients change, decisions do not."""
    plain, scaled = make_block(TopAny), make_block(partial(TopAny, temperature=temperature))
    x_TD = tokens(0)
    plain(x_TD), scaled(x_TD)
    assert torch.equal(plain.routing.mask_TE, scaled.routing.mask_TE)


@pytest.mark.parametrize("gates", ["equal", "score"])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_topany_unrouted_token_keeps_gradients_finite(gates: str, scale: float) -> None:
    """Gates of a token without experts are 0 and pass on no infinite gradient, whatever the scale
    of the loss (float32).
    """
    block = make_block(partial(TopAny, gates=gates), double=False)
    torch.nn.init.constant_(block.router.threshold, 2.0)
    x_TD = tokens(0, double=False)
    block(x_TD)
    (block.routing.gates_TE.sum() * scale).backward()
    assert x_TD.grad.isfinite().all()
    assert block.router.weight.grad.isfinite().all()


def test_aim_points_a_new_expert() -> None:
    """w = direction and G = 0 (top-any); w = direction (softmax)."""
    direction_D = torch.randn(DIM, dtype=torch.float64)
    for router in (TopAny, TopK):
        block = make_block(router)
        others = [e for e in range(SLOTS) if e != 4]
        before = block.router.weight[others].clone()
        block.router.aim(4, direction_D)
        assert torch.equal(block.router.weight[4], direction_D)
        assert torch.equal(block.router.weight[others], before)
    block = make_block(TopAny)
    block.router.aim(4, direction_D)
    assert block.router.threshold[4] == 0.0 and block.router.threshold[others].all()


def test_window_features_are_what_vectors_are_compared_with() -> None:
    """A new expert aimed along a token's features takes that token, deeper router or not."""
    for name in ("topany", "topany-mlp"):
        block = make_block(CASES[name].router)
        x_TD = tokens(0)
        block(x_TD)
        block.router.aim(4, block.routing.features_TD[7])
        block.activate(4)
        block(x_TD)
        assert block.routing.mask_TE[7, 4]
        torch.testing.assert_close(
            block.routing.similarity_TE[7, 4], torch.ones((), dtype=torch.float64)
        )


# ---------------------------------------------------------------------- ternary


def ternary_block(gates: str, rows: dict[int, float], k: int = 2, **options) -> MoEBlock:
    """A block whose router outputs have fixed logits on a token of ones (others: -30)."""
    block = make_block(partial(Ternary, k=k, gates=gates, **options))
    with torch.no_grad():
        block.router.weight.fill_(-30.0 / DIM)
        for row, logit in rows.items():
            block.router.weight[row] = logit / DIM
    return block


def lone_expert(block: MoEBlock, e: int, x_D: torch.Tensor) -> torch.Tensor:
    weights = dict(block.experts.named_parameters())
    return naive.gelu_expert(weights, e, x_D).detach()


def test_the_ternary_trap_negative_experts_are_negated() -> None:
    """-E_i gives the negated output. The released modelling code of TC-MoE computes the negated
    output and then overwrites it, so that its negative experts are not negated.
    """
    x_TD = torch.ones(1, DIM, dtype=torch.float64)
    positive = ternary_block("selected", {2: 3.0, 3: 1.0})
    negative = ternary_block("selected", {SLOTS + 2: 3.0, SLOTS + 3: 1.0})
    plus, minus = positive(x_TD), negative(x_TD)
    a, b = torch.tensor([3.0, 1.0], dtype=torch.float64).softmax(0)
    expected = a * lone_expert(positive, 2, x_TD[0]) + b * lone_expert(positive, 3, x_TD[0])
    torch.testing.assert_close(plus[0], expected, rtol=1e-9, atol=1e-9)
    message = "the outputs of negative experts (-E_i) are not negated: the released code's mistake"
    assert torch.allclose(minus, -plus), message
    assert not torch.allclose(minus, plus), message


def test_the_ternary_trap_in_gradients() -> None:
    """The router of a negative expert learns with the opposite sign."""
    x_TD = torch.ones(1, DIM, dtype=torch.float64)
    grads = []
    for row in (2, SLOTS + 2):
        block = ternary_block("raw", {row: 1.0, 2 * SLOTS: 0.0})
        block(x_TD).sum().backward()
        grads.append(block.router.weight.grad[row])
    assert grads[0].abs().min() > 1e-3
    torch.testing.assert_close(grads[1], -grads[0])


@pytest.mark.parametrize("gates", ["selected", "always_null", "raw"])
def test_both_signs_run_one_expert_once_with_the_difference(gates: str) -> None:
    """E_2 and -E_2 selected: one pair, gate p(+) - p(-) over the form's denominator."""
    x_TD = torch.ones(1, DIM, dtype=torch.float64)
    logits = {2: 2.0, SLOTS + 2: 1.0, 2 * SLOTS: 0.5, 2 * SLOTS + 1: 0.0}
    block = ternary_block(gates, logits)
    y_TD = block(x_TD)
    assert block.routing.mask_TE.nonzero().tolist() == [[0, 2]]
    assert len(block.routing.pairs().token_N) == 1, "the expert ran more than once"
    assert block.routing.load_E()[2] == 2
    p = torch.tensor(list(logits.values()), dtype=torch.float64).softmax(0)
    total = {"selected": p[0] + p[1], "always_null": p.sum(), "raw": 1.0}[gates]
    expected_D = (p[0] - p[1]) / total * lone_expert(block, 2, x_TD[0])
    torch.testing.assert_close(y_TD[0], expected_D, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("gates", "gate", "null"),
    [
        ("selected", lambda p: p[0] / (p[0] + p[1]), lambda p: p[1] / (p[0] + p[1])),
        ("always_null", lambda p: p[0] / p.sum(), lambda p: (p[1] + p[2]) / p.sum()),
        ("raw", lambda p: p[0], lambda p: p[1]),
    ],
)
def test_gate_forms_with_one_null_selected(gates: str, gate, null) -> None:
    """k = 2 selects E_3 and one null; the second null counts in the always-active form only."""
    x_TD = torch.ones(1, DIM, dtype=torch.float64)
    logits = {3: 2.0, 2 * SLOTS: 1.0, 2 * SLOTS + 1: 0.0}
    block = ternary_block(gates, logits)
    block(x_TD)
    routing = block.routing
    p = torch.tensor(list(logits.values()), dtype=torch.float64).softmax(0)
    assert routing.mask_TE.nonzero().tolist() == [[0, 3]]
    assert routing.chosen_null_T.tolist() == [1]
    torch.testing.assert_close(routing.gates_TE[0, 3], gate(p), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(routing.null_gate_T[0], null(p), rtol=1e-9, atol=1e-9)


def test_ternary_has_2n_plus_k_outputs_and_shared_weights() -> None:
    block = make_block(partial(Ternary, k=3))
    assert block.router.weight.shape == (2 * SLOTS + 3, DIM)
    assert block.experts.down.shape[0] == SLOTS


def test_ternary_shifts_of_the_released_model() -> None:
    """-10 on the nulls and -1 on the negatives: equal raw logits never select a null first."""
    block = make_block(partial(Ternary, k=2, negative_shift=-1.0, null_shift=-10.0))
    torch.nn.init.zeros_(block.router.weight)
    block(tokens(0))
    first = block.routing.logits_TR[0]
    assert first[:SLOTS][ACTIVE].tolist() == [0.0] * 4
    assert first[SLOTS : 2 * SLOTS][ACTIVE].tolist() == [-1.0] * 4
    assert first[2 * SLOTS :].tolist() == [-10.0] * 2
    assert first.isinf().sum() == 4
    assert not block.routing.chosen_null_T.any() and not block.routing.chosen_TLE[:, 1].any()


def test_ternary_statistics_by_kind() -> None:
    """+1, -1 and null selections add up to K for every token."""
    block = make_block(partial(Ternary, k=3))
    block(tokens(0))
    routing = block.routing
    plus_T, minus_T = routing.chosen_TLE.sum(2).unbind(1)
    assert (plus_T + minus_T + routing.chosen_null_T == 3).all()
    assert min(plus_T.sum(), minus_T.sum(), routing.chosen_null_T.sum()) > 0
    both_TE = routing.chosen_TLE.all(1)
    executed_T = routing.mask_TE.sum(1)
    assert torch.equal(executed_T, plus_T + minus_T - both_TE.sum(1))


def test_null_experts_cost_no_flops() -> None:
    """A counter of executed matrix products sees the router only."""
    block = make_block(partial(Ternary, k=2, null_shift=100.0), double=False)
    x_TD = tokens(0, double=False).detach()
    flops = matmul_flops(lambda: block(x_TD))
    assert flops == len(x_TD) * block.router.flops_per_token()


# ---------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize(
    "name", ["dense", "top2", "topp", "topany", "topany-mlp", "ternary-raw", "ternary-levels"]
)
def test_router_flops(name: str) -> None:
    """flops_per_token is what torch counts for the router's matrix products."""
    router = CASES[name].router(DIM, SLOTS)
    x_TD = tokens(0, double=False).detach()
    flops = matmul_flops(lambda: router(x_TD, torch.ones(SLOTS, dtype=torch.bool)))
    assert flops == len(x_TD) * router.flops_per_token()


@pytest.mark.parametrize("name", ["dense", "top1", "topp", "topany", "ternary-always-null"])
def test_block_flops_are_those_of_executed_pairs(name: str) -> None:
    """Tokens x router + executed pairs x expert; inactive and skipped experts cost nothing."""
    block = make_block(CASES[name].router, double=False)
    x_TD = tokens(0, double=False).detach()
    flops = matmul_flops(lambda: block(x_TD))
    pairs = int(block.routing.mask_TE.sum())
    expected = len(x_TD) * block.router.flops_per_token()
    expected += pairs * block.experts.flops_per_pair()
    assert flops == expected
    assert block.experts.flops_per_pair() == 2 * 2 * DIM * HIDDEN
