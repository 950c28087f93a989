"""The MoE block that vision and language share (shape legend in routing.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .dispatch import Dispatcher
from .experts import Experts, GeluExperts, compute_dtype
from .routers import Router, TopK
from .routing import Pairs, Routing


@dataclass(frozen=True)
class OutputSums:
    """What the experts put out in one forward pass, for the EMA of the default vectors.

    Attributes:
        sum_ED: sum over the tokens of an expert of weight * E_e(x).
        weight_E: sum of those weights; 0 where no token was.
    """

    sum_ED: Tensor
    weight_E: Tensor

    def mean_ED(self) -> Tensor:
        """Weighted mean output of each expert; rows without a token are 0."""
        return self.sum_ED / self.weight_E.clamp_min(torch.finfo(torch.float32).tiny)[:, None]


class MoEBlock(nn.Module):
    """A Transformer's feed-forward layer made of experts.

    y_t = sum over routed (t, e) of gate_te E_e(x_t)  [+ shared experts]  [+ default vectors].

    Dropless: every routed pair is computed. A token that is routed nowhere gets 0 from the routed
    part. `max_experts` slots exist, of which `active_E` marks the ones in use; shapes never change.

    Args:
        dim: model width D (given by the model).
        hidden: hidden width F of the dense layer that the block replaces (given by the model).
        router: router class; called with (D, number of slots).
        experts: expert class; called with (D, F of an expert, number of slots).
        num_experts: experts active at the start.
        max_experts: expert slots; null for as many as `num_experts`.
        expert_ratio: width of an expert as a fraction of `hidden`: 0.5 with twice the experts and
            twice the k makes fine-grained experts at equal active FLOPs.
        shared_experts: experts of that width that every token takes, with weight 1.
        default_vectors: Default MoE (arXiv 2504.12463). `ema` adds p_e V_e for the experts *not*
            executed, V being a buffer that the DefaultVectors callback moves; `trained` makes V a
            parameter (an ablation, worse).

    Attributes:
        active_E: bool buffer, the slots in use.
        routing: the Routing of the last forward pass; losses and statistics are read from it.
        collect: `uniform` or `router` leaves `output_sums` of each training forward pass, summed
            with weight 1 or with the router's probability.
        output_sums: see `collect`.
        lookahead: where set, a training forward pass uses lookahead(output_sums) in place of the
            stored default vectors (the update before the forward pass).

    Raises:
        ValueError: for a number of experts out of range, or a router that can't be combined with
            default vectors.
    """

    active_E: Tensor

    def __init__(
        self,
        dim: int,
        hidden: int,
        router: Callable[[int, int], Router] = TopK,
        experts: Callable[[int, int, int], Experts] = GeluExperts,
        num_experts: int = 8,
        max_experts: int | None = None,
        expert_ratio: float = 1.0,
        shared_experts: int = 0,
        default_vectors: Literal["none", "ema", "trained"] = "none",
    ) -> None:
        super().__init__()
        slots = num_experts if max_experts is None else max_experts
        width = round(hidden * expert_ratio)
        if not 1 <= num_experts <= slots:
            raise ValueError(
                f"num_experts must lie between 1 and max_experts ({slots}), got {num_experts}"
            )
        if width < 1:
            raise ValueError(f"expert_ratio {expert_ratio} of width {hidden} leaves no hidden unit")
        self.dim, self.slots = dim, slots
        self.router = router(dim, slots)
        self.experts = experts(dim, width, slots)
        self.shared = experts(dim, width * shared_experts, 1) if shared_experts else None
        self.register_buffer("active_E", torch.arange(slots) < num_experts)

        self.default_vectors = default_vectors
        if default_vectors != "none":
            if self.router.why_not_default_vectors:
                raise ValueError(
                    f"default_vectors: {default_vectors} can't be combined with the router "
                    f"{type(self.router).__name__}: {self.router.why_not_default_vectors}"
                )
            start_ED = torch.zeros(slots, dim)
            if default_vectors == "trained":
                self.default_ED = nn.Parameter(start_ED)
            else:
                self.register_buffer("default_ED", start_ED)
                self.register_buffer("default_seen_E", torch.zeros(slots, dtype=torch.bool))

        self.routing: Routing | None = None
        self.collect: Literal["uniform", "router"] | None = None
        self.output_sums: OutputSums | None = None
        self.lookahead: Callable[[OutputSums], Tensor] | None = None

    # The sizes of the parts are new in every batch: a clean break, not compilation without end.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D), in x's dtype; leaves `routing` behind."""
        x_TD = x.reshape(-1, self.dim)
        with torch.autocast(x.device.type, enabled=False):
            wide_TD = x_TD if x.dtype == torch.float64 else x_TD.float()
            # A copy: the record stays what it was when experts come and go.
            routing = self.router(wide_TD, self.active_E.clone())
        pairs, dtype = routing.pairs(), compute_dtype(x_TD)
        slots, sizes = self.experts.plan(x_TD, pairs)
        on_grid = slots is not None and self.experts.compiled_by_size(x_TD)
        dispatcher = Dispatcher(pairs.token_N, sizes, dtype, on_grid)
        outputs = self.experts.parts(dispatcher.gather(x_TD), slots, pairs)
        gate_N = pairs.take(routing.gates_TE)
        out_TD = dispatcher.combine(outputs, gate_N, len(x_TD))
        if self.shared is not None:
            out_TD += self._shared(x_TD)
        if self.collect and self.training:
            self.output_sums = self._sum_outputs(outputs, sizes, slots, pairs, routing)
        if self.default_vectors != "none":
            with torch.autocast(x.device.type, enabled=False):
                default_ED = self._defaults().to(out_TD)
                out_TD += routing.default_weights_TE() @ default_ED
        self.routing = routing
        return out_TD.to(x.dtype).reshape(x.shape)

    def _shared(self, x_TD: Tensor) -> Tensor:
        weights = (weight.squeeze(0) for weight in self.shared.parameters())
        return self.shared.expert(self.shared.linear(x_TD), x_TD, *weights)

    @torch.no_grad()
    def _sum_outputs(
        self,
        outputs: list[Tensor],
        sizes: list[int],
        slots: list[int] | None,
        pairs: Pairs,
        routing: Routing,
    ) -> OutputSums:
        weight_N = torch.ones(len(pairs.token_N), device=pairs.token_N.device)
        if self.collect == "router":
            weight_N = pairs.take(routing.probs_TE)
        weight_E = weight_N.new_zeros(self.slots).index_add(0, pairs.expert_N, weight_N)
        sum_ED = weight_N.new_zeros(self.slots, self.dim)
        if slots is None:
            weighted_ND = outputs[0].to(weight_N.dtype) * weight_N[:, None]
            sum_ED.index_add_(0, pairs.expert_N, weighted_ND)
        else:
            for slot, y_nD, weight_n in zip(slots, outputs, weight_N.split(sizes), strict=True):
                sum_ED[slot] = weight_n @ y_nD[: len(weight_n)].to(weight_n.dtype)
        return OutputSums(sum_ED, weight_E)

    def _defaults(self) -> Tensor:
        if self.lookahead is not None and self.training:
            return self.lookahead(self.output_sums)
        return self.default_ED

    def flops_per_token(self) -> int:
        """Forward FLOPs of one token besides its routed pairs (a multiply-add counts 2)."""
        shared = 0 if self.shared is None else self.shared.flops_per_pair()
        defaults = 0 if self.default_vectors == "none" else 2 * self.slots * self.dim
        return self.router.flops_per_token() + shared + defaults

    @torch.no_grad()
    def activate(self, slot: int) -> None:
        """Marks a slot as an expert. It starts with no default vector."""
        self.active_E[slot] = True
        if self.default_vectors != "none":
            self.default_ED[slot] = 0.0
        if self.default_vectors == "ema":
            self.default_seen_E[slot] = False

    @torch.no_grad()
    def deactivate(self, slot: int) -> None:
        """Takes a slot out of use."""
        self.active_E[slot] = False

    def active_slots(self) -> list[int]:
        """The slots in use, ascending (reads the mask back to the host)."""
        return self.active_E.nonzero().flatten().tolist()


def moe_blocks(model: nn.Module) -> dict[str, MoEBlock]:
    """The MoE blocks of a model, by the name of their Transformer block (as `blocks.7`)."""
    blocks: dict[str, MoEBlock] = {}
    for name, module in model.named_modules():
        if isinstance(module, MoEBlock):
            parts = name.split(".")
            index = max((i for i, part in enumerate(parts) if part.isdigit()), default=None)
            short = name if index is None else ".".join(parts[index - 1 : index + 1])
            blocks[name if short in blocks else short] = module  # two in one Transformer block
    return blocks
