"""Experts of the form of any feed-forward layer (shape legend in routing.py)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .experts import Experts, Linear
from .routing import Pairs


class LayerExperts(Experts):
    """E experts of the form of one layer: plain or gated, any activation, inner norms, dropout.

    E_e(x) = layer(x; weights of e). Every parameter of the layer is stacked along a new first axis.
    The experts run one after the other: the grouped product of CUDA knows no other layer's form.

    Args:
        layer: maps (n, D) to (n, D) and has no buffers.
        slots: number E of expert slots; all start as copies of `layer`.

    Raises:
        ValueError: for a layer that has buffers or no matrix.
    """

    def __init__(self, layer: nn.Module, slots: int) -> None:
        matrices = [p for p in layer.parameters() if p.ndim == 2]
        if not matrices or next(layer.buffers(), None) is not None:
            kind = type(layer).__name__
            raise ValueError(f"experts can't be made of {kind}: it has no matrix, or buffers")
        width, hidden = feed_forward_sizes(layer)
        super().__init__(width, hidden, slots, init_std=0.02)
        # Not a child: its weights, which are never used, must not count as the network's own.
        self._layer = (copy.deepcopy(layer).requires_grad_(False),)
        self._names: dict[str, str] = {}
        for name, value in layer.named_parameters():
            self._names[name.replace(".", "_")] = name
            stacked = value.detach().expand(slots, *value.shape).clone()
            self.register_parameter(name.replace(".", "_"), nn.Parameter(stacked))

    def expert(self, linear: Linear, x: Tensor, *weights: Tensor) -> Tensor:
        """The layer with other weights."""
        return functional_call(
            self._layer[0], dict(zip(self._names.values(), weights, strict=True)), (x,)
        )

    def plan(self, x: Tensor, pairs: Pairs) -> tuple[list[int] | None, list[int]]:
        """A part for each slot with rows, on any device."""
        sizes = pairs.count_E.tolist()
        slots = [slot for slot, size in enumerate(sizes) if size] or [0]
        return slots, [sizes[slot] for slot in slots]

    def train(self, mode: bool = True) -> LayerExperts:
        """Switches the layer's dropout too."""
        self._layer[0].train(mode)
        return super().train(mode)

    @torch.no_grad()
    def reset(self) -> None:
        """Draws all experts anew, each as the layer's own modules draw their weights."""
        for slot in range(self.slots):
            seed = int(torch.randint(2**62, ()))
            for name, value in self.fresh(torch.Generator().manual_seed(seed)).items():
                getattr(self, name)[slot] = value

    def fresh(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Weights of one expert as the layer's own modules draw them, by parameter name.

        Modules that can't draw (`reset_parameters`) give matrices of the layer's own standard
        deviation and copies of everything else.
        """
        drawn = copy.deepcopy(self._layer[0]).cpu()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
            for module in drawn.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
                    continue
                for parameter in module.parameters(recurse=False):
                    if parameter.ndim == 2:
                        parameter.normal_(std=float(parameter.std()))
        values = dict(drawn.named_parameters())
        return {ours: values[name].detach() for ours, name in self._names.items()}


def feed_forward_sizes(layer: nn.Module) -> tuple[int, int]:
    """Model width D and hidden width F of a feed-forward layer.

    Raises:
        ValueError: if its first matrix doesn't read what its last one writes.
    """
    sizes = [size for module in layer.modules() if (size := linear_sizes(module)) is not None]
    if len(sizes) < 2 or sizes[0][0] != sizes[-1][1]:
        raise ValueError(f"{type(layer).__name__} is no feed-forward layer")
    return sizes[0][0], sizes[-1][0]


def linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear module (torch's, or transformers' Conv1D); else None."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.ndim == 2:
        return weight.shape[0], weight.shape[1]
    return None
