"""Every router with its naive counterpart, and blocks drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from app.moe import (
    Dense,
    GeluExperts,
    MoEBlock,
    Router,
    SwiGLUExperts,
    Ternary,
    TopAny,
    TopK,
    TopP,
)

from . import naive
from .naive import Choice

SLOTS, DIM, HIDDEN, TOKENS = 6, 5, 4, 9
ACTIVE = [0, 2, 3, 5]  # slots 1 and 4 stay inactive


def _dense(router: Router, x_D: Tensor, active: list[int]) -> Choice:
    return naive.dense(naive.router_probs(router.weight, x_D, active))


def _top_k(router: TopK, x_D: Tensor, active: list[int]) -> Choice:
    probs = naive.router_probs(router.weight, x_D, active)
    return naive.top_k(probs, router.k, router.normalize, router.balance_bias_E)


def _top_p(router: TopP, x_D: Tensor, active: list[int]) -> Choice:
    probs = naive.router_probs(router.weight, x_D, active)
    return naive.top_p(probs, router.p, router.normalize)


def _top_any(router: TopAny, x_D: Tensor, active: list[int]) -> Choice:
    if router.mlp is not None:
        first, _, second = router.mlp
        hidden = first.weight @ x_D + first.bias
        hidden = hidden * 0.5 * (1.0 + torch.erf(hidden / 2**0.5))
        x_D = second.weight @ hidden + second.bias
    return naive.top_any(
        x_D,
        router.weight,
        router.threshold,
        active,
        tau=router.log_temperature.exp(),
        score_gates=router.gates == "score",
        fallback=None if router.training else router.fallback,
    )


def _ternary(router: Ternary, x_D: Tensor, active: list[int], **shifts: float) -> Choice:
    levels = router.levels_L.tolist()
    return naive.ternary(
        router.weight, x_D, active, router.slots, router.k, router.gates, levels, **shifts
    )


@dataclass(frozen=True)
class Case:
    """A router and the naive decision for one token.

    Attributes:
        router: called with (D, E).
        choose: (router, x_D, active slots) -> Choice.
        train: whether the block is in training mode.
    """

    router: Callable[[int, int], Router]
    choose: Callable[[Router, Tensor, list[int]], Choice]
    train: bool = True


RELEASED = {"negative_shift": -1.0, "null_shift": -10.0}
MILD = {"negative_shift": -0.25, "null_shift": -0.75}

CASES = {
    "dense": Case(Dense, _dense),
    "top1": Case(partial(TopK, k=1), _top_k),
    "top2": Case(partial(TopK, k=2), _top_k),
    "top2-normalized": Case(partial(TopK, k=2, normalize=True), _top_k),
    "top5-of-4": Case(partial(TopK, k=5), _top_k),
    "top5-of-4-normalized": Case(partial(TopK, k=5, normalize=True), _top_k),
    "top2-noisy-eval": Case(partial(TopK, k=2, noise=True, jitter=0.1), _top_k, train=False),
    "topp": Case(partial(TopP, p=0.4), _top_p),
    "topp-0.9": Case(partial(TopP, p=0.9), _top_p),
    "topp-normalized": Case(partial(TopP, p=0.7, normalize=True), _top_p),
    "topany": Case(TopAny, _top_any),
    "topany-eval-top1": Case(TopAny, _top_any, train=False),
    "topany-eval-none": Case(partial(TopAny, fallback="none"), _top_any, train=False),
    "topany-temperature": Case(partial(TopAny, temperature=0.1), _top_any),
    "topany-learned-temperature": Case(
        partial(TopAny, temperature=0.1, learn_temperature=True), _top_any
    ),
    "topany-score": Case(partial(TopAny, gates="score"), _top_any),
    "topany-score-eval": Case(partial(TopAny, gates="score"), _top_any, train=False),
    "topany-mlp": Case(partial(TopAny, mlp_hidden=7), _top_any),
    "ternary-selected": Case(partial(Ternary, k=3, gates="selected"), _ternary),
    "ternary-always-null": Case(partial(Ternary, k=3, gates="always_null"), _ternary),
    "ternary-raw": Case(partial(Ternary, k=3, gates="raw"), _ternary),
    "ternary-k1": Case(partial(Ternary, k=1, gates="always_null"), _ternary),
    "ternary-released-shifts": Case(
        partial(Ternary, k=2, **RELEASED), partial(_ternary, **RELEASED)
    ),
    "ternary-mild-shifts": Case(
        partial(Ternary, k=3, gates="selected", **MILD), partial(_ternary, **MILD)
    ),
    "ternary-levels": Case(
        partial(Ternary, k=4, gates="selected", levels=[1.0, -1.0, 0.5], **MILD),
        partial(_ternary, **MILD),
    ),
}
EXPERTS = {"gelu": GeluExperts, "swiglu": SwiGLUExperts}
NAIVE_EXPERTS = {GeluExperts: naive.gelu_expert, SwiGLUExperts: naive.swiglu_expert}


@torch.no_grad()
def randomize(module: nn.Module, seed: int) -> None:
    """Router weights of standard deviation 1, small thresholds and biases, lively experts."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        std = 1.0
        if "threshold" in name or "bias" in name:
            std = 0.25
        elif "experts" in name or "shared" in name:
            std = 0.6
        if not name.endswith("log_temperature"):
            parameter.normal_(std=std, generator=generator)
        if "threshold" in name:
            parameter.add_(0.2)  # so that some tokens take no expert
    if isinstance(getattr(module, "router", None), TopK):
        module.router.balance_bias_E.normal_(std=0.05, generator=generator)


