"""The block: outputs and all gradients equal a naive float64 loop; nothing breaks at the edges."""

from functools import partial

import pytest
import torch
from torch import nn

from app.moe import LOSSES, MoEBlock, Pairs, Ternary, TopAny, TopK, TopP, moe_blocks

from . import naive
from .cases import (
    ACTIVE,
    CASES,
    DIM,
    EXPERTS,
    HIDDEN,
    NAIVE_EXPERTS,
    SLOTS,
    Case,
    assert_same_gradients,
    leaves,
    make_block,
    naive_choices,
    naive_output,
    tokens,
)

ROUTERS = {name: case.router for name, case in CASES.items() if case.train}


def table(choices: list[naive.Choice]) -> torch.Tensor:
    """The naive gates as a (T, E) table."""
    gates_TE = torch.zeros(len(choices), SLOTS, dtype=torch.float64)
    for t, choice in enumerate(choices):
        for e, gate in choice.gates.items():
            gates_TE[t, e] = gate.detach()
    return gates_TE


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("name", CASES)
def test_block_equals_naive_loop(name: str, experts: str, seed: int) -> None:
    """Decisions, gates, output and the gradients of input, router, thresholds and experts."""
    case = CASES[name]
    block = make_block(case.router, seed, train=case.train, experts=EXPERTS[experts])
    x_TD = tokens(seed)
    actual_TD = block(x_TD)
    choices = naive_choices(case, block, x_TD)
    expected_TD = naive_output(block, x_TD, choices)

    routing = block.routing
    gates_TE = table(choices)
    taken_TE = torch.tensor([[e in choice.gates for e in range(SLOTS)] for choice in choices])
    assert torch.equal(routing.mask_TE, taken_TE)
    torch.testing.assert_close(routing.gates_TE.detach(), gates_TE, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(actual_TD, expected_TD, rtol=1e-10, atol=1e-12)
    weight_TD = tokens(seed + 100).detach()
    assert_same_gradients(
        (actual_TD * weight_TD).sum(),
        (expected_TD * weight_TD).sum(),
        {k: v for k, v in leaves(block, x_TD).items() if "noise_weight" not in k},
    )


def test_random_cases_vary() -> None:
    """The comparison above means something: decisions differ between tokens and between cases."""
    counts = {}
    for name in ("topp", "topp-0.9", "topany", "ternary-always-null"):
        block = make_block(CASES[name].router, 2)
        block(tokens(2))
        counts[name] = block.routing.mask_TE.sum(1).tolist()
        assert len(set(map(tuple, block.routing.mask_TE.tolist()))) > 2, name
    assert len({tuple(count) for count in counts.values()}) == len(counts)
    assert 0 in counts["topany"]


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("shared", [1, 2])
def test_shared_experts(experts: str, shared: int) -> None:
    """Every token also takes the shared experts, with weight 1, routed or not."""
    case = CASES["topany"]
    block = make_block(case.router, 2, experts=EXPERTS[experts], shared_experts=shared)
    assert block.shared.down.shape == (1, DIM, HIDDEN * shared)
    x_TD = tokens(2)
    choices = naive_choices(case, block, x_TD)
    assert any(not choice.gates for choice in choices)
    weights = dict(block.shared.named_parameters())
    one = partial(NAIVE_EXPERTS[EXPERTS[experts]], weights, 0)
    expected_TD = naive_output(block, x_TD, choices) + torch.stack([one(x_D) for x_D in x_TD])
    actual_TD = block(x_TD)
    torch.testing.assert_close(actual_TD, expected_TD, rtol=1e-10, atol=1e-12)
    assert_same_gradients(actual_TD.square().sum(), expected_TD.square().sum(), leaves(block, x_TD))


@pytest.mark.parametrize("name", ROUTERS)
def test_shape_and_dtype_are_the_input_s(name: str) -> None:
    """(B, S, D) in and out; each token for itself."""
    block = make_block(ROUTERS[name])
    x = tokens(0, 2, 3, DIM)
    y = block(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    torch.testing.assert_close(y.reshape(-1, DIM), block(x.reshape(-1, DIM)))
    half = block.float()(x.detach().bfloat16()[0].float())
    assert half.dtype == torch.float32


# ---------------------------------------------------------------------- edges


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("shape", [(0, DIM), (2, 0, DIM), (1, DIM), (1, 1, DIM)])
@pytest.mark.parametrize("name", ROUTERS)
def test_no_token_and_one_token(name: str, shape: tuple[int, ...], experts: str) -> None:
    """0 and 1 tokens pass; all parameters get gradients, zeros for an empty batch."""
    block = make_block(ROUTERS[name], experts=EXPERTS[experts])
    y = block(tokens(0, *shape))
    assert y.shape == shape
    y.sum().backward()
    for key, parameter in block.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        if 0 in shape:
            assert not parameter.grad.any(), key


@pytest.mark.parametrize("name", [n for n in ROUTERS if "5" not in n and n != "ternary-levels"])
def test_one_active_slot(name: str) -> None:
    """With all slots inactive but one, only that one is ever taken; no NaN."""
    case = CASES[name]
    block = make_block(case.router, active=[3])
    x_TD = tokens(0)
    y_TD = block(x_TD)
    assert not block.routing.mask_TE[:, [0, 1, 2, 4, 5]].any()
    choices = naive_choices(case, block, x_TD)
    torch.testing.assert_close(y_TD, naive_output(block, x_TD, choices))
    y_TD.square().sum().backward()
    for key, parameter in block.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("router", [partial(TopK, k=1), TopP, TopAny, partial(Ternary, k=1)])
def test_one_expert(router) -> None:
    """A block of a single expert: gate 1 under a softmax over one output."""
    block = MoEBlock(DIM, HIDDEN, router, num_experts=1)
    block(tokens(0, double=False)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in block.parameters())
    if isinstance(block.router, (TopK, TopP)):
        assert torch.equal(block.routing.gates_TE, torch.ones(9, 1))


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("name", [n for n in ROUTERS if n != "dense"])
def test_expert_without_tokens_gets_zero_gradients(name: str, experts: str) -> None:
    """Zeros, not None: one token can't reach all of four experts."""
    block = make_block(ROUTERS[name], experts=EXPERTS[experts])
    block(tokens(4, 1, DIM)).square().sum().backward()
    idle = ~block.routing.mask_TE[0]
    assert idle[[1, 4]].all()
    for key, parameter in block.experts.named_parameters():
        assert parameter.grad is not None, key
        assert not parameter.grad[idle].any(), key
    if (~idle).any():
        assert block.experts.down.grad[~idle].flatten(1).any(1).all()


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("gates", ["equal", "score"])
def test_batch_without_any_routed_token(gates: str, train: bool, experts: str) -> None:
    """Thresholds no cosine can reach: output 0, and zero gradients everywhere (no None)."""
    router = partial(TopAny, fallback="none", learn_temperature=True, gates=gates)
    block = make_block(router, train=train, experts=EXPERTS[experts])
    torch.nn.init.constant_(block.router.threshold, 2.0)
    x_TD = tokens(0)
    y_TD = block(x_TD)
    assert not y_TD.any() and block.routing.unrouted_T().all()
    y_TD.sum().backward()
    for key, value in leaves(block, x_TD).items():
        assert value.grad is not None, key
        assert not value.grad.any(), key


def test_batch_of_null_experts_only() -> None:
    """A token that selects nulls only: output 0, no pair executed, gradients exist."""
    block = make_block(partial(Ternary, k=2, null_shift=100.0))
    x_TD = tokens(0)
    y_TD = block(x_TD)
    assert not y_TD.any() and not block.routing.mask_TE.any()
    assert len(block.routing.pairs().token_N) == 0
    assert (block.routing.chosen_null_T == 2).all()
    (y_TD.sum() + LOSSES["reward"](block.routing)).backward()
    assert all(v.grad is not None and v.grad.isfinite().all() for v in leaves(block, x_TD).values())


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_huge_logits_stay_finite(name: str, scale: float) -> None:
    """Outputs, auxiliary losses and gradients, in float32."""
    block = make_block(ROUTERS[name], double=False)
    with torch.no_grad():
        block.router.weight.mul_(scale)
    x_TD = tokens(0, double=False)
    y_TD = block(x_TD)
    assert y_TD.isfinite().all()
    total = y_TD.sum()
    for loss in LOSSES.values():
        try:
            value = loss(block.routing)
        except ValueError:
            continue
        assert value.isfinite(), loss.__name__
        total = total + value
    total.backward()
    for key, value in leaves(block, x_TD).items():
        assert value.grad.isfinite().all(), key


def test_raw_top1_teaches_the_router() -> None:
    """The gate of top-1 is p, so the task reaches the router (Switch)."""
    block = make_block(partial(TopK, k=1))
    block(tokens(0)).square().sum().backward()
    assert block.router.weight.grad[ACTIVE].abs().amax(1).min() > 1e-6
    assert not block.router.weight.grad[[1, 4]].any()


def test_normalized_top1_is_refused() -> None:
    with pytest.raises(ValueError, match="k: 1 with normalize: true") as error:
        make_block(partial(TopK, k=1, normalize=True))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": 0}, "num_experts must lie between 1 and max_experts"),
        ({"num_experts": 9, "max_experts": 8}, "num_experts must lie between 1 and max_experts"),
        ({"expert_ratio": 0.01}, "leaves no hidden unit"),
        ({"router": partial(TopK, k=0)}, "router k must be between 1"),
        ({"router": partial(TopK, k=9)}, "router k must be between 1"),
        ({"router": partial(TopK, jitter=1.0)}, "jitter"),
        ({"router": partial(TopK, k=3, estimator="sparsemixer")}, "sparsemixer needs"),
        ({"router": partial(TopP, p=0.0)}, r"p must lie in \(0, 1\]"),
        ({"router": partial(TopP, p=1.1)}, r"p must lie in \(0, 1\]"),
        ({"router": partial(TopAny, temperature=0.0)}, "temperature"),
        ({"router": partial(Ternary, k=0)}, "k must lie between"),
        ({"router": partial(Ternary, levels=[])}, "levels"),
        ({"router": partial(Ternary, levels=[1.0, 0.0])}, "levels"),
        ({"router": partial(Ternary, levels=[1.0, 1.0])}, "levels"),
    ],
)
def test_wrong_options_say_so(options: dict, words: str) -> None:
    """One sentence at construction."""
    with pytest.raises(ValueError, match=words) as error:
        MoEBlock(DIM, HIDDEN, **options)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------- bfloat16


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("name", ROUTERS)
def test_autocast_keeps_the_router_in_float32(name: str, experts: str) -> None:
    """bf16 autocast: finite, float32 gates, and the very decisions of a run without autocast."""
    block = make_block(ROUTERS[name], double=False, experts=EXPERTS[experts], shared_experts=1)
    x_TD = tokens(0, 64, DIM).detach().bfloat16().float().requires_grad_()
    plain_TD = block(x_TD).detach()
    plain = block.routing
    with torch.autocast("cpu", torch.bfloat16):
        y_TD = block(x_TD)
        seen = block.routing
        half_TD = block(x_TD.detach().bfloat16())
    assert seen.gates_TE.dtype == torch.float32
    assert torch.equal(seen.mask_TE, plain.mask_TE)
    assert torch.equal(seen.gates_TE, plain.gates_TE)
    assert torch.equal(block.routing.gates_TE, plain.gates_TE)
    assert y_TD.dtype == torch.float32 and half_TD.dtype == torch.bfloat16
    torch.testing.assert_close(y_TD.detach(), plain_TD, rtol=0.1, atol=0.1)
    y_TD.square().mean().backward()
    for key, value in leaves(block, x_TD).items():
        assert value.grad is not None and value.grad.isfinite().all(), key


