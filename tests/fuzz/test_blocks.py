"""Blocks of any setting on any input: finite where the input is, and as the naive reference."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.moe import LOSSES, MoEBlock, SwiGLUExperts, TopK
from tests.moe.cases import (
    CASES,
    DIM,
    EXPERTS,
    assert_same_gradients,
    leaves,
    make_block,
    naive_choices,
    naive_output,
    tokens,
)

SEEDS = st.integers(0, 10_000)
COUNTS = st.sampled_from([0, 1, 2, 9])
PATTERNS = st.one_of(
    st.just([True]),  # a single expert
    st.integers(1, 6).map(lambda n: [e == n - 1 for e in range(n)]),  # all slots free but one
    st.lists(st.booleans(), min_size=1, max_size=7).filter(any),
)
ROUTERS = CASES | {
    "sparsemixer": None,
    "noisy": None,
}


def router_of(name: str, slots: int):
    """The router of a case, with a k that the slots allow."""
    if name == "sparsemixer":
        return partial(TopK, k=min(2, slots), estimator="sparsemixer")
    if name == "noisy":
        return partial(TopK, k=min(2, slots), noise=True, jitter=0.1)
    router = CASES[name].router
    options = dict(getattr(router, "keywords", {}))
    if "k" in options and not name.startswith("ternary"):
        options["k"] = min(options["k"], slots)
        options["normalize"] = options.get("normalize", False) and options["k"] > 1
    if name.startswith("ternary"):
        options["k"] = min(options["k"], 2 * slots)
    kind = getattr(router, "func", router)
    return partial(kind, **options)


def fuzzed_block(name: str, pattern: list[bool], seed: int, train: bool, **options) -> MoEBlock:
    slots = len(pattern)
    active = [slot for slot, used in enumerate(pattern) if used]
    router = router_of(name, slots)
    return make_block(router, seed, active, slots=slots, train=train, **options)


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(sorted(CASES)),
    pattern=PATTERNS,
    seed=SEEDS,
    count=COUNTS,
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    experts=st.sampled_from(sorted(EXPERTS)),
)
def test_any_setting_equals_the_naive_reference(
    name: str, pattern: list[bool], seed: int, count: int, scale: float, experts: str
) -> None:
    """Forward and backward, in float64, from no token to nine and from one slot to seven."""
    case = CASES[name]
    block = fuzzed_block(name, pattern, seed, case.train, experts=EXPERTS[experts])
    with torch.no_grad():
        block.router.weight.mul_(scale)
    x_TD = tokens(seed, count, DIM)
    y_TD = block(x_TD)
    assert y_TD.shape == (count, DIM)
    if not count:
        y_TD.sum().backward()
        for parameter in block.parameters():
            assert parameter.grad is None or not parameter.grad.any()
        return
    expected_TD = naive_output(block, x_TD, naive_choices(case, block, x_TD))
    torch.testing.assert_close(y_TD, expected_TD, rtol=1e-9, atol=1e-10)
    inputs = leaves(block, x_TD)
    if not block.training:  # the noise has no say in evaluation
        inputs = {key: value for key, value in inputs.items() if "noise" not in key}
    assert_same_gradients(y_TD.square().sum(), expected_TD.square().sum(), inputs, rtol=1e-7)


def run(block: MoEBlock, x: Tensor, seed: int) -> Tensor:
    """Output, after the backward pass of it and of all losses that the router has."""
    torch.manual_seed(seed)
    y = block(x)
    total = y.float().square().mean() if y.numel() else y.sum()
    for loss in LOSSES.values():
        try:
            total = total + loss(block.routing)
        except ValueError:  # not defined for this router
            continue
    total.backward()
    return y


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(ROUTERS)),
    pattern=PATTERNS,
    seed=SEEDS,
    count=COUNTS,
    scale=st.sampled_from([0.0, 1e-30, 1e-4, 1.0, 1e4, 1e14]),
    reach=st.sampled_from([0.0, 1e-20, 1.0, 1e3]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    train=st.booleans(),
    shared=st.integers(0, 2),
)
def test_finite_input_gives_finite_output_and_gradients(
    name, pattern, seed, count, scale, reach, dtype, train, shared
) -> None:
    """Logits from nothing to 1e17 (whose square, the z-loss, a float32 still holds), inputs of
    zeros, any float type."""
    options = {"shared_experts": shared, "expert_ratio": 0.5, "experts": SwiGLUExperts}
    block = fuzzed_block(name, pattern, seed, train, double=False, **options).to(dtype)
    with torch.no_grad():
        block.router.weight.mul_(scale)
    x_TD = (tokens(seed, count, DIM, double=False).detach() * reach).to(dtype).requires_grad_()
    y_TD = run(block, x_TD, seed)
    assert y_TD.dtype == dtype and y_TD.isfinite().all()
    routing = block.routing
    assert routing.gates_TE.isfinite().all()
    assert not (routing.mask_TE & ~block.active_E).any()
    assert x_TD.grad.isfinite().all()
    for parameter_name, parameter in block.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all(), parameter_name


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(set(ROUTERS) - {"sparsemixer", "noisy"})),
    pattern=PATTERNS,
    seed=SEEDS,
    value=st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    row=st.integers(0, 8),
    train=st.booleans(),
)
def test_a_token_that_is_no_number_spoils_no_other(name, pattern, seed, value, row, train) -> None:
    block = fuzzed_block(name, pattern, seed, train)
    x_TD = tokens(seed, 9, DIM).detach()
    torch.manual_seed(seed)  # for routers with noise
    clean_TD = block(x_TD)
    x_TD[row, 2] = value
    torch.manual_seed(seed)
    spoilt_TD = block(x_TD)
    others = torch.arange(9) != row
    torch.testing.assert_close(spoilt_TD[others], clean_TD[others], rtol=1e-11, atol=1e-12)
    assert not (block.routing.mask_TE & ~block.active_E).any()


@pytest.mark.parametrize("name", ["top1", "topp", "ternary-raw"])
@settings(max_examples=15, deadline=None)
@given(pattern=PATTERNS, seed=SEEDS, count=COUNTS, kind=st.sampled_from(["ema", "trained"]))
def test_default_vectors_of_any_setting(name, pattern, seed, count, kind) -> None:
    case = CASES[name]
    block = fuzzed_block(name, pattern, seed, case.train, default_vectors=kind)
    with torch.no_grad():
        block.default_ED.normal_(generator=torch.Generator().manual_seed(seed))
    x_TD = tokens(seed, count, DIM)
    y_TD = run(block, x_TD, seed)
    if count:
        default_ED = block.default_ED.detach()
        choices = naive_choices(case, block, x_TD)
        expected_TD = naive_output(block, x_TD, choices, default_ED=default_ED)
        torch.testing.assert_close(y_TD, expected_TD, rtol=1e-9, atol=1e-10)
    assert all(p.grad is None or p.grad.isfinite().all() for p in block.parameters())
