"""Default MoE's moving averages of expert outputs: arXiv 2504.12463."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .routing import Pairs, Routing
from .sharded import sum_over_processes


@dataclass(frozen=True)
class OutputSums:
    """What the experts put out over some tokens.

    Attributes:
        sum_ED: sum over the tokens of an expert of weight * E_e(x).
        weight_E: sum of those weights; 0 where no token was.
    """

    sum_ED: Tensor
    weight_E: Tensor

    def mean_ED(self) -> Tensor:
        """Weighted mean output of each expert; rows without a token are 0."""
        return self.sum_ED / self.weight_E.clamp_min(torch.finfo(torch.float32).tiny)[:, None]


class DefaultVectors:
    """How a block's default vectors V follow the outputs of its experts.

    V <- beta V + (1 - beta) m, with m the weighted mean output; the first observation sets V. The
    vectors themselves are buffers of the block. Nothing is observed before `follow` is called.

    Attributes:
        observed: sums of the last training forward pass; no part of a copy or a pickle.
    """

    def __init__(self) -> None:
        self.beta = 0.0
        self.weighting: Literal["router", "uniform"] | None = None
        self.before = False
        self.observed: OutputSums | None = None

    def follow(
        self, beta: float, weighting: Literal["router", "uniform"], before: bool = False
    ) -> None:
        """Starts to observe.

        Args:
            beta: decay of the average.
            weighting: weigh each output by its router probability, or equally.
            before: a training forward pass uses the vectors that its own outputs have moved, over
                all processes. What is kept is moved by `update` alone.
        """
        self.beta, self.weighting, self.before = beta, weighting, before

    @torch.no_grad()
    def observe(
        self,
        outputs: list[Tensor],
        slots: list[int] | None,
        sizes: list[int],
        pairs: Pairs,
        routing: Routing,
    ) -> None:
        """Sums up one training forward pass.

        Args:
            outputs: the parts that the experts put out (n, D), padded.
            slots: slot of each part; None where one part holds all pairs.
            sizes: rows of each part.
            pairs: the executed pairs, in the order of the parts.
            routing: where they come from.
        """
        if self.weighting is None:
            return
        weight_N = torch.ones(len(pairs.token_N), device=pairs.token_N.device)
        if self.weighting == "router":
            weight_N = pairs.take(routing.probs_TE)
        num_slots, dim = routing.mask_TE.shape[1], outputs[0].shape[1]
        weight_E = weight_N.new_zeros(num_slots).index_add(0, pairs.expert_N, weight_N)
        sum_ED = weight_N.new_zeros(num_slots, dim)
        if slots is None:
            weighted_ND = outputs[0].to(weight_N.dtype) * weight_N[:, None]
            sum_ED.index_add_(0, pairs.expert_N, weighted_ND)
        else:
            for slot, y_nD, weight_n in zip(slots, outputs, weight_N.split(sizes), strict=True):
                sum_ED[slot] = weight_n @ y_nD[: len(weight_n)].to(weight_n.dtype)
        self.observed = OutputSums(sum_ED, weight_E)

    def used(self, default_ED: Tensor, seen_E: Tensor) -> Tensor:
        """The vectors of the training forward pass that was just observed."""
        if not self.before or self.observed is None:
            return default_ED
        sums = OutputSums(self.observed.sum_ED.clone(), self.observed.weight_E.clone())
        sum_over_processes(sums.sum_ED, sums.weight_E)
        return self._moved(default_ED, seen_E, sums)

    @torch.no_grad()
    def update(self, default_ED: Tensor, seen_E: Tensor, sums: OutputSums) -> None:
        """Moves a block's vectors, in place.

        Args:
            default_ED: V.
            seen_E: bool, which experts have one.
            sums: of a whole optimizer step, over all processes.
        """
        default_ED.copy_(self._moved(default_ED, seen_E, sums))
        seen_E |= sums.weight_E > 0

    @torch.no_grad()
    def _moved(self, default_ED: Tensor, seen_E: Tensor, sums: OutputSums) -> Tensor:
        mean_ED = sums.mean_ED().to(default_ED)
        moved_ED = torch.lerp(mean_ED, default_ED, self.beta)
        moved_ED = torch.where(seen_E[:, None], moved_ED, mean_ED)
        # An overflow under a loss scaler, whose step is skipped, must not stay in the average.
        good_E1 = (sums.weight_E > 0)[:, None] & mean_ED.isfinite().all(1, keepdim=True)
        return torch.where(good_E1, moved_ED, default_ED)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"observed": None}
