"""`python -m app benchmark moe`: the MoE block against dense layers of equal active FLOPs.

Shapes as in app/moe/routing.py: T tokens, D model width, F hidden width of an expert, E experts,
K experts per token, N executed pairs, C capacity.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

from callbacks import DefaultVectors

from ...moe import GeluExperts, MoEBlock, SwiGLUExperts, Ternary, TopAny, TopK, TopP
from .peers import PEERS, Skipped
from .rows import Row, ratio_to, setting, show, timed
from .timing import CLOCKS, interleave, peak_bytes, spread, synchronize

FINE = 8  # the fine-grained block has so many times the experts, each so many times narrower
PART_REPEATS = 5
EINSUM_LIMIT = 8 * 2**30  # bytes that one dispatch tensor may take


@dataclass(frozen=True)
class Sizes:
    """T tokens of width D; E experts of hidden width F, of which a token takes K."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    k: int


@dataclass
class Case:
    """One way to compute the layer.

    Attributes:
        module: (T, D) -> (T, D).
        reference: the dense case of equal active FLOPs.
        pairs: executed pairs N, None for a dense layer.
        after_step: what the method's callback does for a step beside forward and backward.
        dtype: of weights and input; autocast makes bf16 of float32 where it is asked for.
        ours: for a peer, our case of the same experts.
        note: what a reader must know.
    """

    module: nn.Module
    reference: str = "dense"
    pairs: int | None = None
    after_step: Callable[[], None] | None = None
    dtype: torch.dtype = torch.float32
    ours: str | None = None
    note: str = ""


def run(
    sizes: Sizes, device: torch.device, dtype: str, repeats: int, clock: str = "wall"
) -> list[Row]:
    """Times all cases and prints the tables.

    Args:
        sizes: of the layer.
        device: where to run.
        dtype: `fp32`, or `bf16` for autocast as by `--trainer.precision bf16-mixed` (cases with
            SwiGLU experts, ours and the peers', then hold bf16 weights: not all peers know
            autocast).
        repeats: interleaved rounds.
        clock: name of one of `timing.CLOCKS`.

    Returns:
        The rows.
    """
    torch.manual_seed(0)
    x_TD = torch.randn(sizes.tokens, sizes.dim, device=device)
    autocast = dtype == "bf16"
    skipped: list[str] = []
    cases = make_cases(sizes, x_TD, autocast, skipped)
    steps = {name: Step(case, x_TD, autocast) for name, case in cases.items()}
    common = setting("moe", device, dtype, clock=clock, **vars(sizes))
    rows: list[Row] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("timing", total=2 * (repeats + 1) * len(cases))
        for phase in ("fwd", "fwd_bwd"):
            calls = {
                name: step.forward if phase == "fwd" else step.forward_backward
                for name, step in steps.items()
            }
            seconds = interleave(
                calls, repeats, device, done=lambda: progress.advance(task), clock=CLOCKS[clock]
            )
            for name, case in cases.items():
                row = timed(name, phase, seconds[name])
                row |= ratio_to("dense", seconds[name], seconds[case.reference])
                row |= {"dense": case.reference, "pairs": case.pairs}
                if case.pairs is not None:
                    row["pairs_per_token"] = case.pairs / sizes.tokens
                if case.ours is None and case.reference == "dense" and name != "dense":
                    row |= ratio_to("topk2", seconds[name], seconds["topk2"])
                if case.ours is not None:
                    row |= ratio_to("ours", seconds[name], seconds[case.ours])
                row["peak_bytes"] = peak_bytes(calls[name], device)
                if isinstance(case.module, MoEBlock):
                    row["parts_s"] = parts(steps[name], phase, min(repeats, PART_REPEATS), device)
                rows.append(common | row | {"note": case.note})
    _show(rows, sizes, skipped)
    return rows


