"""Top-p routing: Huang et al. 2024, arXiv 2403.07652."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import SoftmaxRouter, SoftmaxRouting, renormalize, softmax


class TopP(SoftmaxRouter):
    """Experts in decreasing p = softmax(W x) until their sum reaches `p`; at least one.

    Args:
        dim: model width D (given by the block).
        slots: number E of expert slots (given by the block).
        p: the probability to be covered; DynMoE's authors compare with 0.4.
        normalize: rescale the kept gates to sum 1; the paper keeps the raw probabilities.
    """

    def __init__(self, dim: int, slots: int, p: float = 0.4, normalize: bool = False) -> None:
        super().__init__(dim, slots)
        if not 0.0 < p <= 1.0:
            raise ValueError(f"router p must lie in (0, 1], got {p}")
        self.p, self.normalize = p, normalize
        if normalize:
            self.why_not_default_vectors = (
                "gates renormalised over the kept experts leave no probability for the others; "
                "set normalize: false"
            )

    @classmethod
    def label(cls, p: float = 0.4, **init_args: Any) -> str:
        return f"top-p, p = {p}"

    def forward(self, x_TD: Tensor, active_E: Tensor) -> SoftmaxRouting:
        logits_TE = self.logits(x_TD, active_E)
        probs_TE = softmax(logits_TE)
        sorted_TE, order_TE = probs_TE.detach().sort(1, descending=True)
        before_TE = sorted_TE.cumsum(1) - sorted_TE  # covered by the experts ahead in the order
        before_TE[:, :1] = -1.0
        taken_TE = torch.zeros_like(before_TE, dtype=torch.bool)
        mask_TE = taken_TE.scatter_(1, order_TE, before_TE < self.p) & active_E
        gates_TE = probs_TE * mask_TE
        if self.normalize:
            gates_TE = renormalize(gates_TE)
        return SoftmaxRouting(mask_TE, gates_TE, active_E, x_TD.detach(), logits_TE, probs_TE)
