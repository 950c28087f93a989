"""Expert equations, the two ways of computing all pairs, and initialisation."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from app.moe import Experts, GeluExperts, Pairs, SwiGLUExperts
from app.moe.experts import HAS_ONEDNN, GroupedLinear

from .cases import EXPERTS, NAIVE_EXPERTS, randomize

KINDS = list(EXPERTS.values())
SIZES = {
    "some empty": [3, 0, 5, 1, 0],
    "first empty": [0, 2, 2, 4, 1],
    "one expert": [0, 0, 7, 0, 0],
    "one row": [0, 0, 0, 1, 0],
    "all": [2, 3, 1, 4, 2],
    "none": [0, 0, 0, 0, 0],
}


def group(sizes: list[int]) -> Pairs:
    """Pairs with the given number of rows for each slot."""
    count_E = torch.tensor(sizes)
    expert_N = torch.repeat_interleave(torch.arange(len(sizes)), count_E)
    return Pairs(expert_N, torch.arange(len(expert_N)), count_E)


def build(kind: type[Experts], dim: int = 8, hidden: int = 16) -> Experts:
    """Multiples of 8 in every dimension by default, as grouped products want them."""
    experts = kind(dim, hidden, 5)
    randomize(experts, 0)
    return experts


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_slices_equal_naive_loop(kind: type[Experts], sizes: list[int]) -> None:
    """Row by row, with the gradients of the input and all stacked weights (float64)."""
    experts = build(kind).double()
    x_ND = inputs(sum(sizes), torch.float64)
    pairs = group(sizes)
    actual_ND = experts.of_pairs(x_ND, pairs)
    assert actual_ND.shape == x_ND.shape
    weights = dict(experts.named_parameters())
    rows = [
        NAIVE_EXPERTS[kind](weights, int(e), x_D)
        for e, x_D in zip(pairs.expert_N, x_ND, strict=True)
    ]
    expected_ND = torch.stack(rows) if rows else x_ND * 0.0
    torch.testing.assert_close(actual_ND, expected_ND, rtol=1e-11, atol=1e-13)
    leaves = [x_ND, *weights.values()]
    got = torch.autograd.grad(actual_ND.square().sum(), leaves)
    want = torch.autograd.grad(expected_ND.square().sum(), leaves, allow_unused=True)
    for leaf, a, b in zip(leaves, got, want, strict=True):
        expected = torch.zeros_like(leaf) if b is None else b
        torch.testing.assert_close(a, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_products_equal_slices(
    kind: type[Experts], sizes: list[int], dtype: torch.dtype
) -> None:
    """The function that CUDA uses, here on the CPU: same outputs and gradients, zeros included."""
    experts = build(kind).to(dtype)
    x_ND, pairs = inputs(sum(sizes), dtype), group(sizes)
    stacked = list(experts.parameters())
    weight_ND = torch.randn(x_ND.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    results = []
    for y_ND in (
        experts.of_pairs(x_ND, pairs),
        experts.expert(GroupedLinear(pairs), x_ND, *stacked),
    ):
        grads = torch.autograd.grad((y_ND * weight_ND).sum(), [x_ND, *stacked])
        results.append([y_ND.detach(), *grads])
    tolerance = 1e-5 if dtype == torch.float32 else 0.06
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for slot, size in enumerate(sizes):
        if size == 0:
            assert not any(grad[slot].any() for grad in results[1][2:])


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_products_under_autocast(kind: type[Experts]) -> None:
    """float32 weights, bf16 products; gradients come back in float32."""
    experts, pairs = build(kind), group(SIZES["some empty"])
    x_ND = inputs(9)
    with torch.autocast("cpu", torch.bfloat16):
        y_ND = experts.expert(GroupedLinear(pairs), x_ND, *experts.parameters())
        slices_ND = experts.of_pairs(x_ND, pairs)
    assert y_ND.dtype == slices_ND.dtype == torch.bfloat16
    torch.testing.assert_close(y_ND, slices_ND, rtol=0.06, atol=0.06)
    y_ND.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in experts.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_products_take_a_broadcast_gradient(kind: type[Experts]) -> None:
    """A plain sum hands back an expanded gradient, which the slices take too."""
    experts, pairs, x_ND = build(kind), group(SIZES["some empty"]), inputs(9)
    stacked = list(experts.parameters())
    expected = torch.autograd.grad(experts.of_pairs(x_ND, pairs).sum(), stacked)
    actual = torch.autograd.grad(
        experts.expert(GroupedLinear(pairs), x_ND, *stacked).sum(), stacked
    )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dim", "hidden"), [(64, 128), (64, 52), (20, 12)])
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_equals_cpu_for_any_width(kind: type[Experts], dim: int, hidden: int) -> None:
    """bf16 autocast on CUDA, widths that are no multiple of 8 included."""
    experts, pairs = build(kind, dim, hidden), group(SIZES["some empty"])
    x_ND = torch.randn(9, dim, generator=torch.Generator().manual_seed(1))
    results = []
    for device in ("cpu", "cuda"):
        experts.zero_grad()
        here = Pairs(*(getattr(pairs, f).to(device) for f in ("expert_N", "token_N", "count_E")))
        with torch.autocast(device, torch.bfloat16):
            y_ND = experts.to(device)(x_ND.to(device), here).float()
        y_ND.sum().backward()
        results.append([y_ND.detach().cpu(), *(p.grad.cpu() for p in experts.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.1 * float(a.abs().max()))


@pytest.mark.parametrize("bias", [True, False])
def test_grouped_linear_is_linear_by_group(bias: bool) -> None:
    pairs = group(SIZES["some empty"])
    weight_EOI, bias_EO = torch.randn(5, 16, 8), torch.randn(5, 16) if bias else None
    x_NI = inputs(9).detach()
    actual_NO = GroupedLinear(pairs)(x_NI, weight_EOI, bias_EO)
    expected_NO = torch.stack(
        [
            F.linear(x, weight_EOI[e], None if bias_EO is None else bias_EO[e])
            for e, x in zip(pairs.expert_N, x_NI, strict=True)
        ]
    )
    torch.testing.assert_close(actual_NO, expected_NO, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_initialisation(kind: type[Experts]) -> None:
    """Normal weights with the given standard deviation, biases 0; `fresh` draws alike."""
    experts = kind(64, 128, 4, init_std=0.05)
    for name, parameter in experts.named_parameters():
        if parameter.ndim == 3:
            assert float(parameter.detach().std()) == pytest.approx(0.05, rel=0.03), name
        else:
            assert not parameter.any(), name
    experts.scale_output(0.5)
    experts.scale_output(0.5)
    assert float(experts.down.detach().std()) == pytest.approx(0.0125, rel=0.03)
    fresh = experts.fresh(torch.Generator().manual_seed(0))
    assert set(fresh) == {name for name, _ in experts.named_parameters()}
    for name, parameter in experts.named_parameters():
        assert fresh[name].shape == parameter.shape[1:]
        expected = float(parameter.detach().std()) if parameter.ndim == 3 else 0.0
        assert float(fresh[name].std()) == pytest.approx(expected, rel=0.05), name
    again = experts.fresh(torch.Generator().manual_seed(0))
    assert all(torch.equal(fresh[name], again[name]) for name in fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_flops_per_pair(kind: type[Experts]) -> None:
    """What torch counts for one expert on one token."""
    experts = kind(8, 16, 5)
    pairs = group([3, 0, 4, 0, 0])
    with FlopCounterMode(display=False) as counter:
        experts.of_pairs(inputs(7).detach(), pairs)
    assert counter.get_total_flops() == 7 * experts.flops_per_pair()
    matrices = {GeluExperts: 2, SwiGLUExperts: 3}[kind]
    assert experts.flops_per_pair() == 2 * matrices * 8 * 16


@pytest.mark.skipif(not HAS_ONEDNN, reason="torch without oneDNN")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_large_float32_experts_by_onednn(kind: type[Experts], sizes: list[int]) -> None:
    """As float64 ones, forward and backward, and counted by torch as the same FLOPs."""
    experts, double = kind(128, 136, 5), kind(128, 136, 5).double()
    randomize(experts, 0)
    double.load_state_dict(experts.state_dict())
    pairs = group(sizes)
    x_ND = torch.randn(sum(sizes), 128, requires_grad=True)
    assert experts.by_onednn(x_ND) and not double.by_onednn(x_ND.double())
    with FlopCounterMode(display=False) as counter:
        y_ND = experts.of_pairs(x_ND, pairs)
    assert counter.get_total_flops() == sum(sizes) * experts.flops_per_pair()
    expected_ND = double.of_pairs(x_ND.double(), pairs)
    scale = {"rtol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(y_ND, expected_ND, atol=1e-5 * _largest(expected_ND), **scale)
    # A gradient with strides of its own, as a transposed one.
    grad_ND = torch.randn(128, sum(sizes)).t()
    got = torch.autograd.grad(y_ND, [x_ND, *experts.parameters()], grad_ND)
    want = torch.autograd.grad(expected_ND, [x_ND, *double.parameters()], grad_ND.double())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5 * _largest(b), **scale)


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


@pytest.mark.parametrize("wrong", ["dim", "hidden", "slots"])
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_below_one_are_refused(kind: type[Experts], wrong: str) -> None:
    with pytest.raises(ValueError, match=f"experts need {wrong} >= 1, got 0"):
        kind(**({"dim": 4, "hidden": 4, "slots": 2} | {wrong: 0}))


def test_output_is_independent_of_other_slots() -> None:
    """Slots without rows may hold anything, NaN included."""
    experts = build(GeluExperts)
    pairs, x_ND = group(SIZES["some empty"]), inputs(9).detach()
    before_ND = experts.of_pairs(x_ND, pairs)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter[[1, 4]] = torch.nan
    assert torch.equal(experts.of_pairs(x_ND, pairs), before_ND)


def test_partial_options_reach_the_experts() -> None:
    assert partial(GeluExperts, init_std=0.5)(64, 64, 2).up.std() > 0.4