def _show(rows: list[Row], sizes: Sizes, skipped: list[str]) -> None:
    first = rows[0]
    title = (
        f"MoE block: T={sizes.tokens} D={sizes.dim} F={sizes.hidden} E={sizes.experts} "
        f"K={sizes.k}, {first['dtype']}, {first['hardware']}, {first['threads']} threads, "
        f"torch {first['torch']}"
    )
    columns = {
        "case": "case",
        "phase": "phase",
        "median_s": "ms",
        "spread": "spread %",
        "ratio_to_dense": "x dense",
        "ratio_to_topk2": "x topk2",
        "ratio_to_ours": "x ours",
        "pairs_per_token": "pairs/token",
        "peak_bytes": "peak MiB",
    }
    note = (
        "x dense: against a feed-forward layer of equal active FLOPs. "
        "spread: between the quartiles. " + " ".join(skipped)
    )
    show(title, rows, columns, note)
    split = [
        {"case": row["case"]} | row["parts_s"]
        for row in rows
        if row["phase"] == "fwd_bwd" and "parts_s" in row
    ]
    headings = {name: f"{name} ms" for name in FORWARD_PARTS + BACKWARD_PARTS}
    show(
        "Where the time goes",
        split,
        {"case": "case"} | headings,
        "Taken in runs of their own: with marks in it a block is a little slower.",
    )


# ---------------------------------------------------------------------- the cases


def make_cases(
    sizes: Sizes, x_TD: Tensor, autocast: bool, skipped: list[str] | None = None
) -> dict[str, Case]:
    """All cases for these sizes, on x's device; adds a line to `skipped` for each left out."""
    skipped = [] if skipped is None else skipped
    tokens, dim, hidden, experts, k = vars(sizes).values()
    glu_dtype = torch.bfloat16 if autocast else torch.float32
    cases = {
        "dense": Case(DenseLayer(dim, k * hidden)),
        "dense_k1": Case(DenseLayer(dim, hidden), "dense_k1", note="for topk1"),
        "dense_swiglu": Case(DenseSwiGLU(dim, k * hidden), "dense_swiglu", dtype=glu_dtype),
    }
    block = partial(MoEBlock, dim, hidden, num_experts=experts)
    cases["topk1"] = Case(block(partial(TopK, k=1)), "dense_k1")
    cases["topk2"] = Case(block(partial(TopK, k=k)), note=f"k = {k}")
    cases["topany"] = Case(
        block(TopAny), note="thresholds at the quantiles that give every expert N / E tokens"
    )
    cases["topp"] = Case(block(TopP), note="p such that the mean is K experts per token")
    cases["ternary"] = Case(
        block(partial(Ternary, k=k)),
        note="each expert offered in one sign only (half of them negated) and no null, so that K "
        "selections are K executed experts",
    )
    cases["default"] = Case(
        block(partial(TopK, k=k), default_vectors="ema"),
        note="with the sums that its callback collects; fwd_bwd with the update of the averages",
    )
    cases["fine64"] = Case(
        MoEBlock(
            dim, hidden, partial(TopK, k=FINE * k), num_experts=FINE * experts,
            expert_ratio=1 / FINE,
        ),
        note=f"E={FINE * experts}, F={hidden // FINE}, K={FINE * k}",
    )  # fmt: skip
    cases["swiglu"] = Case(
        block(partial(TopK, k=k, normalize=True), experts=SwiGLUExperts),
        "dense_swiglu",
        dtype=glu_dtype,
        note="ours, with the experts and gates of the peers",
    )
    if _dispatch_bytes(sizes) <= EINSUM_LIMIT:
        cases["einsum"] = Case(EinsumLayer(block(partial(TopK, k=k))), note="one-hot dispatch")
    else:
        skipped.append("einsum left out: its dispatch tensor would not fit.")
    for case in cases.values():
        case.module.to(x_TD.device, case.dtype).train()
    _equalize(cases, x_TD, k)
    for name in ("topk1", "topk2", "topany", "topp", "ternary", "default", "fine64", "swiglu"):
        cases[name].pairs = _executed(cases[name].module, x_TD.to(cases[name].dtype))
    if "einsum" in cases:
        cases["einsum"].pairs = cases["topk2"].pairs
    for name, make in PEERS.items():
        try:
            peer = make(sizes, x_TD.device, glu_dtype)
            share = peer.executed_share(x_TD.to(glu_dtype))
        except Skipped as reason:
            skipped.append(f"peer:{name} left out: {reason}.")
            continue
        cases[f"peer:{name}"] = Case(
            peer.module,
            "dense_swiglu",
            round(share * k * tokens),
            dtype=glu_dtype,
            ours="swiglu",
            note=peer.note,
        )
    return cases


