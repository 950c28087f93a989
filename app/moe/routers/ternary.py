"""Ternary expert choice: TC-MoE, ICLR 2025."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Router, SoftmaxRouting, softmax


@dataclass(frozen=True)
class TernaryRouting(SoftmaxRouting):
    """A routing over L levels of E experts and K nulls.

    `gates_TE` is the signed weight of each executed expert (the sum of level * gate over its
    selected levels); `probs_TE` and `logits_TE` are those of the levels of one expert together.

    Attributes:
        logits_TR: the (shifted) logits of all L * E + K outputs, level by level, nulls last.
        level_probs_TLE: p of every level of every expert.
        chosen_TLE: bool, the levels that were selected.
        chosen_null_T: how many nulls were selected.
        null_gate_T: sum of the gates of the nulls, with gradient.
        levels_L: the levels.
    """

    logits_TR: Tensor
    level_probs_TLE: Tensor
    chosen_TLE: Tensor
    chosen_null_T: Tensor
    null_gate_T: Tensor
    levels_L: Tensor

    def watched(self) -> dict[str, Tensor]:
        return super().watched() | {"router logits": self.logits_TR}

    def sums(self) -> dict[str, Tensor]:
        """Selections by sign of the level, and sizes of the gates, whose sum may cancel."""
        chosen_L = self.chosen_TLE.sum((0, 2))
        return {
            "gate_size_E": self.gates_TE.detach().abs().sum(0),
            "positive": (chosen_L * (self.levels_L > 0)).sum(),
            "negative": (chosen_L * (self.levels_L < 0)).sum(),
            "null": self.chosen_null_T.sum(),
        }

    def load_E(self) -> Tensor:
        """Selections of each physical expert: those of all its levels, nulls left out."""
        return self.chosen_TLE.sum((0, 1), dtype=torch.float32)

    def distribution_TR(self) -> Tensor:
        """p of all outputs, nulls included."""
        return self.logits_TR.softmax(1)

    def default_weights_TE(self) -> Tensor:
        """sum over the levels *not* selected of level * p: what the dense mixture would add."""
        missing_TLE = self.level_probs_TLE.masked_fill(self.chosen_TLE, 0.0)
        return torch.einsum("tle,l->te", missing_TLE, self.levels_L)


class Ternary(Router):
    """Top-K over the experts E_i, their negations -E_i (shared weights) and K null experts.

    p = softmax(W x + shift) over 2 E + K outputs; y = sum over the selected, non-null outputs of
    level * gate * E_i(x). A token that selects E_i and -E_i runs E_i once, with the difference of
    the gates; a null costs nothing. (The released modelling code of the paper overwrites the
    negated outputs and so never negates; this is the equation.)

    Args:
        dim: model width D (given by the block).
        slots: number E of expert slots (given by the block).
        k: selected outputs per token, and number of null experts.
        gates: `selected`: p renormalised over the selected outputs, nulls included (the paper's
            plain form); `always_null`: p of the selected non-null outputs, divided by (their sum
            + the sum of p over *all* nulls) (appendix A.3, the released model); `raw`: p itself,
            the form that default vectors need.
        negative_shift: added to the logits of all levels but the first; the released model has -1.
        null_shift: added to the logits of the nulls; the released model has -10.
        levels: the non-null levels; [1, -1] is the paper's ternary choice.
    """

    why_not_adaptive = (
        "an expert has one routing vector for each level, and a token that takes only null "
        "experts has chosen them; use TopAny, TopK or TopP"
    )
    own_statistics = ("executed_experts", "share_positive", "share_negative", "share_null")

    def __init__(
        self,
        dim: int,
        slots: int,
        k: int = 2,
        gates: Literal["selected", "always_null", "raw"] = "always_null",
        negative_shift: float = 0.0,
        null_shift: float = 0.0,
        levels: list[float] | tuple[float, ...] = (1.0, -1.0),
    ) -> None:
        super().__init__(dim, slots)
        if not levels or 0.0 in levels or len(set(levels)) != len(levels):
            raise ValueError(f"router levels must be distinct and not 0 (null), got {levels}")
        outputs = len(levels) * slots + k
        if not 1 <= k <= len(levels) * slots:
            raise ValueError(f"router k must lie between 1 and {len(levels) * slots}, got {k}")
        self.k, self.gates = k, gates
        self.weight = nn.Parameter(torch.empty(outputs, dim))
        nn.init.trunc_normal_(self.weight, std=0.02)
        shift_R = torch.zeros(outputs)
        shift_R[slots : len(levels) * slots] = negative_shift
        shift_R[len(levels) * slots :] = null_shift
        self.register_buffer("shift_R", shift_R, persistent=False)
        self.register_buffer("levels_L", torch.tensor(levels), persistent=False)
        if gates != "raw":
            self.why_not_default_vectors = (
                "renormalised gates leave no probability for experts not selected; set gates: raw"
            )

    def forward(self, x_TD: Tensor, active_E: Tensor) -> TernaryRouting:
        tokens, num_levels, slots = len(x_TD), len(self.levels_L), self.slots
        nulls_K = active_E.new_ones(self.k)
        active_R = torch.cat([active_E.repeat(num_levels), nulls_K])
        logits_TR = F.linear(x_TD, self.weight.to(x_TD)) + self.shift_R.to(x_TD)
        logits_TR = logits_TR.masked_fill(~active_R, -torch.inf)
        probs_TR = softmax(logits_TR)
        kept_TK = logits_TR.detach().topk(self.k, dim=1).indices  # p may underflow, logits not
        chosen_TR = torch.zeros_like(probs_TR, dtype=torch.bool).scatter_(1, kept_TK, True)
        chosen_TR = chosen_TR & active_R
        gates_TR = self._gates(probs_TR, chosen_TR)

        split = num_levels * slots
        level_probs_TLE = probs_TR[:, :split].view(tokens, num_levels, slots)
        chosen_TLE = chosen_TR[:, :split].view(tokens, num_levels, slots)
        levels_L = self.levels_L.to(x_TD)
        gates_TE = torch.einsum(
            "tle,l->te", gates_TR[:, :split].view(tokens, num_levels, slots), levels_L
        )
        return TernaryRouting(
            mask_TE=chosen_TLE.any(1),
            gates_TE=gates_TE,
            active_E=active_E,
            features_TD=x_TD.detach(),
            logits_TE=logits_TR[:, :split].view(tokens, num_levels, slots).logsumexp(1),
            probs_TE=level_probs_TLE.sum(1),
            logits_TR=logits_TR,
            level_probs_TLE=level_probs_TLE,
            chosen_TLE=chosen_TLE,
            chosen_null_T=chosen_TR[:, split:].sum(1),
            null_gate_T=gates_TR[:, split:].sum(1),
            levels_L=levels_L,
        )

    @classmethod
    def label(cls, k: int = 2, **init_args: Any) -> str:
        return f"TC-MoE, k = {k}"

    def slot_rows(self) -> dict[str, Tensor]:
        """One row for each level of a slot; those of the nulls belong to none."""
        rows_LE = torch.arange(len(self.levels_L) * self.slots).view(-1, self.slots)
        return {"weight": rows_LE.t(), "shift_R": rows_LE.t()}

    def statistics(
        self, sums: dict[str, Tensor], state: dict[str, Tensor], active_E: Tensor
    ) -> dict[str, float]:
        """Experts executed for a token, what that saves of k, and selections by sign."""
        executed = float(sums["load_E"].sum() / sums["taking_K"].sum())
        kinds = ("positive", "negative", "null")
        selections = sum(float(sums[kind]) for kind in kinds)
        shares = {f"share_{kind}": float(sums[kind]) / selections for kind in kinds}
        return {"executed_experts": executed, "flops_saved": 1.0 - executed / self.k} | shares

    def _gates(self, probs_TR: Tensor, chosen_TR: Tensor) -> Tensor:
        """Gates of all outputs, 0 where not selected; under `always_null` every null has one."""
        kept_TR = probs_TR * chosen_TR
        if self.gates == "raw":
            return kept_TR
        if self.gates == "always_null":
            kept_TR = torch.cat([kept_TR[:, : -self.k], probs_TR[:, -self.k :]], dim=1)
        tiny = torch.finfo(probs_TR.dtype).tiny
        return kept_TR / kept_TR.sum(1, keepdim=True).clamp_min(tiny)
