"""Weights of a new expert: the strategies that DynMoE's authors compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from app.moe import MoEBlock
from app.moe.sharded import full
from app.moe.slots import read_expert

Weights = dict[str, Tensor]


@dataclass
class ExpertBank:
    """Copies of weights that the optimizer must not move any more (kept on the CPU).

    Attributes:
        discarded: removed experts, most recent last: slot, step of the removal, weights.
        unused: initial weights of the slots that were never in use.
    """

    discarded: list[dict[str, Any]] = field(default_factory=list)
    unused: dict[int, Weights] = field(default_factory=dict)

    def discard(self, block: MoEBlock, slot: int, step: int) -> None:
        """Keeps a removed expert as it is now."""
        weights = on_cpu(read_expert(block, slot))
        self.discarded.append({"slot": slot, "step": step, "weights": weights})

    def fill(self, block: MoEBlock) -> None:
        """Keeps the initial weights of the free slots that were never in use."""
        removed = {expert["slot"] for expert in self.discarded}
        for slot in block.free_slots():
            if slot not in removed and slot not in self.unused:
                self.unused[slot] = on_cpu(read_expert(block, slot))

    def next_slot(self) -> int:
        """The slot of the expert that comes back; else one whose initial weights are known."""
        return self.discarded[-1]["slot"] if self.discarded else min(self.unused)


@dataclass(frozen=True)
class Birth:
    """What a strategy may look at.

    Attributes:
        block: the block, the new slot not active yet.
        slot: the slot of the new expert.
        load_E: R_E, tokens that took each expert in the window.
        bank: the layer's bank.
        generator: random numbers that are the same on all processes.
    """

    block: MoEBlock
    slot: int
    load_E: Tensor
    bank: ExpertBank
    generator: torch.Generator


Strategy = Callable[[Birth], tuple[Weights, str]]
STRATEGIES: dict[str, Strategy] = {}
"""All of this file, by name. A strategy returns the weights and says where they come from."""


def strategy(label: str, keeps_removed: bool = False) -> Callable[[Strategy], Strategy]:
    """Makes a function a strategy.

    Args:
        label: what tables call it.
        keeps_removed: whether it takes from the bank, which else stays empty.
    """

    def register(function: Strategy) -> Strategy:
        function.label, function.keeps_removed = label, keeps_removed
        STRATEGIES[function.__name__] = function
        return function

    return register


@strategy("original", keeps_removed=True)
def last_removed(birth: Birth) -> tuple[Weights, str]:
    """The most recently discarded expert as it was then ("Original" in the paper).

    Each discarded expert comes back once, latest first; a slot that never was in use comes with
    its own initial weights.
    """
    if birth.bank.discarded:
        expert = birth.bank.discarded.pop()
        return expert["weights"], f"slot {expert['slot']} removed at step {expert['step']}"
    return birth.bank.unused.pop(birth.slot), "own initial weights"


@strategy("average")
def average(birth: Birth) -> tuple[Weights, str]:
    """Mean of the active experts."""
    active = birth.block.active_slots()
    return _mean(birth.block, active, [1.0] * len(active)), f"mean of slots {_names(active)}"


@strategy("weighted average")
def weighted_average(birth: Birth) -> tuple[Weights, str]:
    """Mean of the active experts, weighted by the tokens that took them ("W-Average").

    Equal weights where no token took any expert in the window.
    """
    active = birth.block.active_slots()
    load = [float(birth.load_E[slot]) for slot in active]
    if not sum(load):
        return average(birth)
    return _mean(birth.block, active, load), f"weighted mean of slots {_names(active)}"


@strategy("most activated")
def most_activated(birth: Birth) -> tuple[Weights, str]:
    """Copy of the expert that most tokens took; the lowest slot of several."""
    active = birth.block.active_slots()
    source = max(active, key=lambda slot: (float(birth.load_E[slot]), -slot))
    return read_expert(birth.block, source), f"copy of slot {source}"


@strategy("random")
def random(birth: Birth) -> tuple[Weights, str]:
    """Weights drawn anew, as at the construction of the layer."""
    return birth.block.experts.fresh(birth.generator), "random"


def find_strategy(name: str) -> Strategy:
    """A strategy by its name here, or by the import path of a function of one's own.

    Raises:
        ValueError: if there is none of that name.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    module, _, function = name.rpartition(".")
    reason = ""
    if module:
        try:
            found = getattr(import_module(module), function, None)
        except ImportError as error:
            found, reason = None, f" ({error})"
        if callable(found):
            return found
    raise ValueError(
        f"initialization: no strategy {name!r}{reason}; there are {', '.join(STRATEGIES)}, and the "
        "import path of a function of your own (callbacks.methods.initialization shows how)"
    )


def on_cpu(weights: Weights) -> Weights:
    """The same weights in the host's memory."""
    return {name: value.cpu() for name, value in weights.items()}


def _mean(block: MoEBlock, slots: list[int], weights: list[float]) -> Weights:
    share = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return {
        name: torch.einsum("e...,e->...", full(p)[slots].double(), share.to(p.device)).to(p.dtype)
        for name, p in block.experts.named_parameters()
    }


def _names(slots: list[int]) -> str:
    return " ".join(map(str, slots))
