"""Rows to their experts and back: equal to loops, deterministic, and steady in shape."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from app.moe import Experts, MoEBlock, Router, Ternary, TopAny, TopK
from app.moe.dispatch import Dispatcher
from app.moe.experts import HAS_ONEDNN

from .cases import DIM, EXPERTS, make_block, randomize, tokens
from .test_block import ROUTERS

PARTS = {
    "two": ([2, 0, 1, 3, 0], [2, 3]),
    "one token in all": ([1, 1, 1], [1, 1, 1]),
    "one part": ([0, 2, 0, 3], [4]),
    "no row": ([], [0]),
}


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("tokens_N", "sizes"), PARTS.values(), ids=PARTS)
def test_gather_and_combine_equal_loops(tokens_N: list[int], sizes: list[int]) -> None:
    """Forward exactly, backward against finite differences."""
    dispatcher = Dispatcher(torch.tensor(tokens_N, dtype=torch.int64), sizes, torch.float64)
    x_TD, y_ND, gate_N = double(5, 4), double(len(tokens_N), 4), double(len(tokens_N))
    parts = dispatcher.gather(x_TD)
    assert [len(part) for part in parts] == sizes
    assert torch.cat(parts).tolist() == [x_TD[token].tolist() for token in tokens_N]
    expected_TD = torch.zeros_like(x_TD)
    for token, y_D, gate in zip(tokens_N, y_ND, gate_N, strict=True):
        expected_TD[token] += gate * y_D

    def combine(y_ND: Tensor, gate_N: Tensor) -> Tensor:
        return dispatcher.combine(y_ND.split(sizes), gate_N, 5)

    torch.testing.assert_close(combine(y_ND, gate_N), expected_TD)
    assert torch.autograd.gradcheck(dispatcher.gather, x_TD)
    assert torch.autograd.gradcheck(combine, (y_ND, gate_N))


def test_half_precision_rows_add_up_in_the_gates_dtype() -> None:
    """1 + 2^-10 of two bfloat16 rows is no bfloat16 number; so it is with gradients."""
    dispatcher = Dispatcher(torch.tensor([0, 0]), [1, 1], torch.bfloat16)
    parts = [torch.tensor([[1.0]]).bfloat16(), torch.tensor([[2.0**-10]]).bfloat16()]
    assert dispatcher.combine(parts, torch.ones(2), 1).item() == 1.0 + 2.0**-10
    x_TD = torch.ones(1, 1, requires_grad=True)
    rows = dispatcher.gather(x_TD)
    assert all(row.dtype == torch.bfloat16 for row in rows)
    torch.autograd.backward(rows, parts)
    assert x_TD.grad.item() == 1.0 + 2.0**-10


def test_padding_is_invisible() -> None:
    """Parts on the grid end in zeros, whatever comes out for them is left out."""
    token_N = torch.arange(37)
    dispatcher = Dispatcher(token_N, [37], torch.bfloat16, on_grid=True)
    x_TD = torch.randn(37, 3, requires_grad=True)
    (part,) = dispatcher.gather(x_TD)
    assert len(part) == 38 and not part[37:].any()
    y_TD = dispatcher.combine([part + 1.0], torch.ones(37), 37)
    torch.testing.assert_close(y_TD, x_TD.bfloat16() + 1.0, check_dtype=False, rtol=0, atol=0)
    y_TD.sum().backward()
    assert torch.equal(x_TD.grad, torch.ones(37, 3))


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize(
    ("router", "vectors"), [(TopK, "none"), (TopK, "ema"), (TopAny, "none"), (Ternary, "none")]
)
def test_one_grouped_part_equals_a_part_for_each_expert(
    router: type[Router], vectors: str, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole block as CUDA computes it, here on the CPU."""
    block = MoEBlock(8, 16, router, EXPERTS[experts], num_experts=4, default_vectors=vectors)
    randomize(block, 0)
    block.deactivate(1)
    if block.defaults:
        block.defaults.follow(0.9, "router")
    results = []
    for _ in range(2):
        x_TD = torch.randn(30, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y_TD = block(x_TD)
        block.zero_grad()
        y_TD.square().sum().backward()
        sums = [block.defaults.observed.sum_ED] if block.defaults else []
        grads = [parameter.grad.clone() for parameter in block.parameters()]
        results.append([y_TD.detach(), x_TD.grad, *grads, *sums])
        all_at_once = lambda self, x, pairs: (None, [len(pairs.token_N)])  # noqa: E731
        monkeypatch.setattr(Experts, "plan", all_at_once)
    for slices, grouped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, slices, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------- determinism


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_two_runs_are_the_same_bits(name: str, bf16: bool) -> None:
    """Output and all gradients, with torch's check for nondeterministic operations on."""
    results = []
    for _ in range(2):
        block = make_block(ROUTERS[name], double=False)
        x_TD = tokens(0, 300, DIM, double=False)
        torch.use_deterministic_algorithms(True)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                y_TD = block(x_TD)
            y_TD.square().sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        results.append([y_TD, x_TD.grad, *(p.grad for p in block.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---------------------------------------------------------------------- steady shapes


class ProductRows(TorchDispatchMode):
    """Collects the number of rows of each product with bias."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.addmm.default:
            self.seen.add(len(args[1]))
        return func(*args, **(kwargs or {}))


def test_bfloat16_products_come_in_few_sizes() -> None:
    """At most 16 an octave and little larger than the slice; small float32 ones are as large."""
    block = MoEBlock(DIM, 8, TopK, num_experts=2)
    seen = {True: set(), False: set()}
    for bf16, sizes in seen.items():
        for rows in [*range(1, 70), *range(900, 1100, 2)]:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16), ProductRows() as products:
                block(torch.ones(rows, DIM))
            (size,) = products.seen
            assert rows <= size < rows * 17 / 16 + 1
            sizes.add(size)
    assert len(seen[False]) == 169
    assert len([size for size in seen[True] if size >= 900]) <= 8


@pytest.mark.skipif(not HAS_ONEDNN, reason="torch without oneDNN")
@pytest.mark.parametrize("router", [TopK, TopAny, Ternary])
def test_large_float32_block_equals_float64(router: type[Router]) -> None:
    """Padded parts and oneDNN's products, with the gradients of everything."""
    block = MoEBlock(128, 128, router, num_experts=4, shared_experts=1)
    double = MoEBlock(128, 128, router, num_experts=4, shared_experts=1).double()
    double.load_state_dict(block.state_dict())
    x_TD, weight_TD = torch.randn(75, 128), torch.randn(75, 128)
    results = []
    for module, dtype in ((block, torch.float32), (double, torch.float64)):
        x = x_TD.to(dtype).requires_grad_()
        assert module.experts.compiled_by_size(x) == (dtype == torch.float32)
        y = module(x)
        leaves = [x, *module.parameters()]
        results.append([y, *torch.autograd.grad((y * weight_TD).sum(), leaves, allow_unused=True)])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            atol = 1e-5 * float(b.detach().abs().max())
            torch.testing.assert_close(a, b, rtol=1e-4, atol=atol, check_dtype=False)


class Sandwich(nn.Module):
    """Dense layers around a block."""

    def __init__(self, block: MoEBlock) -> None:
        super().__init__()
        self.before, self.block, self.after = nn.Linear(DIM, DIM), block, nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.block(self.before(x).relu()))


def test_compiled_model_breaks_at_the_block_and_never_again() -> None:
    """What is around a block is compiled once, whatever the loads and however many experts."""
    block = MoEBlock(DIM, 8, TopAny, num_experts=3, max_experts=6)
    model = Sandwich(block)
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter)
    for batch in range(8):
        if batch in (2, 5):
            block.activate(batch)
        if batch == 4:
            block.deactivate(0)
        x_TD = torch.randn(20, DIM)
        y_TD = compiled(x_TD)
        torch.testing.assert_close(y_TD, model(x_TD))
        y_TD.sum().backward()
        if batch == 0:
            first = counter.frame_count
    assert first == 2  # before the block and after it
    assert counter.frame_count == first
    torch._dynamo.reset()