# ---------------------------------------------------------------------- the record


@pytest.mark.parametrize("name", ROUTERS)
def test_record(name: str) -> None:
    """Pairs are sorted by expert, then token; `take` reads in that order; statistics agree."""
    block = make_block(ROUTERS[name])
    x_TD = tokens(0)
    block(x_TD)
    routing = block.routing
    pairs = routing.pairs()
    expected = [(e, t) for e in range(SLOTS) for t in range(len(x_TD)) if routing.mask_TE[t, e]]
    assert list(zip(pairs.expert_N.tolist(), pairs.token_N.tolist(), strict=True)) == expected
    assert pairs.count_E.tolist() == [sum(e == i for e, _ in expected) for i in range(SLOTS)]
    values_TE = torch.randn(len(x_TD), SLOTS)
    assert pairs.take(values_TE).tolist() == [float(values_TE[t, e]) for e, t in expected]
    assert not routing.features_TD.requires_grad
    if name != "topany-mlp":
        assert torch.equal(routing.features_TD, x_TD.detach())
    choices = naive_choices(CASES[name], block, x_TD)
    assert routing.unrouted_T().tolist() == [not choice.gates for choice in choices]
    assert routing.load_E().tolist() == [
        sum(choice.picks.get(e, 0) for choice in choices) for e in range(SLOTS)
    ]


