"""Top-any routing: DynMoE, arXiv 2405.14297."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..routing import Routing
from ..sharded import full
from .base import Router, renormalize


@dataclass(frozen=True)
class TopAnyRouting(Routing):
    """A routing by thresholds.

    Attributes:
        similarity_TE: s, the cosine of token and routing vector.
        hard_gates_TE: 1 for a pair above its threshold and 0 elsewhere, with the straight-through
            gradient (before any evaluation fallback).
        vectors_ED: the routing vectors, with gradient.
        threshold_E: G, the thresholds, with gradient.
    """

    similarity_TE: Tensor
    hard_gates_TE: Tensor
    vectors_ED: Tensor
    threshold_E: Tensor

    def own_TE(self) -> Tensor:
        """Pairs above their threshold, without those of an evaluation fallback."""
        return self.hard_gates_TE.detach() > 0.5

    def order_TE(self) -> Tensor:
        """By similarity: the gates are equal."""
        return self.similarity_TE.detach()

    def watched(self) -> dict[str, Tensor]:
        logits = {"router logits": self.similarity_TE, "thresholds": self.threshold_E}
        return logits | super().watched()


class TopAny(Router):
    """Every expert whose similarity to the token exceeds its own threshold.

    s_te = cos(x_t, w_e);  token t takes e when sigmoid(s_te / tau) > sigmoid(G_e / tau), that is
    when s_te > G_e;  gate_te = 1 / k_t. The gradient that reaches the hard gate of a taken expert
    passes unchanged to sigmoid(s / tau) - sigmoid(G / tau); k_t counts as a constant; experts not
    taken get none. (The paper's text can be read otherwise; this is what the authors' code does.)

    While training, a token may take no expert: its routed output is 0.

    Args:
        dim: model width D (given by the block).
        slots: number E of expert slots (given by the block).
        temperature: tau.
        learn_temperature: train tau (kept at 0.01 or above), starting at `temperature`.
        gates: `equal` weights 1 / k_t, or `score`: sigmoid(s / tau) rescaled to sum 1 over the
            taken experts (an ablation; the authors found it clearly worse).
        fallback: in evaluation, a token above no threshold takes its most similar expert
            (`top1`) or none (`none`: the layer is skipped).
        mlp_hidden: width of a two-layer router MLP whose D outputs, instead of x, are compared
            with the routing vectors; null for the plain router. New experts are then aimed in
            the feature space of that MLP: w_new is the normalised sum of the *features* of the
            tokens that took no expert.
    """

    why_not_default_vectors = (
        "thresholds are independent of each other and give no distribution over experts; "
        "use a softmax router (TopK, TopP, Ternary)"
    )
    own_statistics = ("threshold_mean",)

    def __init__(
        self,
        dim: int,
        slots: int,
        temperature: float = 1.0,
        learn_temperature: bool = False,
        gates: Literal["equal", "score"] = "equal",
        fallback: Literal["top1", "none"] = "top1",
        mlp_hidden: int | None = None,
    ) -> None:
        super().__init__(dim, slots)
        if temperature < 0.01:
            raise ValueError(f"router temperature must be at least 0.01, got {temperature}")
        self.weight = nn.Parameter(torch.empty(slots, dim))
        nn.init.trunc_normal_(self.weight, std=0.02)
        self.threshold = nn.Parameter(torch.zeros(slots))
        log_tau = torch.tensor(math.log(temperature))
        if learn_temperature:
            self.log_temperature = nn.Parameter(log_tau)
        else:
            self.register_buffer("log_temperature", log_tau)
        self.gates, self.fallback = gates, fallback
        self.mlp = None
        if mlp_hidden is not None:
            self.mlp = nn.Sequential(
                nn.Linear(dim, mlp_hidden), nn.GELU(), nn.Linear(mlp_hidden, dim)
            )

    def forward(self, x_TD: Tensor, active_E: Tensor) -> TopAnyRouting:
        features_TD = x_TD if self.mlp is None else self._features(x_TD)
        vectors_ED = self.weight.to(x_TD)
        # Divided after the product: no further table of T rows and D columns, forward or backward.
        norm_T1 = _Norm.apply(features_TD).clamp_min(1e-12)
        similarity_TE = F.linear(features_TD, F.normalize(vectors_ED, dim=1)) / norm_T1
        threshold_E = self.threshold.to(x_TD)
        tau = self.log_temperature.to(x_TD).exp().clamp_min(0.01)
        taken_TE = (similarity_TE > threshold_E) & active_E
        score_TE = (similarity_TE / tau).sigmoid()
        margin_TE = score_TE - (threshold_E / tau).sigmoid()
        hard_TE = _straight_through(taken_TE, margin_TE)
        mask_TE = taken_TE
        gates_TE = hard_TE / taken_TE.sum(1, keepdim=True).clamp_min(1)
        if self.gates == "score":
            gates_TE = renormalize(hard_TE * score_TE)
        if not self.training and self.fallback == "top1":
            first_TE = _first(similarity_TE.detach().masked_fill(~active_E, -torch.inf))
            first_TE = first_TE & ~taken_TE.any(1, keepdim=True)
            mask_TE = taken_TE | first_TE
            gates_TE = gates_TE + first_TE
        features_TD = features_TD.detach()
        return TopAnyRouting(
            mask_TE,
            gates_TE,
            active_E,
            features_TD,
            similarity_TE,
            hard_TE,
            vectors_ED,
            threshold_E,
        )

    def _features(self, x_TD: Tensor) -> Tensor:
        """The router MLP, in x's dtype whatever that of its weights, as all of the router."""
        up, _, down = self.mlp
        hidden = F.gelu(F.linear(x_TD, up.weight.to(x_TD), up.bias.to(x_TD)))
        return F.linear(hidden, down.weight.to(x_TD), down.bias.to(x_TD))

    @classmethod
    def label(cls, **init_args: Any) -> str:
        return "top-any, fixed experts"

    def state(self) -> dict[str, Tensor]:
        return {"threshold_E": full(self.threshold)}

    def statistics(
        self, sums: dict[str, Tensor], state: dict[str, Tensor], active_E: Tensor
    ) -> dict[str, float]:
        """Mean, smallest and largest threshold of the active experts."""
        threshold = state["threshold_E"][active_E]
        return {
            "threshold_mean": float(threshold.mean()),
            "threshold_min": float(threshold.min()),
            "threshold_max": float(threshold.max()),
        }

    def flops_per_token(self) -> int:
        deep = 0 if self.mlp is None else 4 * self.mlp[0].weight.numel()
        return super().flops_per_token() + deep


class _Norm(Function):
    """Length of each row (T, 1). Torch's own backward pass makes four tables of x's size."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor) -> Tensor:
        norm_T1 = torch.linalg.vector_norm(x_TD, dim=1, keepdim=True)
        ctx.save_for_backward(x_TD, norm_T1)
        return norm_T1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T1: Tensor) -> Tensor:
        x_TD, norm_T1 = ctx.saved_tensors
        return x_TD * torch.where(norm_T1 > 0, grad_T1 / norm_T1, 0.0)


def _straight_through(taken_TE: Tensor, margin_TE: Tensor) -> Tensor:
    """1 where taken, else 0; the gradient of taken entries goes to the margin unchanged."""
    soft_TE = margin_TE * taken_TE
    return soft_TE - soft_TE.detach() + taken_TE


def _first(score_TE: Tensor) -> Tensor:
    """One-hot of each token's largest score, bool."""
    best_T1 = score_TE.argmax(1, keepdim=True)
    return torch.zeros_like(score_TE, dtype=torch.bool).scatter_(1, best_T1, True)
