"""Forward FLOPs of whole networks, from what was really executed.

A multiply-add counts 2. Counted are the matrix products: patch embedding, attention (projections,
Q K^T and A V; causal attention as the full square), dense feed-forward layers, output layer, and
of an MoE block the router, the executed pairs, the shared experts and the default-vector product
(T x E) @ (E x D). A null expert is no pair and costs nothing; a token that selects an expert with
both signs is one pair. Left out, as by torch's FlopCounterMode: biases, norms, activations,
softmax, the choice of experts and the weighted sum of their outputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from . import MoEBlock, moe_blocks


def dense_flops(network: nn.Module, inputs: Tensor) -> int:
    """FLOPs of one sample of a batch (B, ...) in everything but the MoE blocks.

    The forward pass runs on shapes alone (the meta device): it computes nothing, draws no random
    numbers and leaves the network as it is.
    """
    tensors = [*network.named_parameters(), *network.named_buffers()]
    shapes = {  # of sharded parameters the whole
        name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors
    }
    one = torch.empty((1, *inputs.shape[1:]), dtype=inputs.dtype, device="meta")
    # The counter does not know every fused attention kernel; plain products it does.
    attention = sdpa_kernel(SDPBackend.MATH)
    counter = FlopCounterMode(display=False)
    eager = torch.compiler.set_stance("force_eager")  # shapes alone are nothing to compile for
    bare = _without_hooks(network)
    with torch.no_grad(), _without_experts(network), bare, attention, eager, counter:
        functional_call(network, shapes, (one,))
    return counter.get_total_flops()


@contextmanager
def _without_experts(network: nn.Module) -> Iterator[None]:
    """Makes MoE blocks hand their input on."""
    blocks = list(moe_blocks(network).values())
    for block in blocks:
        block.forward = lambda x: x
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def _without_hooks(network: nn.Module) -> Iterator[None]:
    """Silences all hooks, those included with which FSDP2 gathers the weights."""
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    modules = [(module, kind) for module in network.modules() for kind in kinds]
    hooks = [getattr(module, kind) for module, kind in modules]
    for module, kind in modules:
        setattr(module, kind, OrderedDict())
    try:
        yield
    finally:
        for (module, kind), saved in zip(modules, hooks, strict=True):
            setattr(module, kind, saved)


class FlopMeter:
    """Watches a network and knows the FLOPs of its last forward pass, without a host sync.

    What does not depend on the routing is measured once for each shape of the input.

    Args:
        network: maps a batch of images, or of token ids (integers), to outputs.

    Attributes:
        unit: what FLOPs are per: `image` or `token`; None before the first forward pass.
        device: where the input of the last forward pass was.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.blocks: list[MoEBlock] = list(moe_blocks(network).values())
        self.unit: Literal["image", "token"] | None = None
        self.device = torch.device("cpu")
        self._inputs: Tensor | None = None
        self._dense: dict[torch.Size, int] = {}
        self._hook = network.register_forward_pre_hook(self._see)

    def _see(self, network: nn.Module, args: tuple[Any, ...]) -> None:
        self._inputs = torch.empty_like(args[0], device="meta")
        self.device = args[0].device
        self.unit = "image" if args[0].is_floating_point() else "token"

    def remove(self) -> None:
        """Stops watching."""
        self._hook.remove()

    def fixed(self) -> tuple[int, int]:
        """Of the last forward pass: images or tokens, and FLOPs of all but the routed pairs."""
        inputs = self._inputs
        sample = inputs.shape[1:]
        if sample not in self._dense:
            self._dense[sample] = dense_flops(self.network, inputs)
        flops = len(inputs) * self._dense[sample]
        for block in self.blocks:
            flops += len(block.routing.mask_TE) * block.flops_per_token()
        return len(inputs) if self.unit == "image" else inputs.numel(), flops


@torch.no_grad()
def forward_flops(network: nn.Module, inputs: Tensor) -> float:
    """FLOPs of one image, or of one token at its sequence length, as the network routes now.

    Args:
        network: run once, in the mode that it is in.
        inputs: images (B, C, H, W), or token ids (B, S).
    """
    meter = FlopMeter(network)
    try:
        network(inputs)
        units, flops = meter.fixed()
    finally:
        meter.remove()
    for block in meter.blocks:
        flops += int(block.routing.mask_TE.sum()) * block.experts.flops_per_pair()
    return flops / units