def _dispatch_bytes(sizes: Sizes) -> int:
    capacity = 1.2 * sizes.tokens * sizes.k / sizes.experts
    return int(4 * sizes.tokens * sizes.experts * capacity)


@torch.no_grad()
def _equalize(cases: dict[str, Case], x_TD: Tensor, k: int) -> None:
    """Makes top-any, top-p and ternary choice execute as many pairs as top-k; and switches on
    what the DefaultVectors callback does."""
    router = cases["topany"].module.router
    similarity_TE = F.normalize(x_TD, dim=1) @ F.normalize(router.weight, dim=1).t()
    ranked_TE = similarity_TE.sort(0, descending=True).values
    for expert in range(router.slots):  # N = K T over E experts, the remainder one each
        count = len(x_TD) * k // router.slots + (expert < len(x_TD) * k % router.slots)
        router.threshold[expert] = ranked_TE[count - 1 : count + 1, expert].mean()

    block = cases["topp"].module
    low, high = 0.0, 1.0
    for _ in range(30):
        block.router.p = (low + high) / 2
        enough = block.router(x_TD, block.active_E).mask_TE.sum() >= k * len(x_TD)
        low, high = (low, block.router.p) if enough else (block.router.p, high)

    router = cases["ternary"].module.router
    router.shift_R[2 * router.slots :] = -50.0
    for expert in range(router.slots):
        router.shift_R[expert + router.slots * (expert % 2)] = -50.0

    block = cases["default"].module
    callback = DefaultVectors()
    callback.blocks = {"block": block}
    block.defaults.follow(callback.beta, callback.weighting)

    def update() -> None:
        callback.on_after_backward(None, None)
        with torch.no_grad():
            callback.on_before_optimizer_step(None, None, None)

    cases["default"].after_step = update


@torch.no_grad()
def _executed(block: MoEBlock, x_TD: Tensor) -> int:
    block(x_TD)
    return int(block.routing.mask_TE.sum())


class DenseLayer(nn.Sequential):
    """The feed-forward layer of a ViT."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class DenseSwiGLU(nn.Module):
    """The feed-forward layer of a Llama."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_TD)) * self.up(x_TD))


class EinsumLayer(nn.Module):
    """The dispatch of GShard (arXiv 2006.16668), in which the code published for many MoE papers
    computes: one-hot tensors (T, E, C) gather the tokens of each expert and combine its outputs.
    The capacity C is the largest load, as in DynMoE, so that no token is dropped.
    """

    def __init__(self, block: MoEBlock) -> None:
        super().__init__()
        if not isinstance(block.experts, GeluExperts):
            raise ValueError("the einsum dispatch is written for GELU experts")
        self.block = block

    def forward(self, x_TD: Tensor) -> Tensor:
        experts = self.block.experts
        with torch.autocast(x_TD.device.type, enabled=False):
            routing = self.block.router(x_TD.float(), self.block.active_E)
        place_TE = (routing.mask_TE.cumsum(0) - 1).masked_fill(~routing.mask_TE, -1)
        place_C = torch.arange(int(routing.mask_TE.sum(0).max()), device=x_TD.device)
        dispatch_TEC = (place_TE[:, :, None] == place_C).to(x_TD)
        x_ECD = torch.einsum("tec,td->ecd", dispatch_TEC, x_TD)
        hidden_ECF = F.gelu(x_ECD @ experts.up.mT + experts.up_bias[:, None])
        y_ECD = hidden_ECF @ experts.down.mT + experts.down_bias[:, None]
        combine_TEC = dispatch_TEC * routing.gates_TE[:, :, None]
        return torch.einsum("tec,ecd->td", combine_TEC, y_ECD.to(combine_TEC))


# ---------------------------------------------------------------------- one call


