"""What is measured of a routing, on a sample (shape legend in app/moe/routing.py).

Networks are in evaluation mode and are left as they were. Further suffixes: n samples, G groups of
tokens (the classes of images, the tokens of a text).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...moe import MoEBlock, Routing, moe_blocks
from .sample import Sample

Batches = Callable[[], Iterable[Sample]]
"""Gives the same batches at each call."""


@dataclass(frozen=True)
class Saturation:
    """How far a layer's routing at an earlier checkpoint is that of a later one.

    For a fixed k this is the router saturation of OLMoE (arXiv 2409.02060, section 5.1): the share
    of a token's experts at the later checkpoint that it has at the earlier one, averaged over
    tokens. Here a token takes any number of experts, A_t at the earlier and B_t at the later
    checkpoint: the mean of |A_t & B_t| / |B_t| over the tokens whose B_t is not empty.

    Experts are told apart by their slot; an expert that was born in between is a new one, also in
    the slot of one that died. What counts is which experts run: levels of ternary choice, and
    gates, are not compared.

    Attributes:
        saturation: that mean; 1 for equal routing. None if no token takes an expert.
        random: its expectation where each A_t is as many experts, drawn from all that were active
            (k / E for a fixed k).
        random_loads: its expectation where the sets A_t are dealt out to the tokens anew. This
            keeps the load of each expert, so what is above it is due to the tokens.
        skipped: share of the tokens whose B_t is empty.
    """

    saturation: float | None
    random: float | None
    random_loads: float | None
    skipped: float


@dataclass
class _Overlap:
    """Sums for `Saturation`, of one layer."""

    tokens: float = 0.0
    counted: float = 0.0
    overlap: float = 0.0
    random: float = 0.0
    load_E: Tensor | float = 0.0  # of the earlier checkpoint
    weight_E: Tensor | float = 0.0  # sum over tokens of 1 / |B_t| for e in B_t

    def add(self, earlier: Routing, later: Routing, same_E: Tensor, real_T: Tensor) -> None:
        before_TE, after_TE = earlier.mask_TE[real_T], later.mask_TE[real_T]
        self.tokens += len(after_TE)
        routed_T = after_TE.any(1)
        before_TE, after_TE = before_TE[routed_T], after_TE[routed_T]
        # Shares of whole counts, in the widest type of a CPU: equal sets give 1 exactly.
        before_TE, after_TE, same_E = before_TE.cpu(), after_TE.cpu(), same_E.cpu()
        taken_T = after_TE.sum(1, dtype=torch.float64)
        size_T = before_TE.sum(1, dtype=torch.float64)
        common_T = (after_TE & before_TE & same_E).sum(1) / taken_T
        reachable_T = (after_TE & same_E).sum(1) / taken_T
        self.counted += len(taken_T)
        self.overlap += float(common_T.sum())
        self.random += float((size_T / earlier.active_E.sum().cpu() * reachable_T).sum())
        self.load_E = self.load_E + (before_TE & same_E).sum(0, dtype=torch.float64)
        self.weight_E = self.weight_E + (after_TE / taken_T[:, None]).sum(0)

    def mean(self) -> Saturation:
        skipped = 1.0 - self.counted / self.tokens
        if not self.counted:
            return Saturation(None, None, None, skipped)
        loads = float((self.load_E * self.weight_E).sum()) / self.counted**2
        return Saturation(self.overlap / self.counted, self.random / self.counted, loads, skipped)


@torch.inference_mode()
def router_saturation(
    earlier: nn.Module,
    later: nn.Module,
    batches: Batches,
    born: dict[str, set[int]] | None = None,
) -> dict[str, Saturation]:
    """Saturation of the routers of a network, by layer, against a later state of it.

    Args:
        earlier: the network at the earlier checkpoint.
        later: the same network at the later one.
        batches: the sample.
        born: slots, by layer, whose expert was born in between.
    """
    before, after = moe_blocks(earlier), moe_blocks(later)
    sums = {layer: _Overlap() for layer in after}
    same = {}
    for layer, block in before.items():
        same[layer] = block.active_E.clone()
        same[layer][sorted((born or {}).get(layer, ()))] = False
    for batch in batches():
        batch.losses_n(earlier)
        batch.losses_n(later)
        for layer, each in sums.items():
            routing = after[layer].routing
            real_T = batch.group_T(len(routing.mask_TE)) >= 0
            each.add(before[layer].routing, routing, same[layer], real_T)
    return {layer: each.mean() for layer, each in sums.items()}


@dataclass(frozen=True)
class Contributions:
    """What masking each expert does to the loss.

    Attributes:
        loss: mean cross-entropy per prediction, nothing masked.
        change: by layer, the change of that loss with each expert masked (E,); positive where the
            expert helps. 0 for an expert that no token takes, nan for an inactive slot.
        error: by layer, the standard error of the change over samples (E,); nan for one sample.
    """

    loss: float
    change: dict[str, Tensor]
    error: dict[str, Tensor]


@torch.inference_mode()
def contributions(
    network: nn.Module, batches: Batches, advance: Callable[[], object] = lambda: None
) -> Contributions:
    """The contribution of each expert: the change of the loss when its pairs are masked.

    Masked means a gate of 0; nothing is renormalised, and a default vector does not step in. One
    expert at a time, and all that lies above the layer goes on with what is left. The TC-MoE
    authors (ICLR 2025, figure 1) measure single activations in this way; here all activations of
    an expert are masked together.

    Args:
        network: with MoE blocks.
        batches: the sample.
        advance: called once for each batch and active expert.
    """
    blocks = moe_blocks(network)
    count, base, change = [], [], {layer: [] for layer in blocks}
    for batch in batches():
        losses_n = batch.losses_n(network)
        loads = {layer: block.routing.mask_TE.any(0).tolist() for layer, block in blocks.items()}
        count.append(batch.predictions_n())
        base.append(losses_n)
        for layer, block in blocks.items():
            change_nE = losses_n.new_full((len(batch), block.slots), math.nan)
            for slot in block.active_slots():
                change_nE[:, slot] = 0.0
                if loads[layer][slot]:
                    with masked(block, slot):
                        change_nE[:, slot] = batch.losses_n(network) - losses_n
                advance()
            change[layer].append(change_nE)
    count_n = torch.cat(count)
    changes = {layer: torch.cat(each) for layer, each in change.items()}
    return Contributions(
        float(torch.cat(base).sum() / count_n.sum()),
        {layer: change_nE.sum(0) / count_n.sum() for layer, change_nE in changes.items()},
        {layer: ratio_error_E(change_nE, count_n) for layer, change_nE in changes.items()},
    )


@contextmanager
def masked(block: MoEBlock, slot: int) -> Iterator[None]:
    """Gives one expert the gate 0 for every token."""

    def close(router: nn.Module, args: tuple[Tensor, ...], routing: Routing) -> Routing:
        gates_TE = routing.gates_TE.clone()
        gates_TE[:, slot] = 0.0
        return replace(routing, gates_TE=gates_TE)

    hook = block.router.register_forward_hook(close)
    try:
        yield
    finally:
        hook.remove()


def ratio_error_E(sum_nE: Tensor, count_n: Tensor) -> Tensor:
    """Standard error of sum(sum_nE) / sum(count_n) over independent samples n (E,).

    That of a ratio estimator; where all counts are equal, the standard deviation of the means
    over sqrt(n).
    """
    n = len(count_n)
    rest_nE = sum_nE - count_n[:, None] * (sum_nE.sum(0) / count_n.sum())
    variance_E = rest_nE.square().sum(0) * (n / (n - 1) if n > 1 else math.nan)
    return variance_E.sqrt() / count_n.sum()


@dataclass(frozen=True)
class Distances:
    """How far an expert's outputs are from its default vector (Default MoE).

    Attributes:
        own_E: mean of ||E_e(x) - V_e|| / ||V_e|| over the tokens that take e.
        others_E: over the tokens that do not, where V_e stands in for E_e(x).

    Both are nan without a token, and where V_e is 0 (never updated).
    """

    own_E: Tensor
    others_E: Tensor


@torch.inference_mode()
def default_distances(network: nn.Module, batches: Batches) -> dict[str, Distances]:
    """Distances of the experts' outputs from their default vectors, by layer that has those."""
    blocks = {
        name: block
        for name, block in moe_blocks(network).items()
        if block.default_vectors != "none"
    }
    if not blocks:
        return {}
    sums = {
        name: torch.zeros(2, 2, block.slots, dtype=torch.float64) for name, block in blocks.items()
    }
    inputs: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name, block in blocks.items():
            keep = lambda _, args, name=name: inputs.update({name: args[0]})  # noqa: E731
            stack.callback(block.register_forward_pre_hook(keep).remove)
        for batch in batches():
            batch.losses_n(network)
            for name, block in blocks.items():
                x_TD = inputs[name].reshape(-1, block.dim)
                real_T = batch.group_T(len(x_TD)) >= 0
                sums[name] += _distance_sums(block, x_TD, real_T)
    return {
        name: Distances(*(distance / count for distance, count in each))
        for name, each in sums.items()
    }


