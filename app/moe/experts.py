"""Stacked expert weights and the grouped computation (shape legend in routing.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .products import HAS_ONEDNN, GroupedLinear, Linear, Unstack, compute_dtype, onednn_linear
from .routing import Pairs


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
        rows = zip(*(Unstack.apply(weight, slots, dtype) for weight in stacked), strict=True)
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