def test_record_stays_when_experts_go() -> None:
    """The record of a past batch does not change with the block's mask."""
    block = make_block(TopK)
    block(tokens(0))
    block.deactivate(2)
    assert block.routing.active_E.nonzero().flatten().tolist() == ACTIVE


def test_take_is_differentiable() -> None:
    pairs = Pairs(torch.tensor([0, 2, 2]), torch.tensor([1, 0, 1]), torch.tensor([1, 0, 2]))
    values_TE = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(pairs.take, values_TE)


def test_unrouted_in_evaluation_counts_tokens_above_no_threshold() -> None:
    """The fallback routes them, but they still count as having taken no expert."""
    block = make_block(TopAny, train=False)
    torch.nn.init.constant_(block.router.threshold, 2.0)
    block(tokens(0))
    assert block.routing.unrouted_T().all()
    assert (block.routing.mask_TE.sum(1) == 1).all()


def test_moe_blocks_are_named_by_their_transformer_block() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Module() for _ in range(3))
    model.blocks[0].mlp = MoEBlock(DIM, HIDDEN)
    model.blocks[2].mlp = MoEBlock(DIM, HIDDEN)
    model.top = MoEBlock(DIM, HIDDEN)
    found = moe_blocks(model)
    assert list(found) == ["blocks.0", "blocks.2", "top"]
    assert found["blocks.2"] is model.blocks[2].mlp


def test_active_slots_change_without_touching_shapes() -> None:
    block = MoEBlock(DIM, HIDDEN, num_experts=2, max_experts=4)
    shapes = [p.shape for p in block.parameters()]
    assert block.active_slots() == [0, 1]
    block.activate(3)
    block.deactivate(0)
    assert block.active_slots() == [1, 3]
    block(tokens(0, double=False))
    assert set(block.routing.mask_TE.nonzero()[:, 1].tolist()) <= {1, 3}
    assert [p.shape for p in block.parameters()] == shapes
    assert "active_E" in block.state_dict()


def test_case_table_covers_every_router() -> None:
    """A new router must come with a naive counterpart."""
    from app.moe import routers

    kinds = {type(case.router(DIM, SLOTS)) for case in CASES.values()}
    everything = {
        kind
        for kind in vars(routers).values()
        if isinstance(kind, type) and issubclass(kind, routers.Router)
    }
    assert kinds == everything - {routers.Router, routers.SoftmaxRouter}
    assert all(isinstance(case, Case) for case in CASES.values())
