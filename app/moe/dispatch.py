"""Rows to their experts and back to their tokens (shape legend in routing.py).

Part by part, so that what is at work stays in a CPU's cache. A part is the rows of one expert, or
of all experts where one grouped product takes them. Suffix n: rows of one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Dispatcher:
    """Carries rows between tokens and parts, for one batch.

    Where products are oneDNN's, a part ends in rows of zeros, up to one of 16 sizes an octave: it
    compiles a kernel for every new shape of a product, which takes longer than the product, and
    the number of an expert's tokens is a new one in every batch.

    Args:
        token_N: token of each row.
        sizes: rows of each part.
        dtype: what experts compute in.
        on_grid: whether to pad the parts.
    """

    def __init__(
        self, token_N: Tensor, sizes: list[int], dtype: torch.dtype, on_grid: bool = False
    ) -> None:
        self.sizes, self.dtype = sizes, dtype
        self.tokens = token_N.split(sizes)
        self.padded = [_on_grid(size) if on_grid else size for size in sizes]

    def gather(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """Each part's rows (n, D), in `dtype`. The gradient is summed in x's own dtype."""
        return _Gather.apply(x_TD, self)

    def combine(self, parts: Sequence[Tensor], gate_N: Tensor, tokens: int) -> Tensor:
        """Sum over each token's rows of gate * y (T, D), in the dtype of the gates."""
        return _Combine.apply(gate_N, tokens, self, *parts)

    def take(self, x_TD: Tensor) -> list[Tensor]:
        """Each part's rows, padded. Without gradient."""
        parts = []
        for token_n, size, padded in zip(self.tokens, self.sizes, self.padded, strict=True):
            x_nD = x_TD.new_empty(padded, x_TD.shape[1])
            torch.index_select(x_TD, 0, token_n, out=x_nD[:size])
            x_nD[size:].zero_()
            parts.append(x_nD)
        return parts


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, dispatcher: Dispatcher) -> tuple[Tensor, ...]:
        ctx.dispatcher, ctx.shape, ctx.dtype = dispatcher, x_TD.shape, x_TD.dtype
        return tuple(dispatcher.take(x_TD.to(dispatcher.dtype)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad_TD = grads[0].new_zeros(ctx.shape, dtype=ctx.dtype)
        for token_n, grad_nD in zip(ctx.dispatcher.tokens, grads, strict=True):
            grad_TD.index_add_(0, token_n, grad_nD[: len(token_n)].to(ctx.dtype))
        return grad_TD, None


class _Combine(Function):
    @staticmethod
    def forward(
        ctx: Any, gate_N: Tensor, tokens: int, dispatcher: Dispatcher, *parts: Tensor
    ) -> Tensor:
        ctx.dispatcher = dispatcher
        ctx.save_for_backward(gate_N, *parts)
        out_TD = gate_N.new_zeros(tokens, parts[0].shape[1])
        gates = gate_N.split(dispatcher.sizes)
        for token_n, gate_n, y_nD in zip(dispatcher.tokens, gates, parts, strict=True):
            weighted_nD = y_nD[: len(token_n)].to(gate_n.dtype) * gate_n[:, None]
            out_TD.index_add_(0, token_n, weighted_nD)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        gate_N, *parts = ctx.saved_tensors
        grad_gate_N, grad_parts = torch.empty_like(gate_N), []
        sizes = ctx.dispatcher.sizes
        for token_n, gate_n, grad_gate_n, y_nD in zip(
            ctx.dispatcher.tokens, gate_N.split(sizes), grad_gate_N.split(sizes), parts, strict=True
        ):
            size = len(token_n)
            grad_nD, grad_y_nD = grad_TD.index_select(0, token_n), torch.empty_like(y_nD)
            torch.sum(grad_nD * y_nD[:size].to(grad_nD), 1, out=grad_gate_n)
            torch.mul(grad_nD, gate_n[:, None], out=grad_y_nD[:size])
            grad_y_nD[size:].zero_()
            grad_parts.append(grad_y_nD)
        return grad_gate_N, None, None, *grad_parts


def _on_grid(rows: int) -> int:
    step = 2 ** max(0, rows.bit_length() - 5)
    return rows + -rows % step
