"""Experts into any network: its feed-forward layers become MoE blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ..moe import MoEBlock
from ..moe.layer_experts import LayerExperts, feed_forward_sizes

Layers = Sequence[int] | dict[str, int] | None
"""Which feed-forward layers: indices from 0 (negative: from the end), {"every": n}, {"last": n}, or
None for all."""

NAMES = ("mlp", "ffn", "feed_forward", "ff")
"""What feed-forward layers are called in timm and transformers, where they are one module."""


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward layer in a network.

    Attributes:
        name: of the module, or of the Transformer block where the layer is spread over two.
        layer: the layer as one module, (..., D) -> (..., D).
        put: puts an MoE block in its place.
    """

    name: str
    layer: nn.Module
    put: Callable[[nn.Module], None]


def feed_forwards(network: nn.Module) -> list[FeedForward]:
    """The feed-forward layers of a network's Transformer blocks, in order.

    Found are modules called as in NAMES whose last matrix writes what their first one reads (timm's
    Mlp, GluMlp and SwiGLU; Llama, Qwen, GPT-2, ModernBERT, DistilBERT), and the pair `intermediate`
    and `output` of BERT and its kin.
    """
    found = []
    for name, module in network.named_modules():
        if name.rpartition(".")[2] in NAMES and _is_feed_forward(module):
            owner, _, last = name.rpartition(".")
            parent = network.get_submodule(owner)
            found.append(FeedForward(name, module, _setter(parent, last)))
        elif _is_bert_block(module):
            dense = module.output.dense
            layer = nn.Sequential(module.intermediate, dense).train(module.training)

            def put(block: nn.Module, module: nn.Module = module) -> None:
                module.intermediate, module.output.dense = block, nn.Identity()

            found.append(FeedForward(f"{name}.intermediate", layer, put))
    return found


def with_experts(
    network: nn.Module,
    moe: Callable[[int, int], MoEBlock] = MoEBlock,
    layers: Layers = None,
    start: Literal["copies", "anew"] = "copies",
) -> nn.Module:
    """Makes MoE blocks of chosen feed-forward layers of a network, in place.

    Args:
        network: from timm, from transformers, or any other whose Transformer blocks have a
            feed-forward layer that `feed_forwards` finds.
        moe: makes the block; called with (width D, hidden width F).
        layers: which layers; see `Layers`.
        start: `copies`: every expert starts as a copy of the layer that it replaces, of that
            layer's own form (sparse upcycling, arXiv 2212.05055). Where a token's gates sum to 1,
            the network's outputs stay what they were. `anew`: the experts of `moe`, as drawn.

    Returns:
        The network.

    Raises:
        ValueError: if the network has no such layer or not the ones asked for, or the block can't
            hold copies of them.
    """
    found = feed_forwards(network)
    if not found:
        seen = sorted({type(module).__name__ for module in network.modules()} - {"Module"})
        raise ValueError(
            f"layers: {type(network).__name__} has no feed-forward layer that is known here; its "
            f"modules are {', '.join(seen)}"
        )
    for index in chosen_layers(layers, len(found)):
        layer = found[index].layer
        block = moe(*feed_forward_sizes(layer))
        if start == "copies":
            _copy_into(block, layer, found[index].name)
        weight = next(layer.parameters())
        found[index].put(block.to(weight.device, weight.dtype).train(layer.training))
    return network


def chosen_layers(layers: Layers, count: int) -> list[int]:
    """The indices of the layers asked for, ascending.

    Raises:
        ValueError: for an index out of range, or a word other than `every` and `last`.
    """
    if layers is None:
        return list(range(count))
    if isinstance(layers, dict):
        word, number = next(iter(layers.items()), ("", 0))
        if len(layers) != 1 or word not in ("every", "last") or not 1 <= number <= count:
            raise ValueError(
                f"layers must be a list of indices, {{every: n}} or {{last: n}} with n between 1 "
                f"and {count}, got {layers}"
            )
        return list(range(number - 1, count, number) if word == "every" else range(count)[-number:])
    for index in layers:
        if not -count <= index < count:
            raise ValueError(
                f"layers: there is no layer {index} among the {count} feed-forward layers (from 0)"
            )
    return sorted({index % count for index in layers})


def transformer_blocks(network: nn.Module) -> list[nn.Module]:
    """The Transformer blocks of a network, in order: parts of a list that have an attention."""
    lists = [m for m in network.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return [
        block
        for blocks in lists
        for block in blocks
        if any("attn" in name or "attention" in name for name, _ in block.named_children())
    ]


def _copy_into(block: MoEBlock, layer: nn.Module, name: str) -> None:
    if block.experts.hidden != feed_forward_sizes(layer)[1]:
        raise ValueError(
            f"{name}: experts that start as copies need the layer's own width: set expert_ratio to "
            "1, or start to anew"
        )
    if block.shared is not None:
        raise ValueError(
            f"{name}: with shared experts beside copies the layer would be added twice: set "
            "shared_experts to 0, or start to anew"
        )
    block.experts = LayerExperts(layer, block.slots)


def _is_feed_forward(module: nn.Module) -> bool:
    try:
        feed_forward_sizes(module)
    except ValueError:
        return False
    return next(module.buffers(), None) is None and not isinstance(module, MoEBlock)


def _is_bert_block(module: nn.Module) -> bool:
    parts = (getattr(module, name, None) for name in ("attention", "intermediate", "output"))
    if not all(isinstance(part, nn.Module) for part in parts):
        return False
    inner, outer = (getattr(part, "dense", None) for part in (module.intermediate, module.output))
    return isinstance(inner, nn.Linear) and isinstance(outer, nn.Linear)


def _setter(parent: nn.Module, name: str) -> Callable[[nn.Module], None]:
    return lambda block: setattr(parent, name, block)
