"""Top-k routing: Shazeer et al. 2017 (arXiv 1701.06538), Switch, Mixtral, OLMoE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import SoftmaxRouter, SoftmaxRouting, renormalize, softmax


class TopK(SoftmaxRouter):
    """The k experts of largest p = softmax(W x).

    Args:
        dim: model width D (given by the block).
        slots: number E of expert slots (given by the block).
        k: experts per token; where fewer are active, all of them.
        normalize: rescale the kept gates to sum 1 (Mixtral), or keep the raw probabilities
            (Switch, OLMoE, Default MoE). Refused for k = 1, where it makes the gate a constant 1
            and leaves the router without any gradient from the task.
        jitter: multiplies the router's input by uniform noise in [1 - jitter, 1 + jitter] while
            training (Switch Transformer, arXiv 2101.03961).
        noise: add trainable Gaussian noise softplus(W_noise x) to the logits while training
            (noisy top-k, arXiv 1701.06538 eq. 4).
        estimator: `sparsemixer` draws the experts from p while training and estimates the
            gradient of the choice by Heun's third-order method (arXiv 2310.00811); k = 1 or 2.

    Attributes:
        balance_bias_E: added to p for the *selection* only (loss-free balancing, arXiv 2408.15664);
            zero unless the LossFreeBalance callback moves it.
    """

    balance_bias_E: Tensor
    why_not_balanced = None

    def __init__(
        self,
        dim: int,
        slots: int,
        k: int = 2,
        normalize: bool = False,
        jitter: float = 0.0,
        noise: bool = False,
        estimator: Literal["plain", "sparsemixer"] = "plain",
    ) -> None:
        super().__init__(dim, slots)
        if not 1 <= k <= slots:
            raise ValueError(f"router k must be between 1 and the {slots} expert slots, got {k}")
        if normalize and k == 1:
            raise ValueError(
                "router k: 1 with normalize: true makes every gate 1 and gives the router no "
                "gradient; set normalize: false"
            )
        if not 0.0 <= jitter < 1.0:
            raise ValueError(f"router jitter must lie in [0, 1), got {jitter}")
        if estimator == "sparsemixer" and (k > 2 or normalize or noise):
            raise ValueError(
                "estimator: sparsemixer needs k: 1 or 2, normalize: false and noise: false"
            )
        self.k, self.normalize, self.jitter, self.estimator = k, normalize, jitter, estimator
        self.noise_weight = nn.Parameter(torch.zeros(slots, dim)) if noise else None
        self.register_buffer("balance_bias_E", torch.zeros(slots))
        if estimator == "sparsemixer":
            self.why_not_balanced = (
                "estimator: sparsemixer draws the experts from p and takes no account of a bias; "
                "set it to plain"
            )
        if normalize:
            self.why_not_default_vectors = (
                "gates renormalised over the kept experts leave no probability for the others; "
                "set normalize: false"
            )

    def forward(self, x_TD: Tensor, active_E: Tensor) -> SoftmaxRouting:
        input_TD = x_TD
        if self.training and self.jitter:
            input_TD = x_TD * torch.empty_like(x_TD).uniform_(1 - self.jitter, 1 + self.jitter)
        logits_TE = self.logits(input_TD, active_E)
        if self.training and self.noise_weight is not None:
            spread_TE = F.softplus(F.linear(input_TD, self.noise_weight.to(x_TD)))
            logits_TE = logits_TE + torch.randn_like(spread_TE) * spread_TE
        probs_TE = softmax(logits_TE)
        if self.estimator == "sparsemixer":
            mask_TE, gates_TE = sparsemixer(logits_TE, self.k, self.jitter, draw=self.training)
        else:
            mask_TE = self._largest(probs_TE.detach(), active_E)
            gates_TE = probs_TE * mask_TE
            if self.normalize:
                gates_TE = renormalize(gates_TE)
        return SoftmaxRouting(mask_TE, gates_TE, active_E, x_TD.detach(), logits_TE, probs_TE)

    @classmethod
    def label(cls, k: int = 2, **init_args: Any) -> str:
        return f"top-k, k = {k}"

    def keep_slots(self, keep: Sequence[int]) -> None:
        super().keep_slots(keep)
        self.k = min(self.k, len(keep))  # with fewer active experts it took all of them

    def state(self) -> dict[str, Tensor]:
        return {"bias_E": self.balance_bias_E} if self.balance_bias_E.any() else {}

    def statistics(
        self, sums: dict[str, Tensor], state: dict[str, Tensor], active_E: Tensor
    ) -> dict[str, float]:
        """Largest and smallest balancing bias of the active experts, where one is in use."""
        if "bias_E" not in state:
            return {}
        bias = state["bias_E"][active_E]
        return {"bias_max": float(bias.max()), "bias_min": float(bias.min())}

    def flops_per_token(self) -> int:
        noise = self.training and self.noise_weight is not None
        return super().flops_per_token() + (2 * self.noise_weight.numel() if noise else 0)

    def _largest(self, probs_TE: Tensor, active_E: Tensor) -> Tensor:
        selection_TE = (probs_TE + self.balance_bias_E).masked_fill(~active_E, -torch.inf)
        kept_TK = selection_TE.topk(self.k, dim=1).indices
        return torch.zeros_like(probs_TE, dtype=torch.bool).scatter_(1, kept_TK, True) & active_E


def sparsemixer(logits_TE: Tensor, k: int, jitter: float, draw: bool) -> tuple[Tensor, Tensor]:
    """Draws k experts without replacement, with a gradient of the draw.

    Each draw is from the softmax over the experts not drawn yet and, where `jitter` > 0, within
    2 * jitter (relative) of the best one; without `draw` (in evaluation) the most probable one is
    taken, with the same gates: p1, then p2 / (1 - p1).

    The gate is the drawn expert's probability; where the draw is not the most probable expert, it
    is scaled by 1/3 with probability 3/4 (Heun's third-order method, arXiv 2310.00811 section
    3.3), and its gradient with respect to the logits is that of the unscaled probability.

    Returns:
        mask_TE (bool) and gates_TE.
    """
    mask_TE = torch.zeros_like(logits_TE, dtype=torch.bool)
    gates_TE = torch.zeros_like(logits_TE)
    for _ in range(min(k, logits_TE.shape[1])):
        open_TE = logits_TE.masked_fill(mask_TE, -torch.inf)
        none_left_T1 = torch.isinf(open_TE.detach()).all(1, keepdim=True)
        closed_TE = torch.isinf(open_TE.detach())
        open_TE = open_TE.masked_fill(none_left_T1, 0.0)  # a softmax over nothing would be NaN
        best_T1 = open_TE.detach().amax(1, keepdim=True)
        if jitter:
            gap_TE = best_T1 - open_TE.detach()
            far_TE = gap_TE > 2 * jitter * open_TE.detach().abs().maximum(best_T1.abs())
            open_TE = open_TE.masked_fill(far_TE, -torch.inf)
        probs_TE = open_TE.softmax(1)
        noise_TE = torch.empty_like(probs_TE).exponential_() if draw else 1.0
        drawn_T1 = (probs_TE.detach() / noise_TE).argmax(1, keepdim=True)
        gate_T1 = probs_TE.gather(1, drawn_T1)
        is_best_T1 = drawn_T1 == probs_TE.argmax(1, keepdim=True)
        full_T1 = is_best_T1 | (torch.rand_like(gate_T1) > 0.75)
        scale_T1 = torch.where(full_T1, 1.0, 1.0 / 3.0)
        gate_T1 = gate_T1 + (gate_T1 * (scale_T1 - 1.0)).detach()
        drawn_TE = torch.zeros_like(mask_TE).scatter_(1, drawn_T1, True) & ~closed_TE
        gates_TE = gates_TE + drawn_TE * gate_T1
        mask_TE = mask_TE | drawn_TE
    return mask_TE, gates_TE