def _distance_sums(block: MoEBlock, x_TD: Tensor, real_T: Tensor) -> Tensor:
    """Sum of the distances and number of tokens, for those that take each expert and for the
    others: (2, 2, E), float64."""
    mask_TE = block.routing.mask_TE
    pairs = replace(block.routing, mask_TE=block.active_E & real_T[:, None]).pairs()
    y_ND = block.experts.of_pairs(x_TD[pairs.token_N], pairs)
    default_ND = block.default_ED[pairs.expert_N]
    # 0 / 0 or x / 0 where there is no default vector: not a distance.
    distance_N = (y_ND - default_ND).norm(dim=1) / default_ND.norm(dim=1)
    distance_N = distance_N.where(default_ND.any(1), math.nan).cpu().double()
    own_N, slot_N = pairs.take(mask_TE).cpu(), pairs.expert_N.cpu()
    sums = distance_N.new_zeros(2, 2, block.slots)
    for place, chosen_N in enumerate((own_N, ~own_N)):
        expert_N = slot_N[chosen_N]
        sums[place, 0].index_add_(0, expert_N, distance_N[chosen_N])
        sums[place, 1].index_add_(0, expert_N, torch.ones_like(distance_N[chosen_N]))
    return sums


@dataclass(frozen=True)
class Affinity:
    """Which experts the tokens of each group take.

    Attributes:
        group_G: label or token id of each group in the sample, the most frequent first for text.
        tokens: by layer, the network's tokens of each group (G,).
        share: by layer, the share of those that each expert takes (G, E); rows sum to the mean
            number of experts per token.
        load: by layer, the share of all tokens that each expert takes (E,).
        active: by layer, the active slots.
    """

    group_G: Tensor
    tokens: dict[str, Tensor]
    share: dict[str, Tensor]
    load: dict[str, Tensor]
    active: dict[str, list[int]]


