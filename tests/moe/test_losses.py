"""Auxiliary losses against naive loops, by hand-made examples and by gradcheck."""

from functools import partial

import pytest
import torch
from torch import Tensor

from app.moe import LOSSES, MoEBlock, Ternary, TopAny, TopK, TopP
from app.moe.routers import SoftmaxRouting

from . import naive
from .cases import (
    ACTIVE,
    CASES,
    SLOTS,
    assert_same_gradients,
    leaves,
    make_block,
    naive_choices,
    tokens,
)

SOFTMAX = [n for n in CASES if n.startswith(("dense", "top1", "top2", "top5", "topp"))]
TOPANY = [n for n in CASES if n.startswith("topany")]
TERNARY = [n for n in CASES if n.startswith("ternary")]


def softmax_logits(block: MoEBlock, x_TD: Tensor) -> list[list[Tensor]]:
    return [[(block.router.weight[e] * x_D).sum() for e in ACTIVE] for x_D in x_TD]


def ternary_logits(block: MoEBlock, x_TD: Tensor) -> list[list[Tensor]]:
    router, levels = block.router, len(block.router.levels_L)
    rows = [number * SLOTS + e for number in range(levels) for e in ACTIVE]
    rows += [levels * SLOTS + null for null in range(router.k)]
    return [
        [(router.weight[row] * x_D).sum() + router.shift_R[row] for row in rows] for x_D in x_TD
    ]


def expected_losses(name: str, block: MoEBlock, x_TD: Tensor) -> dict[str, Tensor]:
    """The naive value of every loss that is defined for a case."""
    choices = naive_choices(CASES[name], block, x_TD)
    weight_ED = block.router.weight
    if name in TOPANY:
        diversity = naive.diversity(weight_ED, ACTIVE)
        simplicity = naive.simplicity(weight_ED, ACTIVE)
        return {
            "load_balance": naive.load_balance(choices, ACTIVE, importance="gates"),
            "diversity": diversity,
            "simplicity": simplicity,
            "topany": diversity + simplicity,
            "efficiency": naive.efficiency(choices, ACTIVE),
        }
    losses = {"load_balance": naive.load_balance(choices, ACTIVE)}
    if name in SOFTMAX:
        logits = softmax_logits(block, x_TD)
        return losses | {"z_loss": naive.z_loss(logits), "entropy": naive.entropy(choices)}
    losses["z_loss"] = naive.z_loss(ternary_logits(block, x_TD))
    return losses | {"reward": naive.reward(choices)}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_losses_equal_naive_loops(name: str, seed: int) -> None:
    """Value and gradients with respect to the input and all parameters, two slots inactive."""
    case = CASES[name]
    block = make_block(case.router, seed, train=case.train)
    x_TD = tokens(seed)
    block(x_TD)
    inputs = {"x": x_TD, "weight": block.router.weight}
    if name in TOPANY:
        inputs["threshold"] = block.router.threshold
    for loss, expected in expected_losses(name, block, x_TD).items():
        actual = LOSSES[loss](block.routing)
        torch.testing.assert_close(
            actual, expected, rtol=1e-7, atol=1e-9, msg=lambda m, n=loss: f"{n}: {m}"
        )
        used = inputs
        if loss in ("diversity", "simplicity", "topany"):
            used = {"weight": block.router.weight}
        if not actual.requires_grad:  # evaluation, no token above a threshold
            assert not expected.requires_grad
            continue
        loose = 1e-5 if loss == "load_balance" else None  # shares of the load are float32
        assert_same_gradients(actual, expected, used, loose)


@pytest.mark.parametrize("loss", [n for n in LOSSES if n != "load_balance"])
@pytest.mark.parametrize("name", ["top2", "topany", "ternary-raw"])
def test_losses_refuse_foreign_routers(name: str, loss: str) -> None:
    """A loss without meaning for a router says so in one sentence."""
    block = make_block(CASES[name].router)
    x_TD = tokens(0)
    block(x_TD)
    if loss in expected_losses(name, block, x_TD) or (name, loss) == ("ternary-raw", "entropy"):
        assert LOSSES[loss](block.routing).isfinite()
        return
    with pytest.raises(ValueError, match=r"loss \w+ is defined for") as error:
        LOSSES[loss](block.routing)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------- load balance


def counts_routing(count_E: Tensor, probs_E: Tensor | None = None) -> SoftmaxRouting:
    """A top-1 routing with the given number of tokens for each expert; p = share by default."""
    expert_T = torch.repeat_interleave(torch.arange(len(count_E)), count_E)
    mask_TE = torch.nn.functional.one_hot(expert_T, len(count_E)).bool()
    if probs_E is None:
        probs_E = count_E.double() / count_E.sum()
    probs_TE = probs_E.expand(len(expert_T), -1)
    active_E = torch.ones(len(count_E), dtype=torch.bool)
    features_TD = torch.zeros(len(expert_T), 1)
    return SoftmaxRouting(
        mask_TE, probs_TE * mask_TE, active_E, features_TD, probs_TE.log(), probs_TE
    )


