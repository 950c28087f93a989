"""What one layer's routing did: sums over batches, and the statistics that they give.

Sums stay on the device, are added over batches and processes, and are read when logged.
docs/monitoring.md says of every statistic what it means.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.moe import MoEBlock, OutputSums
from app.moe.sharded import full

from ..common import RankSums, widest_float


class Sums:
    """Named sums over batches, in one vector on the device: adding a batch costs two kernels.

    Args:
        device: where the values will be.

    Attributes:
        counts: sums of numbers that the host knows, by name.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.counts: dict[str, float] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._total = torch.zeros(0, dtype=widest_float(device), device=device)

    @torch.no_grad()
    def add(self, values: dict[str, Tensor], counts: dict[str, float]) -> None:
        """Adds a batch; `values` have the same names and shapes each time."""
        if values:
            # Within a batch float32 will do: it counts exactly up to 16.7 million tokens.
            batch = torch.cat([value.reshape(-1) for value in values.values()])
            if self._shapes:
                self._total += batch
            else:
                self._shapes = {name: value.shape for name, value in values.items()}
                self._total = batch.to(widest_float(batch.device))
        for name, value in counts.items():
            self.counts[name] = self.counts.get(name, 0) + value

    def _over_ranks(self) -> Tensor:
        counts = self._total.new_tensor(list(self.counts.values()))
        return RankSums({"all": [torch.cat([self._total, counts])]}).take()["all"][0]

    def read(self) -> dict[str, Tensor]:
        """The sums and the counts over all processes, on the CPU, in one transfer."""
        return _split(
            self._over_ranks().cpu(), self._shapes | dict.fromkeys(self.counts, torch.Size())
        )

    def move(self, device: torch.device) -> None:
        """Goes on where the routings live."""
        self._total = self._total.to(device, widest_float(device))

    def state_dict(self) -> dict[str, Any]:
        """Sums over all processes, which have to ask together."""
        shapes = {name: list(shape) for name, shape in self._shapes.items()}
        return {"total": self._over_ranks(), "shapes": shapes, "counts": list(self.counts)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Sums:
        """What this process goes on with: the first with all of the sums, the others with zeros."""
        sums, names, restored = cls(), state["counts"], RankSums()
        restored.load_state_dict({"total": state["total"]})
        (total,) = restored["total"]
        sums._shapes = {name: torch.Size(shape) for name, shape in state["shapes"].items()}
        sums._total = total[: len(total) - len(names)]
        sums.counts = dict(zip(names, total[len(sums._total) :].tolist(), strict=True))
        return sums


def to_host(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors on the CPU, in the widest float type, in one transfer."""
    if not values:
        return {}
    kind = widest_float(next(iter(values.values())).device)
    flat = torch.cat([value.reshape(-1).to(kind) for value in values.values()])
    return _split(flat.cpu(), {name: value.shape for name, value in values.items()})


def _split(flat: Tensor, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    parts = flat.split([shape.numel() for shape in shapes.values()])
    return {
        name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


@torch.no_grad()
def batch_sums(block: MoEBlock) -> dict[str, Tensor]:
    """Sums of the block's last forward pass, by name.

    Returns:
        load_E: tokens that took each expert. taking_K: tokens that took 0, 1 ... E experts (before
        an evaluation fallback). gate_E: gates of each expert. gate_top: largest gate of each token.
        probs_R: the router's distribution. entropy: of that, of each token. And what one method
        has in addition.
    """
    routing = block.routing
    gates_TE, probs_TR = routing.gates_TE.detach(), routing.distribution_TR().detach()
    own_TE = routing.own_TE()
    count_T = own_TE.sum(1)
    one_T = gates_TE.new_ones(()).expand(len(count_T))
    sums = {
        "load_E": routing.mask_TE.sum(0, dtype=torch.float32),
        # Not bincount, for which the host waits to know the largest count.
        "taking_K": gates_TE.new_zeros(own_TE.shape[1] + 1).index_add_(0, count_T, one_T),
        "gate_E": gates_TE.sum(0),
        "gate_top": gates_TE.abs().amax(1).sum(),
        "probs_R": probs_TR.sum(0),
        "entropy": torch.special.entr(probs_TR).sum(),
    }
    sums |= routing.sums()
    if block.defaults is not None and block.defaults.observed is not None:
        outputs = block.defaults.observed
        sums |= {"output_ED": outputs.sum_ED, "output_weight_E": outputs.weight_E}
    return sums


@torch.no_grad()
def block_state(block: MoEBlock) -> dict[str, Tensor]:
    """What the statistics need to know of the block itself, on its device."""
    state = {"active_E": block.active_E, "similarity_RR": similarity(block)}
    if block.default_vectors != "none":
        state["default_ED"] = full(block.default_ED)
    return state | block.router.state()


@torch.no_grad()
def similarity(block: MoEBlock) -> Tensor:
    """Cosines between all routing vectors (R, R), those of unused slots included."""
    unit_RD = F.normalize(full(block.router.weight).float(), dim=1)
    return unit_RD @ unit_RD.t()


def statistics(
    sums: dict[str, Tensor], state: dict[str, Tensor], block: MoEBlock
) -> dict[str, float]:
    """Statistics of a layer, named as in docs/monitoring.md; {} without a token.

    Args:
        sums: over all batches and processes, on the CPU.
        state: of the block, on the CPU.
        block: the block, for what never changes in it.
    """
    tokens = float(sums["taking_K"].sum())
    if not tokens:
        return {}
    active_E = state["active_E"].bool()
    use = utilisation(sums["load_E"], active_E)[active_E]
    pairs = float(sums["load_E"].sum())
    share_K = [*(sums["taking_K"] / tokens).tolist(), 0.0]  # with a single slot
    gate, size_E = float(sums["gate_E"].sum()), sums.get("gate_size_E", sums["gate_E"])
    mean_R = sums["probs_R"] / sums["probs_R"].sum().clamp_min(1e-12)
    values = {
        "active_experts": float(active_E.sum()),
        "experts_per_token": pairs / tokens,
        "unrouted_fraction": share_K[0],
        "share_k0": share_K[0],
        "share_k1": share_K[1],
        "share_k2": share_K[2],
        "share_k3plus": sum(share_K[3:]),
        "router_entropy": float(sums["entropy"]) / tokens,
        "router_entropy_marginal": float(torch.special.entr(mean_R).sum()),
        "load_cv": float(use.std(correction=0)),
        "load_max": float(use.max()),
        "load_min": float(use.min()),
        "gate_mean": float(size_E.sum()) / max(pairs, 1.0),
        "gate_max": float(sums["gate_top"]) / tokens,
        "gate_sum": gate / tokens,
    }
    return values | block.router.statistics(sums, state, active_E)


def utilisation(load_E: Tensor, active_E: Tensor) -> Tensor:
    """Load of each slot over the fair share, the mean of the active ones; NaN for the others."""
    mean = load_E[active_E].mean().clamp_min(1e-12)
    return torch.where(active_E, load_E / mean, torch.nan)


def router_statistics(state: dict[str, Tensor]) -> dict[str, float]:
    """Similarities of the routing vectors, in training only."""
    active_E, similarity_RR = state["active_E"].bool(), state["similarity_RR"]
    values = {}
    # A router with several vectors for each expert: all of its experts are active.
    active_R = active_E if len(active_E) == len(similarity_RR) else similarity_RR.diagonal() > 0
    pairs_RR = torch.triu(active_R & active_R[:, None], diagonal=1)
    if pairs_RR.any():
        values["vector_similarity"] = float(similarity_RR[pairs_RR].mean())
        values["vector_similarity_max"] = float(similarity_RR[pairs_RR].max())
    return values


def vector_statistics(
    sums: dict[str, Tensor], state: dict[str, Tensor], before_ED: Tensor | None
) -> dict[str, float]:
    """How the default vectors V of the active experts stand: norm, drift and distance.

    What there is nothing to compare with for is left out.

    Args:
        sums: of the same interval, over all processes, on the CPU.
        state: of a block with default vectors, on the CPU.
        before_ED: V when last logged, if it was.
    """
    active_E = state["active_E"].bool()
    now_ED = state["default_ED"].double() * active_E[:, None]
    norm_E = now_ED.norm(dim=1)
    values = {"default_norm": float(norm_E[active_E].mean())}
    if before_ED is not None:
        before_ED = before_ED.double() * active_E[:, None]
        if before_ED.any():
            values["default_drift"] = float((now_ED - before_ED).norm() / before_ED.norm())
    if "output_ED" in sums:
        seen_E = (sums["output_weight_E"] > 0) & (norm_E > 0)
        mean_ED = OutputSums(sums["output_ED"], sums["output_weight_E"]).mean_ED()
        distance_E = (mean_ED - now_ED).norm(dim=1) / norm_E
        if seen_E.any():
            values["default_distance"] = float(distance_E[seen_E].mean())
    return values


def slot_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What of a block's state has one value for each slot, by name without its suffix."""
    return {
        name.removesuffix("_E"): value
        for name, value in state.items()
        if name.endswith("_E") and name != "active_E"
    }


def expert_statistics(sums: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, float]:
    """Statistics of each active expert, by `<statistic>/<slot>`."""
    load_E, active_E = sums["load_E"], state["active_E"].bool()
    each = {
        "load": utilisation(load_E, active_E),
        "gate": sums.get("gate_size_E", sums["gate_E"]) / load_E.clamp_min(1.0),
    }
    each |= slot_state(state)
    slots = active_E.nonzero().flatten().tolist()
    return {f"{name}/{slot:02}": float(v_E[slot]) for name, v_E in each.items() for slot in slots}
