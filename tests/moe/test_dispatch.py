"""Rows to their experts and back: equal to loops, deterministic, and steady in shape."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from app.moe import GeluExperts, MoEBlock, Pairs, TopAny
from app.moe.dispatch import Dispatcher, sum_by_expert

from .cases import DIM, make_block, tokens
from .test_block import ROUTERS
from .test_experts import group

MASKS = {
    "mixed": [[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]],
    "first and last token nowhere": [[0, 0, 0], [0, 1, 1], [0, 0, 0]],
    "all": [[1, 1], [1, 1]],
    "none": [[0, 0, 0], [0, 0, 0]],
}


def dispatch(rows: list[list[int]]) -> tuple[Dispatcher, list[tuple[int, int]]]:
    """A dispatcher, and the pairs (expert, token) that it stands for, in their order."""
    mask_TE = torch.tensor(rows, dtype=torch.bool)
    expert_N, token_N = mask_TE.t().nonzero(as_tuple=True)
    pairs = Pairs(expert_N, token_N, mask_TE.sum(0))
    return Dispatcher(pairs, mask_TE), list(zip(expert_N.tolist(), token_N.tolist(), strict=True))


def double(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("rows", MASKS.values(), ids=MASKS)
def test_gather_and_combine_equal_loops(rows: list[list[int]]) -> None:
    """Forward exactly, backward against finite differences."""
    dispatcher, pairs = dispatch(rows)
    x_TD, y_ND, gate_N = double(len(rows), 4), double(len(pairs), 4), double(len(pairs))
    x_ND = dispatcher.gather(x_TD, torch.float64)
    assert [row.tolist() for row in x_ND] == [x_TD[token].tolist() for _, token in pairs]
    expected_TD = torch.zeros_like(x_TD)
    for (_, token), y_D, gate in zip(pairs, y_ND, gate_N, strict=True):
        expected_TD[token] += gate * y_D
    torch.testing.assert_close(dispatcher.combine(y_ND, gate_N), expected_TD)
    assert torch.autograd.gradcheck(lambda x: dispatcher.gather(x, torch.float64), x_TD)
    assert torch.autograd.gradcheck(dispatcher.combine, (y_ND, gate_N))


def test_combine_in_several_parts() -> None:
    """More rows than one part of the backward pass holds."""
    dispatcher, pairs = dispatch(torch.ones(700, 4).tolist())
    y_ND, gate_N, weight_TD = double(len(pairs), 2), double(len(pairs)), double(700, 2).detach()
    actual_TD = dispatcher.combine(y_ND, gate_N)
    token_N = torch.tensor([token for _, token in pairs])
    expected_TD = torch.zeros(700, 2).double().index_add(0, token_N, y_ND * gate_N[:, None])
    torch.testing.assert_close(actual_TD, expected_TD)
    inputs = (y_ND, gate_N)
    got = torch.autograd.grad((actual_TD * weight_TD).sum(), inputs)
    want = torch.autograd.grad((expected_TD * weight_TD).sum(), inputs)
    torch.testing.assert_close(got, want)


def test_half_precision_rows_add_up_in_the_gates_dtype() -> None:
    """1 + 2^-10 of two bfloat16 rows is no bfloat16 number."""
    dispatcher, _ = dispatch([[1, 1]])
    y_ND = torch.tensor([[1.0], [2.0**-10]], dtype=torch.bfloat16)
    assert dispatcher.combine(y_ND, torch.ones(2)).item() == 1.0 + 2.0**-10
    assert dispatcher.gather(torch.ones(1, 1), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("sizes", [[3, 0, 2], [0, 0, 4], [0, 0, 0]])
def test_sum_by_expert_equals_loop(sizes: list[int]) -> None:
    pairs = group(sizes)
    y_ND, weight_N = torch.randn(sum(sizes), 4), torch.rand(sum(sizes))
    expected_ED = torch.zeros(3, 4)
    for expert, y_D, weight in zip(pairs.expert_N, y_ND, weight_N, strict=True):
        expected_ED[expert] += weight * y_D
    torch.testing.assert_close(sum_by_expert(y_ND, weight_N, pairs), expected_ED)


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
    """At most 16 an octave and little larger than the slice; float32 ones are exactly as large."""
    experts = GeluExperts(2, 2, 1)
    seen = {torch.bfloat16: set(), torch.float32: set()}
    for dtype, sizes in seen.items():
        for rows in [*range(1, 70), *range(900, 1100)]:
            with ProductRows() as products:
                experts.to(dtype)(torch.ones(rows, 2, dtype=dtype), group([rows]))
            (size,) = products.seen
            assert rows <= size < rows * 17 / 16 + 1
            sizes.add(size)
    assert len(seen[torch.float32]) == 269
    assert len([size for size in seen[torch.bfloat16] if size >= 900]) <= 8


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