@torch.inference_mode()
def expert_affinity(network: nn.Module, sample: Sample, batches: Batches) -> Affinity:
    """Shares of the tokens of each class (images), or of each token of a text, by expert."""
    ids = sample.inputs if sample.is_text else sample.targets
    group_G, count_G = ids[ids >= 0].unique(return_counts=True)
    if sample.is_text:
        group_G = group_G[count_G.argsort(descending=True, stable=True)]
    order_G = group_G.argsort()
    blocks = moe_blocks(network)
    taken = {
        name: torch.zeros(len(group_G), block.slots).double() for name, block in blocks.items()
    }
    tokens = {name: torch.zeros(len(group_G)).double() for name in blocks}
    for batch in batches():
        batch.losses_n(network)
        for name, block in blocks.items():
            mask_TE = block.routing.mask_TE.cpu()
            group_T = batch.group_T(len(mask_TE)).cpu()
            real_T = group_T >= 0
            place_T = order_G[torch.searchsorted(group_G[order_G], group_T[real_T])]
            taken[name].index_add_(0, place_T, mask_TE[real_T].double())
            tokens[name] += place_T.bincount(minlength=len(group_G))
    return Affinity(
        group_G,
        tokens,
        {name: each / tokens[name][:, None] for name, each in taken.items()},
        {name: each.sum(0) / tokens[name].sum() for name, each in taken.items()},
        {name: block.active_slots() for name, block in blocks.items()},
    )
