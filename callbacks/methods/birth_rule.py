"""DynMoE's rule for births and deaths: arXiv 2405.14297, section 3.2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.moe import Routing

from ..common import widest_float


@dataclass(frozen=True)
class WindowRecord:
    """What one layer's router did in some batches: sums, float64 where the device has it.

    Attributes:
        load_E: R_E, tokens that took each expert.
        unrouted_D: R_S, sum of the router's inputs over tokens that took none.
        counts: number of tokens that took none, number of all tokens.
    """

    load_E: Tensor
    unrouted_D: Tensor
    counts: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, routing: Routing) -> WindowRecord:
        """The record of one batch."""
        unrouted_T = routing.unrouted_T()
        kind = widest_float(unrouted_T.device)
        count = unrouted_T.sum(dtype=kind)
        return cls(
            routing.mask_TE.sum(0, dtype=kind),
            (unrouted_T.to(routing.features_TD) @ routing.features_TD).to(kind),
            torch.stack([count, torch.full_like(count, len(unrouted_T))]),
        )

    def tensors(self) -> Sequence[Tensor]:
        """All of it, to be added to that of other batches and processes."""
        return self.load_E, self.unrouted_D, self.counts


@dataclass(frozen=True)
class Plan:
    """The decision for one layer at the end of a window.

    Attributes:
        deaths: slots to be removed, ascending.
        kept: a slot that would have been removed if it were not the last one, or None.
        birth: whether an expert should be added.
        refusal: why it can't be although it should, or None.
    """

    deaths: tuple[int, ...]
    kept: int | None
    birth: bool
    refusal: str | None


def plan_window(
    record: WindowRecord,
    active_E: Tensor,
    min_unrouted_fraction: float = 0.0,
    min_load_fraction: float = 0.0,
) -> Plan:
    """Applies DynMoE's rule to a finished window.

    1. Every active expert with R_E = 0 goes (with `min_load_fraction`: that fewer than this share
       of the tokens took). The last expert stays: the one of largest load, the lowest slot of
       several.
    2. If any token took no expert (and their share reaches `min_unrouted_fraction`), one expert is
       added. That is refused where no slot is free once the deaths are done, or where R_S gives
       no direction.
    """
    unrouted, tokens = record.counts.tolist()
    load, active = record.load_E.tolist(), active_E.nonzero().flatten().tolist()
    if not tokens:
        return Plan((), None, False, None)
    deaths = [e for e in active if load[e] == 0 or load[e] / tokens < min_load_fraction]
    kept = None
    if len(deaths) == len(active):
        kept = max(active, key=lambda e: (load[e], -e))
        deaths.remove(kept)
    wanted = unrouted > 0 and unrouted / tokens >= min_unrouted_fraction
    refusal = None
    if wanted:
        length = float(record.unrouted_D.norm())
        mean_length = length / unrouted
        if len(active) - len(deaths) == len(active_E):
            refusal = "no free slot"
        elif not math.isfinite(length) or mean_length < 1e-6:
            refusal = "the unrouted tokens cancel to zero and give no direction"
    return Plan(tuple(deaths), kept, wanted and refusal is None, refusal)