def make_block(
    router: Callable[[int, int], Router],
    seed: int = 0,
    active: list[int] = ACTIVE,
    slots: int = SLOTS,
    train: bool = True,
    double: bool = True,
    **options,
) -> MoEBlock:
    """A small block with random weights of which only `active` slots are in use."""
    block = MoEBlock(DIM, HIDDEN, router, num_experts=slots, **options)
    randomize(block, seed)
    for slot in range(slots):
        if slot not in active:
            block.deactivate(slot)
    return (block.double() if double else block).train(train)


def tokens(seed: int, *shape: int, double: bool = True) -> Tensor:
    """Random input with gradient, float64."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(*(shape or (TOKENS, DIM)), generator=generator, dtype=torch.float64)
    return (x if double else x.float()).requires_grad_()


def naive_choices(case: Case, block: MoEBlock, x_TD: Tensor) -> list[Choice]:
    """The naive decisions of all tokens."""
    active = block.active_E.nonzero().flatten().tolist()
    return [case.choose(block.router, x_D, active) for x_D in x_TD]


def naive_output(block: MoEBlock, x_TD: Tensor, choices: list[Choice], **options) -> Tensor:
    """The naive mixture of a block's own weights."""
    weights = dict(block.experts.named_parameters())
    kind = NAIVE_EXPERTS[type(block.experts)]
    return naive.mixture(x_TD, choices, partial(kind, weights), **options)


def leaves(block: MoEBlock, x: Tensor) -> dict[str, Tensor]:
    """Everything that can get a gradient: the input and all parameters."""
    return {"x": x, **dict(block.named_parameters())}


def assert_same_gradients(
    actual: Tensor, expected: Tensor, inputs: dict[str, Tensor], rtol: float | None = None
) -> None:
    """Both scalars have the same gradients; those of `actual` exist for every input."""
    close = {"rtol": rtol or 1e-9, "atol": (rtol or 1e-9) / 100}
    got = torch.autograd.grad(actual, list(inputs.values()), allow_unused=True, retain_graph=True)
    want = [torch.zeros_like(value) for value in inputs.values()]
    if expected.requires_grad:
        found = torch.autograd.grad(
            expected, list(inputs.values()), allow_unused=True, retain_graph=True
        )
        want = [zero if grad is None else grad for zero, grad in zip(want, found, strict=True)]
    for name, a, b in zip(inputs, got, want, strict=True):
        assert a is not None, f"{name} got no gradient at all; zeros were expected at least"
        torch.testing.assert_close(a, b, **close, msg=lambda m, n=name: f"{n}: {m}")
