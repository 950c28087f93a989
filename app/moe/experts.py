"""Stacked expert weights and the grouped computation (shape legend in routing.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from .routing import Pairs

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Experts(nn.Module):
    """E feed-forward networks of one shape, their weights stacked along the first axis.

    Subclasses declare the stacked parameters and write one expert's equation in `expert`; how the
    pairs of all experts are computed is decided here, by device.
    """

    down: nn.Parameter

    def __init__(self, dim: int, hidden: int, slots: int, init_std: float) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("hidden", hidden), ("slots", slots)):
            if value < 1:
                raise ValueError(f"experts need {name} >= 1, got {value}")
        self.dim, self.hidden, self.slots, self.init_std = dim, hidden, slots, init_std
        self.output_scale = 1.0

    @staticmethod
    def expert(linear: Linear, x: Tensor, *weights: Tensor) -> Tensor:
        """One expert's equation, x (n, D) -> (n, D), for any implementation of `linear`."""
        raise NotImplementedError

    def of_pairs(self, x_ND: Tensor, pairs: Pairs) -> Tensor:
        """Every pair's expert output, from one table of rows.

        Args:
            x_ND: expert inputs, contiguous by expert.
            pairs: which rows belong to which slot.

        Returns:
            y_ND: row n is E_e(x_n). Slots without rows get zero gradients, never None.
        """
        slots, sizes = self.plan(x_ND, pairs)
        return torch.cat(self(x_ND.split(sizes), slots, pairs))

    def plan(self, x: Tensor, pairs: Pairs) -> tuple[list[int] | None, list[int]]:
        """The parts in which the pairs are computed: the slot of each and its number of rows.

        On CUDA all rows in one part (slots None) where the grouped product takes them, without a
        host sync. Elsewhere one part for each slot with rows, but never none: an empty part keeps
        the graph, so that gradients are zero and not None.
        """
        aligned = self.dim % 8 == 0 and self.hidden % 8 == 0  # what grouped_mm takes
        if x.is_cuda and aligned and compute_dtype(x) == torch.bfloat16:
            return None, [len(pairs.token_N)]
        sizes = pairs.count_E.tolist()
        slots = [slot for slot, size in enumerate(sizes) if size] or [0]
        return slots, [sizes[slot] for slot in slots]

    def forward(
        self, inputs: Sequence[Tensor], slots: list[int] | None, pairs: Pairs
    ) -> list[Tensor]:
        """Outputs of the parts of a `plan`, from the rows of each (n, D)."""
        stacked = tuple(self.parameters())
        if slots is None:
            return [self.expert(GroupedLinear(pairs), inputs[0], *stacked)]
        # One addmm per contiguous slice: on CPU faster than grouped_mm, and exact in any dtype.
        dtype = compute_dtype(inputs[0])
        linear = self.linear(inputs[0])
        rows = zip(*(_Unstack.apply(weight, slots, dtype) for weight in stacked), strict=True)
        return [self.expert(linear, x, *row) for x, row in zip(inputs, rows, strict=True)]

    def linear(self, x: Tensor) -> Linear:
        """The fastest `F.linear` for x and one expert's weights."""
        return onednn_linear if self.by_onednn(x) else F.linear

    def by_onednn(self, x: Tensor) -> bool:
        """Whether float32 products with x on a CPU are to be oneDNN's (see `onednn_linear`)."""
        large = self.dim * self.hidden >= 2**14  # for less it isn't worth a compiled kernel
        wide = compute_dtype(x) == torch.float32 and x.device.type == "cpu"
        return large and wide and HAS_ONEDNN and torch.backends.mkldnn.enabled

    def compiled_by_size(self, x: Tensor) -> bool:
        """Whether a kernel is compiled for every new number of rows of a product with x."""
        half = compute_dtype(x) == torch.bfloat16 and x.device.type == "cpu"
        return half or self.by_onednn(x)

    @torch.no_grad()
    def reset(self) -> None:
        """Draws all weights: normal with `init_std`, biases 0."""
        for parameter in self.parameters():
            if parameter.ndim == 3:
                parameter.normal_(std=self.init_std)
            else:
                parameter.zero_()

    @torch.no_grad()
    def scale_output(self, scale: float) -> None:
        """Scales the output layers, and those of experts drawn later (residual initialisation)."""
        self.down.mul_(scale)
        self.output_scale *= scale

    def fresh(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Weights of one expert drawn as at construction, by parameter name (on the CPU)."""
        weights = {}
        for name, parameter in self.named_parameters():
            weights[name] = torch.zeros(parameter.shape[1:])
            if parameter.ndim == 3:
                weights[name].normal_(std=self.init_std, generator=generator)
        weights["down"] *= self.output_scale
        return weights

    def flops_per_pair(self) -> int:
        """Multiply-adds of one expert on one token, counted as 2 FLOPs each (forward)."""
        return 2 * sum(p.shape[1:].numel() for p in self.parameters() if p.ndim == 3)


class GeluExperts(Experts):
    """Two layers with bias around a GELU: the MLP of a Vision Transformer.

    E_e(x) = down_e gelu(up_e x + up_bias_e) + down_bias_e

    Args:
        dim: model width D.
        hidden: hidden width F of each expert.
        slots: number E of expert slots.
        init_std: standard deviation of the normal initialisation; biases start at 0.
    """

    def __init__(self, dim: int, hidden: int, slots: int, init_std: float = 0.02) -> None:
        super().__init__(dim, hidden, slots, init_std)
        self.up = nn.Parameter(torch.empty(slots, hidden, dim))
        self.up_bias = nn.Parameter(torch.empty(slots, hidden))
        self.down = nn.Parameter(torch.empty(slots, dim, hidden))
        self.down_bias = nn.Parameter(torch.empty(slots, dim))
        self.reset()

    @staticmethod
    def expert(linear: Linear, x: Tensor, *weights: Tensor) -> Tensor:
        up, up_bias, down, down_bias = weights
        return linear(F.gelu(linear(x, up, up_bias)), down, down_bias)


class SwiGLUExperts(Experts):
    """Gated linear units without bias (Shazeer 2020, arXiv 2002.05202): the Llama feed-forward.

    E_e(x) = down_e (silu(gate_e x) * up_e x)

    Args:
        dim: model width D.
        hidden: hidden width F of each expert.
        slots: number E of expert slots.
        init_std: standard deviation of the normal initialisation.
    """

    def __init__(self, dim: int, hidden: int, slots: int, init_std: float = 0.02) -> None:
        super().__init__(dim, hidden, slots, init_std)
        self.gate = nn.Parameter(torch.empty(slots, hidden, dim))
        self.up = nn.Parameter(torch.empty(slots, hidden, dim))
        self.down = nn.Parameter(torch.empty(slots, dim, hidden))
        self.reset()

    @staticmethod
    def expert(linear: Linear, x: Tensor, *weights: Tensor) -> Tensor:
        gate, up, down = weights
        return linear(F.silu(linear(x, gate, None)) * linear(x, up, None), down, None)


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


class _Unstack(Function):
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
