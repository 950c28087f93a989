"""An MoE block without its unused slots (shape legend in routing.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .block import MoEBlock
from .routers import Ternary


@torch.no_grad()
def compact(block: MoEBlock, keep: Sequence[int] | None = None) -> None:
    """Shrinks a block, in place, to some of its expert slots, in their order.

    Routing vectors, thresholds, balancing biases, default vectors and expert weights of the other
    slots are dropped. Where those were inactive, outputs stay what they were; only the order in
    which a router sums over slots changes. Optimizers still hold the old parameters: this is for
    networks that are trained no further.

    Args:
        keep: the slots that remain, ascending; None for the active ones.
    """
    keep = block.active_slots() if keep is None else list(keep)
    rows_E = torch.tensor(keep, device=block.active_E.device)
    router, experts = block.router, block.experts
    rows = dict.fromkeys(("threshold", "noise_weight", "balance_bias_E"), rows_E)
    rows["weight"] = rows["shift_R"] = _output_rows(block, rows_E)
    for name, rows_R in rows.items():
        _keep_rows(router, name, rows_R)
    for name, _ in list(experts.named_parameters()):
        _keep_rows(experts, name, rows_E)
    for name in ("active_E", "default_ED", "default_seen_E"):
        _keep_rows(block, name, rows_E)
    block.slots = router.slots = experts.slots = len(keep)
    if not isinstance(router, Ternary) and hasattr(router, "k"):
        router.k = min(router.k, len(keep))  # with fewer active experts it took all of them


def _output_rows(block: MoEBlock, rows_E: Tensor) -> Tensor:
    """Rows of the router's weight: one for each slot; under ternary choice one for each level of
    each slot, then the nulls."""
    router = block.router
    if not isinstance(router, Ternary):
        return rows_E
    levels = [rows_E + level * block.slots for level in range(len(router.levels_L))]
    outputs = len(router.weight)
    return torch.cat([*levels, torch.arange(outputs - router.k, outputs, device=rows_E.device)])


def _keep_rows(owner: nn.Module, name: str, rows: Tensor) -> None:
    value = getattr(owner, name, None)
    if value is None:
        return
    kept = value.detach()[rows]  # indexing copies
    if isinstance(value, nn.Parameter):
        kept = nn.Parameter(kept, requires_grad=value.requires_grad)
    setattr(owner, name, kept)
