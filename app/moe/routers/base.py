"""What all routers share, and what all routers over a softmax share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..routing import Routing
from ..sharded import keep_rows, slot_rows, write_slot


class Router(nn.Module):
    """Decides which experts a token takes, and with which weights.

    Args:
        dim: model width D.
        slots: number E of expert slots.

    Attributes:
        weight: the routing vectors, one row for each slot (and for what else a method chooses).
        why_not_default_vectors: why Default MoE can't be combined with this router, or None.
        why_not_adaptive: why experts can't be added and removed under this router, or None.
        why_not_balanced: why no bias can move the selection towards an even load, or None: then
            the router has a buffer `balance_bias_E`.
        own_statistics: names of those of `statistics` that deserve a chart.
    """

    weight: nn.Parameter
    why_not_default_vectors: str | None = None
    why_not_adaptive: str | None = None
    why_not_balanced: str | None = "its selection takes no account of a bias; use TopK"
    own_statistics: tuple[str, ...] = ()

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

    @classmethod
    def label(cls, **init_args: Any) -> str:
        """What tables and legends call this router with these arguments of a config."""
        return cls.__name__

    def flops_per_token(self) -> int:
        """FLOPs of one token's routing (a multiply-add counts 2)."""
        return 2 * self.weight.numel()

    # ------------------------------------------------------------------ slots

    def slot_rows(self) -> dict[str, Tensor]:
        """Which rows of its own parameters and buffers belong to which slot.

        Birth, death and export of experts ask nothing else.

        Returns:
            By name an int64 tensor (E, n): the n rows of each slot. Here row e is slot e's in
            whatever has as many rows as there are slots.
        """
        return slot_rows(self, self.slots)

    @torch.no_grad()
    def aim(self, slot: int, direction_D: Tensor) -> None:
        """A new expert: its routing vector points in a direction, its other rows are 0."""
        for name, rows_En in self.slot_rows().items():
            for row in rows_En[slot].tolist():
                write_slot(getattr(self, name), row, direction_D if name == "weight" else 0.0)

    def keep_slots(self, keep: Sequence[int]) -> None:
        """Drops all slots but these, given in ascending order; rows of no slot stay."""
        keep_rows(self, self.slot_rows(), keep)
        self.slots = len(keep)

    # ------------------------------------------------------------------ what is told of it

    def state(self) -> dict[str, Tensor]:
        """Small tensors to be logged beside the sums over batches; `<name>_E` has one value for
        each slot. All processes of sharded parameters have to ask."""
        return {}

    def statistics(
        self, sums: dict[str, Tensor], state: dict[str, Tensor], active_E: Tensor
    ) -> dict[str, float]:
        """Statistics of this method alone, as docs/monitoring.md names them.

        Args:
            sums: over many batches, on the CPU: `load_E`, `taking_K` (tokens that took 0, 1 ...
                experts) and those of the routing's `sums`.
            state: that of `state`, on the CPU.
            active_E: bool, the slots in use.
        """
        return {}


@dataclass(frozen=True)
class SoftmaxRouting(Routing):
    """A routing by softmax probabilities.

    Attributes:
        logits_TE: router logits, -inf for inactive slots.
        probs_TE: softmax over the active slots.
    """

    logits_TE: Tensor
    probs_TE: Tensor

    def watched(self) -> dict[str, Tensor]:
        return {"router logits": self.logits_TE} | super().watched()

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
