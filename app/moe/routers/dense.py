"""The dense mixture: every expert, softmax weights (Jacobs et al. 1991). An upper baseline."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .base import SoftmaxRouter, SoftmaxRouting, softmax


class Dense(SoftmaxRouter):
    """y = sum_e p_e E_e(x) over all active experts."""

    why_not_adaptive = "every token takes every expert, so none is ever unused or missing"
    why_not_default_vectors = "every expert is executed, so no default vector is ever used"

    @classmethod
    def label(cls, **init_args: Any) -> str:
        return "dense mixture"

    def forward(self, x_TD: Tensor, active_E: Tensor) -> SoftmaxRouting:
        logits_TE = self.logits(x_TD, active_E)
        probs_TE = softmax(logits_TE)
        mask_TE = active_E.expand_as(probs_TE)
        return SoftmaxRouting(mask_TE, probs_TE, active_E, x_TD.detach(), logits_TE, probs_TE)