def test_the_32_rank_worked_example() -> None:
    """32 ranks, 32 experts; rank i sends 131 tokens to expert i and 99 to each other one.

    The local loss is above its uniform value on every rank, the global one is exactly at it.
    """
    ranks = []
    for rank in range(32):
        count_E = torch.full((32,), 99)
        count_E[rank] = 131
        ranks.append(counts_routing(count_E))
    load_E = sum(routing.load_E() for routing in ranks)
    assert load_E.unique().tolist() == [131 + 31 * 99]
    share = 131 / (131 + 31 * 99)
    uniform = 1.0
    local_value = 32 * (share**2 + 31 * (99 / (131 + 31 * 99)) ** 2)
    for routing in ranks:
        local = LOSSES["load_balance"](routing)
        assert float(local) > uniform
        assert float(local) == pytest.approx(local_value, abs=1e-6)
        assert float(LOSSES["load_balance"](routing, load_E)) == pytest.approx(uniform, abs=1e-7)
    # Exactly: f_e = 1/32 is a power of two, and the shares of one rank sum to 1 in rationals.
    exact = counts_routing(torch.full((32,), 128))
    assert float(LOSSES["load_balance"](exact, load_E)) == uniform


@pytest.mark.parametrize("experts", [1, 2, 7, 64])
def test_uniform_load_balance_is_one(experts: int) -> None:
    routing = counts_routing(torch.full((experts,), 3))
    assert float(LOSSES["load_balance"](routing)) == pytest.approx(1.0, abs=1e-6)


def test_collapse_gives_the_number_of_active_experts() -> None:
    """All tokens and all probability on one of four active experts: 4."""
    block = make_block(partial(TopK, k=1))
    block.router.balance_bias_E.zero_()
    torch.nn.init.zeros_(block.router.weight)
    with torch.no_grad():
        block.router.weight[2] = 100.0
    x_TD = tokens(0).detach().abs()
    block(x_TD)
    assert float(LOSSES["load_balance"](block.routing)) == pytest.approx(4.0, abs=1e-5)


def test_uniform_ternary_balance_is_one_whatever_the_nulls_take() -> None:
    """Per physical expert: E_i and -E_i added, nulls left out."""
    block = make_block(partial(Ternary, k=2, gates="selected"))
    with torch.no_grad():
        block.router.weight.zero_()
        # token t is the unit vector t: it selects E (t even) or -E (t odd) of expert t, and a null
        for t, e in enumerate(ACTIVE):
            block.router.weight[e + SLOTS * (t % 2), t] = 5.0
        block.router.weight[2 * SLOTS] = 3.0
    block(torch.eye(4, 5, dtype=torch.float64))
    assert block.routing.chosen_null_T.tolist() == [1, 1, 1, 1]
    assert block.routing.load_E()[ACTIVE].tolist() == [1, 1, 1, 1]
    assert float(LOSSES["load_balance"](block.routing)) == pytest.approx(1.0, abs=1e-6)


def test_load_of_inactive_slots_never_counts() -> None:
    """Also where a global load, gathered before a removal, still has entries there."""
    block = make_block(TopK)
    block(tokens(0))
    load_E = block.routing.load_E()
    stale_E = load_E.clone()
    stale_E[[1, 4]] = 1e6
    loss = LOSSES["load_balance"]
    assert torch.equal(loss(block.routing, stale_E), loss(block.routing, load_E))


def test_global_load_is_linear_in_the_ranks() -> None:
    """The mean over equal ranks of the loss with the global load is the loss of all tokens."""
    block = make_block(TopK)
    x_TD = tokens(0, 20, 5)
    block(x_TD)
    whole = LOSSES["load_balance"](block.routing)
    load_E = block.routing.load_E()
    parts = []
    for part_TD in x_TD.split(5):
        block(part_TD)
        parts.append(LOSSES["load_balance"](block.routing, load_E))
    torch.testing.assert_close(sum(parts) / 4, whole, rtol=1e-6, atol=1e-6)
    assert_same_gradients(sum(parts) / 4, whole, {"x": x_TD, "weight": block.router.weight}, 1e-5)


def test_unrouted_batch_has_finite_losses() -> None:
    """No selection at all: no NaN, in value or gradient."""
    block = make_block(TopAny)
    torch.nn.init.constant_(block.router.threshold, 2.0)
    block(tokens(0))
    for name in ("load_balance", "topany", "efficiency"):
        value = LOSSES[name](block.routing)
        assert value.isfinite()
        grads = torch.autograd.grad(
            value, block.router.weight, allow_unused=True, retain_graph=True
        )
        assert grads[0] is None or grads[0].isfinite().all(), name
    assert float(LOSSES["efficiency"](block.routing)) == 0.0


# ---------------------------------------------------------------------- the others, by hand


def test_z_loss_by_hand() -> None:
    """Equal logits a over n active experts: (a + log n)^2."""
    block = make_block(TopK)
    torch.nn.init.constant_(block.router.weight, 0.3)
    block(torch.ones(3, 5, dtype=torch.float64))
    expected = (torch.tensor(1.5).double() + torch.tensor(4.0).double().log()) ** 2
    torch.testing.assert_close(LOSSES["z_loss"](block.routing), expected, rtol=1e-6, atol=1e-6)