class Step:
    """Forward, and forward with backward, of one case on a fixed batch."""

    def __init__(self, case: Case, x_TD: Tensor, autocast: bool) -> None:
        self.case = case
        self.autocast = autocast and case.dtype == torch.float32
        # As inside a network: the input wants a gradient.
        self.x_TD = x_TD.to(case.dtype).requires_grad_()
        self.grad_TD = torch.randn_like(self.x_TD)

    def forward(self) -> Tensor:
        """The output, with its graph."""
        with torch.autocast(self.x_TD.device.type, torch.bfloat16, enabled=self.autocast):
            return self.case.module(self.x_TD)

    def forward_backward(self, between: Callable[[], None] = lambda: None) -> None:
        """Gradients of input and weights; `between` is called before the backward pass."""
        self.x_TD.grad = None
        for parameter in self.case.module.parameters():
            parameter.grad = None
        y_TD = self.forward()
        between()
        y_TD.backward(self.grad_TD.to(y_TD.dtype))
        if self.case.after_step is not None:
            self.case.after_step()


# ---------------------------------------------------------------------- where the time goes

FORWARD_PARTS = ("routing", "dispatch", "experts", "combine")
BACKWARD_PARTS = ("combine bwd", "experts bwd", "rest bwd")


def parts(step: Step, phase: str, repeats: int, device: torch.device) -> dict[str, float]:
    """Median seconds of the parts of an MoE block, from marks where one part ends.

    routing: the router. dispatch: pairs sorted by expert, and the gathering of their tokens.
    experts: their matrix products. combine: gates, the weighted sum over the experts of a token,
    and default vectors. rest: the backward pass of dispatch and routing, which come mixed.
    """
    names = FORWARD_PARTS + (BACKWARD_PARTS if phase == "fwd_bwd" else ())
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        marks = Marks(device)
        with _marked(step.case.module, marks):
            if phase == "fwd":
                step.forward()
            else:
                step.forward_backward(between=lambda marks=marks: marks.set("backward"))
                marks.set("done")
        synchronize(device)
        places = ["start", "routed", "gathered", "computed", "combined"]
        if phase == "fwd_bwd":
            forward = list(pairwise(places))
            places = ["backward", "experts wanted", "experts done", "done"]
            spans = forward + list(pairwise(places))
        else:
            spans = list(pairwise(places))
        for name, (start, end) in zip(names, spans, strict=True):
            taken[name].append(marks.seconds(start, end))
    return {name: spread(values)[1] for name, values in taken.items()}


class Marks:
    """Named moments, on the host's clock or in the stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._at: dict[str, Any] = {}

    def set(self, name: str) -> None:
        """Now."""
        if self._cuda:
            self._at[name] = torch.cuda.Event(enable_timing=True)
            self._at[name].record()
        else:
            self._at[name] = time.perf_counter()

    def set_once(self, name: str) -> None:
        """Now, unless it was set before."""
        if name not in self._at:
            self.set(name)

    def seconds(self, start: str, end: str) -> float:
        """Between two moments."""
        if self._cuda:
            return self._at[start].elapsed_time(self._at[end]) / 1e3
        return self._at[end] - self._at[start]


@contextlib.contextmanager
def _marked(block: MoEBlock, marks: Marks) -> Iterator[None]:
    experts = block.experts
    compute = experts.forward

    def marked(inputs: Sequence[Tensor], *rest: Any) -> Sequence[Tensor]:
        marks.set("gathered")
        outputs = compute(inputs, *rest)
        marks.set("computed")
        for y_nD in outputs:
            y_nD.register_hook(lambda _: marks.set_once("experts wanted"))
        for x_nD in inputs:  # the last one counts
            x_nD.register_hook(lambda _: marks.set("experts done"))
        return outputs

    hooks = [
        block.register_forward_pre_hook(lambda *_: marks.set("start")),
        block.router.register_forward_hook(lambda *_: marks.set("routed")),
        block.register_forward_hook(lambda *_: marks.set("combined")),
    ]
    experts.forward = marked
    try:
        yield
    finally:
        del experts.forward
        for hook in hooks:
            hook.remove()
