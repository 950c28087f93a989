"""What one layer's routing did: sums over batches, and the statistics that they give.

Sums stay on the device, are added over batches and processes, and are read when logged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.moe import MoEBlock, OutputSums
from app.moe.routers import TernaryRouting, TopAnyRouting

from .common import widest_float


@torch.no_grad()
def batch_sums(block: MoEBlock) -> dict[str, Tensor]:
    """Sums of the block's last forward pass, in the widest float type, by name."""
    routing = block.routing
    load_E = routing.mask_TE.sum(0)
    sums = {
        "tokens": torch.full_like(load_E[0], len(routing.mask_TE)),
        "pairs": load_E.sum(),
        "unrouted": routing.unrouted_T().sum(),
        "entropy": torch.special.entr(routing.distribution_TR().detach()).sum(),
        "load_E": load_E,
    }
    if isinstance(routing, TernaryRouting):
        sums |= _ternary_sums(routing)
    if isinstance(routing, TopAnyRouting):
        sums |= _topany_sums(routing)
    if block.default_vectors != "none" and block.output_sums is not None:
        sums |= {
            "output_ED": block.output_sums.sum_ED,
            "output_weight_E": block.output_sums.weight_E,
        }
    return {name: value.to(widest_float(value.device)) for name, value in sums.items()}


def _ternary_sums(routing: TernaryRouting) -> dict[str, Tensor]:
    chosen_L = routing.chosen_TLE.sum((0, 2))
    return {
        "positive": (chosen_L * (routing.levels_L > 0)).sum(),
        "negative": (chosen_L * (routing.levels_L < 0)).sum(),
        "null": routing.chosen_null_T.sum(),
    }


def _topany_sums(routing: TopAnyRouting) -> dict[str, Tensor]:
    taken_T1 = routing.hard_gates_TE.detach().sum(1, keepdim=True).round().clamp_max(3)
    return {"taking_4": (taken_T1 == torch.arange(4, device=taken_T1.device)).sum(0)}


def statistics(sums: dict[str, Tensor], block: MoEBlock) -> dict[str, float]:
    """Statistics from sums over all batches and processes, on the CPU; {} without a token.

    Returns:
        For all routers: active_experts; experts_per_token (executed); unrouted_fraction;
        router_entropy (nats, mean over tokens of the entropy of the router's distribution); load_cv
        (standard deviation over mean of the active experts' loads); load_max (largest over mean).

        Ternary: executed_experts per token; flops_saved, 1 - executed_experts / K, of the routed
        experts' FLOPs against top-K; share_positive, share_negative and share_null of all
        selections.

        Top-any: threshold_mean, of G over active experts; share_k0, share_k1, share_k2 and
        share_k3plus, of the tokens that are above so many thresholds (an evaluation fallback
        counts as none, as it does in unrouted_fraction).
    """
    tokens = float(sums["tokens"])
    if not tokens:
        return {}
    active_E = block.active_E.cpu()
    load = sums["load_E"][active_E]
    mean = load.mean().clamp_min(1e-12)
    values = {
        "active_experts": float(active_E.sum()),
        "experts_per_token": float(sums["pairs"]) / tokens,
        "unrouted_fraction": float(sums["unrouted"]) / tokens,
        "router_entropy": float(sums["entropy"]) / tokens,
        "load_cv": float(load.std(correction=0) / mean),
        "load_max": float(load.max() / mean),
    }
    if "null" in sums:
        values |= _ternary(sums, values["experts_per_token"], block.router.k)
    if "taking_4" in sums:
        share_4 = (sums["taking_4"] / tokens).tolist()
        values |= dict(
            zip(("share_k0", "share_k1", "share_k2", "share_k3plus"), share_4, strict=True)
        )
        values["threshold_mean"] = float(block.router.threshold.detach().cpu()[active_E].mean())
    return values


def _ternary(sums: dict[str, Tensor], executed: float, k: int) -> dict[str, float]:
    kinds = ("positive", "negative", "null")
    selections = sum(float(sums[kind]) for kind in kinds)
    shares = {f"share_{kind}": float(sums[kind]) / selections for kind in kinds}
    return {"executed_experts": executed, "flops_saved": 1.0 - executed / k} | shares


@torch.no_grad()
def vector_statistics(
    sums: dict[str, Tensor], block: MoEBlock, before_ED: Tensor | None
) -> dict[str, float]:
    """How the default vectors V of the active experts stand.

    Args:
        sums: of the same interval, over all processes, on the CPU.
        block: a block with default vectors.
        before_ED: V when last logged, if it was.

    Returns:
        default_norm: mean norm of V_e. default_drift: ||V - V_before|| / ||V_before||, Frobenius
        norms. default_distance: ||m_e - V_e|| / ||V_e||, m_e the (weighted) mean output of the
        expert over the interval, as mean over the experts that had tokens and have a V_e. The last
        two are left out where there is nothing to compare with.
    """
    active_E = block.active_E.cpu()
    now_ED = block.default_ED.detach().cpu().double() * active_E[:, None]
    norm_E = now_ED.norm(dim=1)
    values = {"default_norm": float(norm_E[active_E].mean())}
    if before_ED is not None:
        before_ED = before_ED.cpu().double() * active_E[:, None]
        if before_ED.any():
            values["default_drift"] = float((now_ED - before_ED).norm() / before_ED.norm())
    if "output_ED" in sums:
        seen_E = (sums["output_weight_E"] > 0) & (norm_E > 0)
        mean_ED = OutputSums(sums["output_ED"], sums["output_weight_E"]).mean_ED()
        distance_E = (mean_ED - now_ED).norm(dim=1) / norm_E
        if seen_E.any():
            values["default_distance"] = float(distance_E[seen_E].mean())
    return values


def bias_statistics(block: MoEBlock) -> dict[str, float]:
    """bias_max and bias_min: the loss-free balancing biases of the active experts."""
    bias = block.router.balance_bias_E[block.active_E]
    return {"bias_max": float(bias.max()), "bias_min": float(bias.min())}