def test_entropy_by_hand() -> None:
    """log n at equal probabilities, 0 for a certain choice."""
    block = make_block(TopP)
    torch.nn.init.zeros_(block.router.weight)
    x_TD = torch.ones(3, 5, dtype=torch.float64)
    block(x_TD)
    assert float(LOSSES["entropy"](block.routing)) == pytest.approx(1.3862943611)
    with torch.no_grad():
        block.router.weight[3] = 1e4
    block(x_TD)
    assert float(LOSSES["entropy"](block.routing)) == 0.0


def test_diversity_by_hand() -> None:
    """0 for orthogonal vectors of any length; sqrt(n (n - 1)) for n equal directions."""
    block = make_block(TopAny)
    with torch.no_grad():
        block.router.weight.zero_()
        for i, e in enumerate(ACTIVE):
            block.router.weight[e, i] = 0.1 + i
    x_TD = tokens(0)
    block(x_TD)
    assert float(LOSSES["diversity"](block.routing)) == pytest.approx(0.0, abs=1e-7)
    LOSSES["diversity"](block.routing).backward()
    assert block.router.weight.grad.isfinite().all()
    torch.nn.init.constant_(block.router.weight, 0.7)
    block(x_TD)
    assert float(LOSSES["diversity"](block.routing)) == pytest.approx((4 * 3) ** 0.5)


def test_simplicity_and_efficiency_by_hand() -> None:
    block = make_block(TopAny)
    with torch.no_grad():
        block.router.weight.zero_()
        block.router.weight[:, 0] = torch.tensor([1.0, 50.0, 2.0, 3.0, 50.0, 6.0])
        block.router.threshold.copy_(torch.tensor([0.0, -9, 0.0, 2.0, -9, 2.0]))
    block(torch.tensor([[1.0, 0, 0, 0, 0], [-1.0, 0, 0, 0, 0]], dtype=torch.float64))
    assert float(LOSSES["simplicity"](block.routing)) == 3.0
    assert float(LOSSES["efficiency"](block.routing)) == 2 / 8  # of 2 tokens x 4 active experts


def test_one_active_expert() -> None:
    """Diversity has no gradient at its minimum; it must be 0 there and not NaN."""
    block = make_block(TopAny, active=[3])
    block(tokens(0))
    value = LOSSES["diversity"](block.routing)
    assert float(value) == pytest.approx(0.0, abs=1e-7)
    value.backward()
    torch.testing.assert_close(
        block.router.weight.grad, torch.zeros_like(block.router.weight), rtol=0, atol=1e-7
    )


def test_reward_pays_for_nulls() -> None:
    """Between -1 (all gates on nulls) and 0; lower for a router that prefers nulls."""
    values = []
    for shift in (-50.0, -1.0, 1.0, 50.0):
        block = make_block(partial(Ternary, k=2, gates="always_null", null_shift=shift))
        block(tokens(0))
        values.append(float(LOSSES["reward"](block.routing)))
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(0.0, abs=1e-9) and values[-1] == pytest.approx(-1.0)


def test_reward_gradient_raises_the_null_logits() -> None:
    block = make_block(partial(Ternary, k=2, gates="always_null"))
    x_TD = tokens(0).detach().abs()
    block(x_TD)
    LOSSES["reward"](block.routing).backward()
    assert (block.router.weight.grad[2 * SLOTS :] < 0).all()


# ---------------------------------------------------------------------- gradcheck


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        *[
            (name, loss)
            for name in ("dense", "top2", "topp")
            for loss in ("load_balance", "z_loss", "entropy")
        ],
        ("top2-normalized", "load_balance"),
        ("topany", "diversity"),
        ("topany", "simplicity"),
        ("topany", "topany"),
        *[
            (name, loss)
            for name in ("ternary-selected", "ternary-always-null", "ternary-raw")
            for loss in ("load_balance", "z_loss", "reward")
        ],
    ],
)
def test_losses_by_gradcheck(name: str, loss: str) -> None:
    """Analytic gradients equal finite differences in float64 (decisions are locally constant)."""
    block = make_block(CASES[name].router)
    x_TD = tokens(0, 3, 5)

    def value(x_TD: Tensor, weight: Tensor) -> Tensor:
        router = torch.func.functional_call
        return LOSSES[loss](router(block.router, {"weight": weight}, (x_TD, block.active_E)))

    weight = block.router.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(value, (x_TD, weight), atol=1e-6)


def test_gradients_reach_only_what_they_should() -> None:
    """The selected shares f are constants: the load-balance gradient comes from P alone."""
    block = make_block(TopK)
    x_TD = tokens(0)
    block(x_TD)
    LOSSES["load_balance"](block.routing).backward()
    assert block.router.weight.grad[ACTIVE].abs().amax(1).min() > 0
    assert all(v.grad is None for k, v in leaves(block, x_TD).items() if k.startswith("experts"))
