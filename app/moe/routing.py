"""What a router returns, and the one order in which pairs of tokens and experts are computed.

Shape suffixes, here and everywhere in ``app/moe``:

    T  tokens (batch and sequence flattened)     N  routed (token, expert) pairs, sorted by expert
    D  model width                               K  experts per token
    F  hidden width of an expert                 R  router outputs, where they are more than E
    E  expert slots, active or not
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """The decision of one router for one batch of tokens.

    Attributes:
        mask_TE: bool, the pairs that are executed. Never true for an inactive slot.
        gates_TE: float32 weight of each executed pair, 0 elsewhere; carries the router's gradient.
        active_E: bool, the slots that exist at present.
        features_TD: what the routing vectors were compared with, without gradient (the block's
            input, or the hidden features of a deeper router).
    """

    mask_TE: Tensor
    gates_TE: Tensor
    active_E: Tensor
    features_TD: Tensor

    def load_E(self) -> Tensor:
        """Tokens that took each expert, float32, without gradient."""
        return self.mask_TE.sum(0, dtype=torch.float32)

    def importance_E(self) -> Tensor:
        """Differentiable counterpart of the load: the mean weight that each expert was given."""
        return self.gates_TE.mean(0)

    def distribution_TR(self) -> Tensor:
        """The router's distribution for each token: its gates, where it has no other."""
        return self.gates_TE

    def own_TE(self) -> Tensor:
        """The pairs that the router chose of its own accord, before a fallback; bool."""
        return self.mask_TE

    def unrouted_T(self) -> Tensor:
        """Tokens that took no expert of their own accord, bool."""
        return ~self.own_TE().any(1)

    def order_TE(self) -> Tensor:
        """In which order a token chose its experts: the larger, the earlier."""
        return self.gates_TE.abs()

    def sums(self) -> dict[str, Tensor]:
        """What a method sums over batches for its statistics besides what all methods do."""
        return {}

    def watched(self) -> dict[str, Tensor]:
        """What may stop being finite, in the order in which it was computed."""
        return {"gates": self.gates_TE}

    def default_weights_TE(self) -> Tensor:
        """Weights of the default vectors of the experts not executed (Default MoE).

        Raises:
            ValueError: where the router's gates are no distribution over all experts.
        """
        raise ValueError(f"{type(self).__name__} gives no probability to experts it does not run")

    def pairs(self) -> Pairs:
        """The executed pairs, sorted by expert and then by token."""
        expert_N, token_N = self.mask_TE.t().nonzero(as_tuple=True)
        return Pairs(expert_N, token_N, self.mask_TE.sum(0))


@dataclass(frozen=True)
class Pairs:
    """Routed pairs in the order in which experts compute them: contiguous by expert.

    Attributes:
        expert_N: slot of each pair, ascending.
        token_N: token of each pair, ascending within an expert.
        count_E: int64, pairs of each slot.
    """

    expert_N: Tensor
    token_N: Tensor
    count_E: Tensor

    def take(self, values_TE: Tensor) -> Tensor:
        """Reads a (T, E) table at the pairs, in their order (N,). Differentiable."""
        # One flat index: masked_select would make the host wait for CUDA to count.
        place_N = self.token_N * values_TE.shape[1] + self.expert_N
        return values_TE.flatten().index_select(0, place_N)
