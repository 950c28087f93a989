"""What it takes to end an expert and to begin another in its slot, optimizer state included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .block import MoEBlock
from .sharded import full, slot_rows, write_slot

# State that estimates a squared gradient, of Adam, NAdam, RMSprop, AMSGrad and their kin: zero
# there would make the next step far too long, so a new slot starts from the other experts' mean.
SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")


def slot_parameters(block: MoEBlock) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """The parameters of a block that have rows for slots, and those rows (E, n): the weights of
    experts, routing vectors and what else a router keeps of each slot, trained default vectors."""
    owners = {
        "experts.": (block.experts, slot_rows(block.experts, block.slots)),
        "router.": (block.router, block.router.slot_rows()),
        "": (block, slot_rows(block, block.slots)),
    }
    return {
        prefix + name: (getattr(owner, name), rows_En)
        for prefix, (owner, rows) in owners.items()
        for name, rows_En in rows.items()
        if isinstance(getattr(owner, name), nn.Parameter)
    }


def read_expert(block: MoEBlock, slot: int) -> dict[str, Tensor]:
    """A copy of one expert's weights, by parameter name."""
    return {name: full(p)[slot].clone() for name, p in block.experts.named_parameters()}


@torch.no_grad()
def write_expert(block: MoEBlock, slot: int, weights: dict[str, Tensor]) -> None:
    """Writes one expert's weights into a slot."""
    for name, parameter in block.experts.named_parameters():
        write_slot(parameter, slot, weights[name])


@torch.no_grad()
def upcycle(block: MoEBlock, weights: Mapping[str, Tensor]) -> None:
    """Makes every slot a copy of one feed-forward layer (sparse upcycling, arXiv 2212.05055).

    Args:
        weights: that layer's weights, by the parameter names of the block's experts.

    Raises:
        ValueError: if they are not of an expert's kind and shape.
    """
    for name, parameter in block.experts.named_parameters():
        if name not in weights:
            raise ValueError(
                f"the pretrained layer has no {name}, which {type(block.experts).__name__} need; "
                "choose experts of its kind"
            )
        given = weights[name].shape
        if given != parameter.shape[1:]:
            raise ValueError(
                f"the pretrained layer's {name} is {tuple(given)}, an expert's is "
                f"{tuple(parameter.shape[1:])}; upcycling needs equal widths (expert_ratio: 1)"
            )
        parameter.copy_(weights[name].expand_as(parameter))


def _row_states(optimizer: Optimizer, parameter: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    for name, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            yield name, value


@torch.no_grad()
def forget_slot(optimizer: Optimizer, block: MoEBlock, slot: int) -> None:
    """Gives a slot the optimizer state of a new expert.

    Momentum becomes 0. Squared-gradient averages become the mean over the other active experts:
    with zeros there, Adam's bias correction, which counts the steps of the whole parameter, would
    make the first step of the new expert about (1 - beta1) / sqrt(1 - beta2) = 3 times the
    learning rate.
    """
    others = [other for other in block.active_slots() if other != slot]
    for parameter, rows_En in slot_parameters(block).values():
        for name, state in _row_states(optimizer, parameter):
            for row, others_E in zip(rows_En[slot].tolist(), rows_En[others].t(), strict=True):
                second = name in SECOND_MOMENTS and others
                write_slot(state, row, full(state)[others_E].mean(0) if second else 0.0)


@torch.no_grad()
def bound_first_step(optimizer: Optimizer, block: MoEBlock, slot: int) -> bool:
    """Called with the first gradients of a new expert, before the optimizer's step: raises its
    squared-gradient averages to that gradient squared, so that no element moves by more than the
    learning rate, whatever the gradient's size.

    Returns:
        False while no gradient has reached the expert's weights (auxiliary losses move its routing
        vector before that); call again before the next step.
    """
    seen = False
    for owner, (parameter, rows_En) in slot_parameters(block).items():
        if parameter.grad is None:
            continue
        rows = rows_En[slot]
        gradient = full(parameter.grad)[rows]
        if not gradient.isfinite().all():
            return False  # of a step that a loss scaler will skip
        seen = seen or (owner.startswith("experts.") and bool(gradient.any()))
        decay = _coupled_decay(optimizer, parameter)
        if decay:
            gradient = gradient + decay * full(parameter)[rows]
        for name, state in _row_states(optimizer, parameter):
            if name in SECOND_MOMENTS:
                largest = full(state)[rows].maximum(gradient.square())
                for row, value in zip(rows.tolist(), largest, strict=True):
                    write_slot(state, row, value)
    return seen


def _coupled_decay(optimizer: Optimizer, parameter: nn.Parameter) -> float:
    """Weight decay that an optimizer adds to a parameter's gradient (L2), 0 where decoupled."""
    for group in optimizer.param_groups:
        if any(parameter is each for each in group["params"]):
            return 0.0 if group.get("decoupled_weight_decay") else group.get("weight_decay", 0.0)
    return 0.0
