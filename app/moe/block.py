"""The MoE block that vision and language share (shape legend in routing.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .default_vectors import DefaultVectors
from .dispatch import Dispatcher
from .experts import Experts, GeluExperts, compute_dtype
from .routers import Router, TopK
from .routing import Routing
from .sharded import keep_rows, slot_rows


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
        routing: the Routing of the last forward pass; losses and statistics are read from it. It is
            no part of a copy or a pickle.
        defaults: how `ema` vectors follow the outputs of the experts; else None.

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
        self.defaults = DefaultVectors() if default_vectors == "ema" else None
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
        outputs = self.experts(dispatcher.gather(x_TD), slots, pairs)
        gate_N = pairs.take(routing.gates_TE)
        out_TD = dispatcher.combine(outputs, gate_N, len(x_TD))
        if self.shared is not None:
            out_TD += self._shared(x_TD)
        if self.default_vectors != "none":
            if self.defaults is not None and self.training:
                self.defaults.observe(outputs, slots, sizes, pairs, routing)
            with torch.autocast(x.device.type, enabled=False):
                default_ED = self.default_ED
                if self.defaults is not None and self.training:
                    default_ED = self.defaults.used(default_ED, self.default_seen_E)
                out_TD += routing.default_weights_TE() @ default_ED.to(out_TD)
        self.routing = routing
        return out_TD.to(x.dtype).reshape(x.shape)

    def _shared(self, x_TD: Tensor) -> Tensor:
        weights = (weight.squeeze(0) for weight in self.shared.parameters())
        return self.shared.expert(self.shared.linear(x_TD), x_TD, *weights)

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

    @torch.no_grad()
    def keep_slots(self, keep: Sequence[int] | None = None) -> None:
        """Drops all slots but some, in place.

        Where the others were inactive, outputs stay what they were; only the order in which a
        router sums over slots changes. Optimizers still hold the old parameters: this is for
        networks that are trained no further.

        Args:
            keep: the slots that remain, ascending; None for the active ones.
        """
        keep = self.active_slots() if keep is None else list(keep)
        self.router.keep_slots(keep)
        for owner in (self, self.experts):
            keep_rows(owner, slot_rows(owner, self.slots), keep)
        self.slots = self.experts.slots = len(keep)
        self.forget()

    def forget(self) -> None:
        """Lets go of the memory of the last forward pass."""
        self.routing = None
        if self.defaults is not None:
            self.defaults.observed = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"routing": None}

    def active_slots(self) -> list[int]:
        """The slots in use, ascending (reads the mask back to the host)."""
        return self.active_E.nonzero().flatten().tolist()

    def free_slots(self) -> list[int]:
        """The slots that hold no expert, ascending (reads the mask back to the host)."""
        return (~self.active_E).nonzero().flatten().tolist()


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
