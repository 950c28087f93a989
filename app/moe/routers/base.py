"""What all routers share, and what all routers over a softmax share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..routing import Routing
from ..sharded import write_slot


class Router(nn.Module):
    """Decides which experts a token takes, and with which weights.

    Args:
        dim: model width D.
        slots: number E of expert slots.

    Attributes:
        weight: the routing vectors, one row for each slot (and for what else a method chooses).
        why_not_default_vectors: why Default MoE can't be combined with this router, or None.
        why_not_adaptive: why experts can't be added and removed under this router, or None.
    """

    weight: nn.Parameter
    why_not_default_vectors: str | None = None
    why_not_adaptive: str | None = None

    def __init__(self, dim: int, slots: int) -> None:
        super().__init__()
        self.dim, self.slots = dim, slots

    def forward(self, x_TD: Tensor, active_E: Tensor) -> Routing:
        """Routes a batch.

        Args:
            x_TD: tokens, in float32 (or float64); the block turns autocast off around a router.
            active_E: bool, the slots that exist.
        """
        raise NotImplementedError

    def aim(self, slot: int, direction_D: Tensor) -> None:
        """Points a slot's routing vector in a direction (a new expert of DynMoE)."""
        write_slot(self.weight, slot, direction_D)

    def flops_per_token(self) -> int:
        """FLOPs of one token's routing (a multiply-add counts 2)."""
        return 2 * self.weight.numel()


@dataclass(frozen=True)
class SoftmaxRouting(Routing):
    """A routing by softmax probabilities.

    Attributes:
        logits_TE: router logits, -inf for inactive slots.
        probs_TE: softmax over the active slots.
    """

    logits_TE: Tensor
    probs_TE: Tensor

    def importance_E(self) -> Tensor:
        return self.probs_TE.mean(0)

    def distribution_TR(self) -> Tensor:
        return self.probs_TE

    def default_weights_TE(self) -> Tensor:
        """p of the experts not executed (arXiv 2504.12463: not renormalised)."""
        return self.probs_TE.masked_fill(self.mask_TE, 0.0)


class SoftmaxRouter(Router):
    """p = softmax(W x) over the active slots."""

    def __init__(self, dim: int, slots: int) -> None:
        super().__init__(dim, slots)
        self.weight = nn.Parameter(torch.empty(slots, dim))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def logits(self, x_TD: Tensor, active_E: Tensor) -> Tensor:
        """W x, -inf at inactive slots (T, E)."""
        return F.linear(x_TD, self.weight.to(x_TD)).masked_fill(~active_E, -torch.inf)


def softmax(logits_TR: Tensor) -> Tensor:
    """Softmax of each row."""
    if logits_TR.is_cuda:
        return logits_TR.softmax(1)
    # On CPU many times as fast along the long dimension as within short rows.
    return logits_TR.t().softmax(0).t().contiguous()


def renormalize(gates_TE: Tensor) -> Tensor:
    """Rescales each token's gates to sum 1; rows of zeros stay zero."""
    total_T1 = gates_TE.sum(1, keepdim=True)
    return gates_TE / torch.where(total_T1 > 0, total_T1, 1.0)
