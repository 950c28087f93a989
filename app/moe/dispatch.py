"""Rows to their experts and back to their tokens (shape legend in routing.py).

Both ways are gathers, forward and backward: a token's rows are added in a fixed order by one
embedding bag, which is faster than `index_add` and deterministic on every device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .routing import Pairs


class Dispatcher:
    """Carries rows between tokens and experts, for one batch.

    Args:
        pairs: the executed pairs.
        mask_TE: the same pairs as a table.
    """

    def __init__(self, pairs: Pairs, mask_TE: Tensor) -> None:
        self.token_N = pairs.token_N
        self.row_N = pairs.token_N.argsort(stable=True)  # rows in the order of their tokens
        count_T = mask_TE.sum(1)
        self.start_T = count_T.cumsum(0) - count_T  # where a token's rows begin in row_N

    def gather(self, x_TD: Tensor, dtype: torch.dtype) -> Tensor:
        """The token of each pair (N, D), in `dtype`. Its gradient is summed in x's own dtype."""
        return _Gather.apply(x_TD, dtype, self)

    def combine(self, y_ND: Tensor, gate_N: Tensor) -> Tensor:
        """Sum over each token's pairs of gate * y (T, D), in the dtype of the gates."""
        return _Combine.apply(y_ND, gate_N, self)

    def sum_by_token(self, y_ND: Tensor, weight_N: Tensor | None = None) -> Tensor:
        """Sum over each token's rows [times a weight in y's dtype] (T, D). Without gradient."""
        if not len(y_ND):
            return y_ND.new_zeros(len(self.start_T), y_ND.shape[1])
        if weight_N is not None:
            weight_N = weight_N.index_select(0, self.row_N)
        return F.embedding_bag(
            self.row_N, y_ND, self.start_T, mode="sum", per_sample_weights=weight_N
        )


def sum_by_expert(y_ND: Tensor, weight_N: Tensor, pairs: Pairs) -> Tensor:
    """Sum over each expert's rows of weight * y (E, D), in y's dtype. Without gradient."""
    if y_ND.is_cuda or not len(y_ND):  # few and long bags: CUDA would walk them one row at a time
        zeros_ED = y_ND.new_zeros(len(pairs.count_E), y_ND.shape[1])
        return zeros_ED.index_add(0, pairs.expert_N, y_ND * weight_N[:, None])
    row_N = torch.arange(len(y_ND), device=y_ND.device)
    start_E = pairs.count_E.cumsum(0) - pairs.count_E
    return F.embedding_bag(row_N, y_ND, start_E, mode="sum", per_sample_weights=weight_N)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, dtype: torch.dtype, dispatcher: Dispatcher) -> Tensor:
        ctx.dispatcher, ctx.dtype = dispatcher, x_TD.dtype
        return x_TD.to(dtype).index_select(0, dispatcher.token_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        return ctx.dispatcher.sum_by_token(grad_ND).to(ctx.dtype), None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, gate_N: Tensor, dispatcher: Dispatcher) -> Tensor:
        ctx.dispatcher = dispatcher
        ctx.save_for_backward(y_ND, gate_N)
        return dispatcher.sum_by_token(y_ND.to(gate_N.dtype), gate_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        y_ND, gate_N = ctx.saved_tensors
        grad_y_ND, grad_gate_N = torch.empty_like(y_ND), torch.empty_like(gate_N)
        parts = (ctx.dispatcher.token_N, y_ND, gate_N, grad_y_ND, grad_gate_N)
        # In parts that stay in a CPU's cache, instead of temporaries of N rows.
        size = 1024 if y_ND.device.type == "cpu" else max(1, len(y_ND))
        for token_n, y_nD, gate_n, grad_y_nD, grad_gate_n in zip(
            *(part.split(size) for part in parts), strict=True
        ):
            grad_nD = grad_TD.index_select(0, token_n)
            torch.sum(grad_nD * y_nD.to(grad_nD), 1, out=grad_gate_n)
            torch.mul(grad_nD, gate_n[:, None], out=grad_y_nD)
        return grad_y_ND, grad_gate_N, None
