"""Naive float64 transcriptions of the methods' equations: one token and one expert at a time.

Nothing here is shared with the code under test. Suffixes as in app/moe/routing.py. An expert is a
function (e, x_D) -> y_D; probabilities, gates and counts are dicts from expert to value, and hold
active experts only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Expert = Callable[[int, Tensor], Tensor]
ZERO = torch.zeros((), dtype=torch.float64)


def value(number: Tensor) -> float:
    return float(number.detach())


@dataclass
class Choice:
    """What one token decided.

    Attributes:
        gates: signed weight of each executed expert.
        probs: p of every active expert (softmax routers).
        picks: how often each expert was selected (twice where both its signs were).
        rest: weight of the default vector of each expert, for what was not executed.
        hard: hard gates of top-any, before any fallback.
        null_gate: sum of the gates of the null experts (ternary).
        nulls: null experts selected (ternary).
    """

    gates: dict[int, Tensor]
    probs: dict[int, Tensor] = field(default_factory=dict)
    picks: dict[int, int] = field(default_factory=dict)
    rest: dict[int, Tensor] = field(default_factory=dict)
    hard: dict[int, Tensor] = field(default_factory=dict)
    null_gate: Tensor = ZERO
    nulls: int = 0


# ---------------------------------------------------------------------- experts and their mixture


def gelu_expert(weights: dict[str, Tensor], e: int, x_D: Tensor) -> Tensor:
    """down_e gelu(up_e x + up_bias_e) + down_bias_e, with the exact GELU."""
    hidden_F = weights["up"][e] @ x_D + weights["up_bias"][e]
    hidden_F = hidden_F * 0.5 * (1.0 + torch.erf(hidden_F / math.sqrt(2.0)))
    return weights["down"][e] @ hidden_F + weights["down_bias"][e]


def swiglu_expert(weights: dict[str, Tensor], e: int, x_D: Tensor) -> Tensor:
    """down_e (silu(gate_e x) * up_e x), with silu(a) = a / (1 + exp(-a))."""
    gate_F = weights["gate"][e] @ x_D
    return weights["down"][e] @ (gate_F / (1.0 + torch.exp(-gate_F)) * (weights["up"][e] @ x_D))


def mixture(
    x_TD: Tensor, choices: list[Choice], expert: Expert, default_ED: Tensor | None = None
) -> Tensor:
    """y_t = sum over the executed e of gate_te E_e(x_t) [+ sum over the others of p_te V_e]."""
    rows = []
    for x_D, choice in zip(x_TD, choices, strict=True):
        y_D = torch.zeros_like(x_D)
        for e, gate in choice.gates.items():
            y_D = y_D + gate * expert(e, x_D)
        if default_ED is not None:
            for e, weight in choice.rest.items():
                y_D = y_D + weight * default_ED[e]
        rows.append(y_D)
    return torch.stack(rows)


# ---------------------------------------------------------------------- softmax routers


def softmax(logits: dict) -> dict:
    """exp(l_i) / sum_j exp(l_j)."""
    largest = max(value(logit) for logit in logits.values())
    powers = {key: torch.exp(logit - largest) for key, logit in logits.items()}
    total = sum(powers.values())
    return {key: power / total for key, power in powers.items()}


def router_probs(weight_ED: Tensor, x_D: Tensor, active: list[int]) -> dict[int, Tensor]:
    """p = softmax(W x) over the active experts."""
    return softmax({e: (weight_ED[e] * x_D).sum() for e in active})


def _softmax_choice(probs: dict[int, Tensor], kept: list[int], normalize: bool) -> Choice:
    total = sum(probs[e] for e in kept) if normalize else 1.0
    return Choice(
        gates={e: probs[e] / total for e in kept},
        probs=probs,
        picks=dict.fromkeys(kept, 1),
        rest={e: p for e, p in probs.items() if e not in kept},
    )


def dense(probs: dict[int, Tensor]) -> Choice:
    """All experts, softmax weights."""
    return _softmax_choice(probs, list(probs), normalize=False)


def top_k(
    probs: dict[int, Tensor], k: int, normalize: bool = False, bias_E: Tensor | None = None
) -> Choice:
    """The k largest p (all where fewer are active); `bias_E` counts for the selection only."""
    score = {e: value(p) + (0.0 if bias_E is None else value(bias_E[e])) for e, p in probs.items()}
    return _softmax_choice(probs, sorted(score, key=score.get, reverse=True)[:k], normalize)


def top_p(probs: dict[int, Tensor], goal: float, normalize: bool = False) -> Choice:
    """Experts in decreasing p until their sum reaches the goal, at least one."""
    kept, covered = [], 0.0
    for e in sorted(probs, key=lambda e: value(probs[e]), reverse=True):
        kept.append(e)
        covered += value(probs[e])
        if covered >= goal:
            break
    return _softmax_choice(probs, kept, normalize)


# ---------------------------------------------------------------------- top-any (DynMoE)


class StraightThrough(torch.autograd.Function):
    """Forward: 1, the gate of a taken expert. Backward: the gradient goes to `margin` unchanged."""

    @staticmethod
    def forward(ctx, margin: Tensor) -> Tensor:
        return torch.ones_like(margin)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def sigmoid(a: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-a))


def cosine(a_D: Tensor, b_D: Tensor) -> Tensor:
    return (a_D * b_D).sum() / ((a_D * a_D).sum().sqrt() * (b_D * b_D).sum().sqrt())


def top_any(
    x_D: Tensor,
    weight_ED: Tensor,
    threshold_E: Tensor,
    active: list[int],
    tau: Tensor | float = 1.0,
    score_gates: bool = False,
    fallback: str | None = None,
) -> Choice:
    """Every expert with sigmoid(s / tau) > sigmoid(G / tau); gate 1 / k_t.

    The gradient of a taken gate goes to sigmoid(s / tau) - sigmoid(G / tau), k_t is a constant.
    With `score_gates` the gates are hard * sigmoid(s / tau), rescaled to sum 1. `fallback` "top1"
    (evaluation) gives a token without experts its most similar one.
    """
    similarity = {e: cosine(x_D, weight_ED[e]) for e in active}
    score = {e: sigmoid(s / tau) for e, s in similarity.items()}
    level = {e: sigmoid(threshold_E[e] / tau) for e in active}
    hard = {
        e: StraightThrough.apply(score[e] - level[e])
        for e in active
        if value(score[e]) > value(level[e])
    }
    if score_gates:
        total = sum(hard[e] * score[e] for e in hard)
        gates = {e: hard[e] * score[e] / total for e in hard}
    else:
        gates = {e: gate / len(hard) for e, gate in hard.items()}
    if not hard and fallback == "top1":
        best = max(similarity, key=lambda e: value(similarity[e]))
        gates = {best: torch.ones_like(x_D[0]).detach()}
    return Choice(gates=gates, picks=dict.fromkeys(gates, 1), hard=hard)


# ---------------------------------------------------------------------- ternary (TC-MoE)


def ternary(
    weight_RD: Tensor,
    x_D: Tensor,
    active: list[int],
    slots: int,
    k: int,
    form: str,
    levels: list[float],
    negative_shift: float = 0.0,
    null_shift: float = 0.0,
) -> Choice:
    """Top-k over every level of every expert and k null experts.

    Rows of W: the experts at the first level, at the second and so on, then the nulls. Gates:
    `selected`: p over the sum of the selected p, nulls included; `always_null`: p of the selected
    non-null outputs over (their sum + p of all nulls); `raw`: p.
    """
    logits = {}
    for number, _ in enumerate(levels):
        for e in active:
            shift = negative_shift if number > 0 else 0.0
            logits[number, e] = (weight_RD[number * slots + e] * x_D).sum() + shift
    for null in range(k):
        logits["null", null] = (weight_RD[len(levels) * slots + null] * x_D).sum() + null_shift
    probs = softmax(logits)
    chosen = sorted(probs, key=lambda key: value(probs[key]), reverse=True)[:k]
    chosen_nulls = [key for key in chosen if key[0] == "null"]
    all_nulls = [key for key in probs if key[0] == "null"]
    signed = [key for key in chosen if key[0] != "null"]
    counted_nulls = all_nulls if form == "always_null" else chosen_nulls
    total = sum(probs[key] for key in signed + counted_nulls) if form != "raw" else 1.0

    gates, picks = {}, {}
    for number, e in signed:
        gates[e] = gates.get(e, 0.0) + levels[number] * probs[number, e] / total
        picks[e] = picks.get(e, 0) + 1
    rest = {
        e: sum(
            (
                level * probs[number, e]
                for number, level in enumerate(levels)
                if (number, e) not in chosen
            ),
            start=ZERO,
        )
        for e in active
    }
    return Choice(
        gates=gates,
        probs={e: sum(probs[number, e] for number in range(len(levels))) for e in active},
        picks=picks,
        rest=rest,
        null_gate=sum((probs[key] / total for key in counted_nulls), start=ZERO),
        nulls=len(chosen_nulls),
    )


# ---------------------------------------------------------------------- losses


def load_balance(choices: list[Choice], active: list[int], importance: str = "probs") -> Tensor:
    """E * sum_e f_e P_e, f and P normalised to sum 1 over the active experts."""
    count = {e: sum(choice.picks.get(e, 0) for choice in choices) for e in active}
    mean = {
        e: sum((getattr(c, importance).get(e, ZERO) for c in choices), start=ZERO) / len(choices)
        for e in active
    }
    picked, given = sum(count.values()), sum(mean.values())
    return len(active) * sum(count[e] / picked * mean[e] / given for e in active)


def z_loss(logits: list[list[Tensor]]) -> Tensor:
    """Mean over tokens of (log sum_e exp(l_te))^2."""
    each = [torch.log(sum(torch.exp(logit) for logit in row)) ** 2 for row in logits]
    return sum(each) / len(each)


def entropy(choices: list[Choice]) -> Tensor:
    """Mean over tokens of -sum_e p log p."""
    each = [-sum(p * torch.log(p) for p in choice.probs.values()) for choice in choices]
    return sum(each) / len(each)


def diversity(weight_ED: Tensor, active: list[int]) -> Tensor:
    """||Wn^T Wn - I||_F with unit columns, over active experts."""
    total = ZERO
    for i in active:
        for j in active:
            # cos(w, w) - 1 is 0 up to rounding; its square would only add noise.
            total = total + (cosine(weight_ED[i], weight_ED[j]) ** 2 if i != j else 0.0)
    return torch.sqrt(total)


def simplicity(weight_ED: Tensor, active: list[int]) -> Tensor:
    """Mean norm of the routing vectors of active experts."""
    return sum((weight_ED[e] ** 2).sum().sqrt() for e in active) / len(active)


def efficiency(choices: list[Choice], active: list[int]) -> Tensor:
    """Mean of the hard gates over T x active experts."""
    taken = sum((gate for choice in choices for gate in choice.hard.values()), start=ZERO)
    return taken / (len(choices) * len(active))


def reward(choices: list[Choice]) -> Tensor:
    """-(1/T) sum over tokens and nulls of the gates of the nulls."""
    return -sum(choice.null_gate for choice in choices) / len(choices)
