"""Auxiliary losses: pure functions of a Routing. The task chooses, weighs and logs them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .routers import SoftmaxRouting, TernaryRouting, TopAnyRouting
from .routing import Routing


def load_balance(
    routing: Routing,
    load_E: Tensor | None = None,
    over_processes: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Load-balance loss, 1 at a uniform split (GShard, arXiv 2006.16668; Switch, 2101.03961).

    E * sum_e f_e P_e over the E active experts, with f the share of all selections that went to
    an expert and P the share of the (differentiable) importance. For top-any routing importance
    is the mean normalised gate, for ternary routing load and probability of all levels of a
    physical expert are added and nulls left out (our reading of TC-MoE).

    Args:
        load_E: selections of each expert, where they should be counted over more than this batch
            (the global form of GRIN, arXiv 2409.12136): all ranks, all micro-batches of a step.
        over_processes: mean of a tensor over processes, where P should be that of the tokens of
            all of them: their losses, and gradients, then average to those of one process.
    """
    load_E = (routing.load_E() if load_E is None else load_E) * routing.active_E
    importance_E = routing.importance_E()
    share_E = load_E / load_E.sum().clamp_min(1.0)
    part, total = (share_E * importance_E).sum(), _or_one(importance_E.sum())
    if over_processes is None:
        ratio = part / total
    else:
        # part / total to first order around their means, as a mean of ratios is no ratio of means.
        mean_part, mean_total = over_processes(torch.stack([part, total]).detach())
        mean_total = _or_one(mean_total)
        ratio = (part - mean_part / mean_total * (total - mean_total)) / mean_total
    return routing.active_E.sum() * ratio


def _or_one(total: Tensor) -> Tensor:
    """A divisor: 1, and no gradient, where nothing was selected."""
    return torch.where(total > 0, total, 1.0)


def z_loss(routing: Routing) -> Tensor:
    """Router z-loss: mean squared logsumexp of the logits (ST-MoE, arXiv 2202.08906 eq. 5)."""
    logits = (
        routing.logits_TR
        if isinstance(routing, TernaryRouting)
        else (_expect(routing, SoftmaxRouting, "z_loss").logits_TE)
    )
    return logits.logsumexp(1).square().mean()


def entropy(routing: Routing) -> Tensor:
    """Mean entropy of the router's distribution, which top-p routing keeps low (2403.07652)."""
    probs_TR = _expect(routing, SoftmaxRouting, "entropy").distribution_TR()
    tiny = torch.finfo(probs_TR.dtype).tiny  # p log p at p = 0 is 0, and its gradient finite
    return -(probs_TR * probs_TR.clamp_min(tiny).log()).sum(1).mean()


def diversity(routing: Routing) -> Tensor:
    """||W^T W - I||_F with unit columns, over active experts only (DynMoE, arXiv 2405.14297)."""
    routing = _expect(routing, TopAnyRouting, "diversity")
    unit_ED = F.normalize(routing.vectors_ED, dim=1) * routing.active_E[:, None]
    excess_EE = unit_ED @ unit_ED.t() - torch.diag(routing.active_E.to(unit_ED))
    # The norm has no gradient at 0 (a single expert): the tiny floor gives 0 there.
    return (excess_EE.square().sum() + torch.finfo(excess_EE.dtype).tiny).sqrt()


def simplicity(routing: Routing) -> Tensor:
    """Mean norm of the routing vectors of active experts (DynMoE, arXiv 2405.14297)."""
    routing = _expect(routing, TopAnyRouting, "simplicity")
    norms_E = routing.vectors_ED.norm(dim=1) * routing.active_E
    return norms_E.sum() / routing.active_E.sum()


def topany(routing: Routing) -> Tensor:
    """DynMoE's auxiliary loss: diversity + simplicity (published weight 1e-2)."""
    _expect(routing, TopAnyRouting, "topany")
    return diversity(routing) + simplicity(routing)


def efficiency(routing: Routing) -> Tensor:
    """Mean of the hard gates over tokens x active experts: the share of experts taken."""
    hard_TE = _expect(routing, TopAnyRouting, "efficiency").hard_gates_TE
    return hard_TE.sum() / (len(hard_TE) * routing.active_E.sum()).clamp_min(1)


def reward(routing: Routing) -> Tensor:
    """TC-MoE's reward for nulls: -(1/T) sum of their gates. Its weight trades compute."""
    return -_expect(routing, TernaryRouting, "reward").null_gate_T.mean()


LOSSES: dict[str, Callable[[Routing], Tensor]] = {
    loss.__name__: loss
    for loss in (
        load_balance,
        z_loss,
        entropy,
        diversity,
        simplicity,
        topany,
        efficiency,
        reward,
    )
}


def _expect(routing: Routing, kind: type, loss: str) -> Routing:
    if not isinstance(routing, kind):
        wants = {SoftmaxRouting: "softmax", TopAnyRouting: "top-any", TernaryRouting: "ternary"}
        raise ValueError(f"loss {loss} is defined for {wants[kind]} routing only")
    return routing
