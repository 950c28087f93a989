"""Matrix products of experts, tuned for the device (shape legend in routing.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from .routing import Pairs

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class GroupedLinear:
    """`F.linear` for rows grouped by expert: one grouped matrix product, no host sync."""

    def __init__(self, pairs: Pairs) -> None:
        self.expert_N = pairs.expert_N
        self.ends_E = pairs.count_E.cumsum(0).to(torch.int32)

    def __call__(self, x_NI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None) -> Tensor:
        dtype = compute_dtype(x_NI)
        y_NO = F.grouped_mm(x_NI.to(dtype), weight_EOI.to(dtype).transpose(1, 2), offs=self.ends_E)
        if y_NO.requires_grad:  # its backward refuses an expanded gradient, as of a sum
            y_NO.register_hook(Tensor.contiguous)
        # An embedding: indexing's backward pass adds the many rows of an expert one after another.
        return y_NO if bias_EO is None else y_NO + F.embedding(self.expert_N, bias_EO.to(dtype))


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with x: autocast's, where it is on."""
    device = x.device.type
    # Autocast leaves float64 alone.
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of float32 on a CPU by oneDNN, in about half the time on AMD's.

    torch's own product asks MKL, which keeps to AVX2 on processors that are not Intel's.
    """
    return _OneDNNLinear.apply(x, weight, bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not x.numel():  # oneDNN takes no empty matrix
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


if HAS_ONEDNN:

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _count(x_shape: Any, weight_shape: Any, *_: Any, **__: Any) -> int:
        return 2 * math.prod(x_shape) * weight_shape[0]


class _OneDNNLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.t()) if needs_x else None,
            _product(grad.t(), x.t()) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


class Unstack(Function):
    """Stacked weights -> the weights of the slots in use, in the dtype of the products.

    Only they are cast, and their gradients are written into one stacked tensor, 0 elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, stacked: Tensor, slots: list[int], dtype: torch.dtype) -> tuple:
        ctx.slots, ctx.shape, ctx.dtype = slots, stacked.shape, stacked.dtype
        return tuple(stacked[slot].to(dtype) for slot in slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        stacked = grads[0].new_empty(ctx.shape, dtype=ctx.dtype)
        rows = dict(zip(ctx.slots, grads, strict=True))
        for slot, row in enumerate(stacked):
            if slot in rows:
                row.copy_(rows[slot])
            else:
                row.zero_()
        return stacked, None, None
