"""Slots of parameters that are sharded over processes along the slot axis (FSDP2's DTensors).

Everything here is also for plain tensors, for which it does the obvious. On sharded ones all
processes have to call, with the same arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor (not imported: that takes a second)."""
    return hasattr(tensor, "full_tensor")


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, without gradient: of a sharded one gathered from all processes."""
    tensor = tensor.detach()
    return tensor.full_tensor() if is_sharded(tensor) else tensor


@torch.no_grad()
def write_slot(tensor: Tensor, slot: int, value: Tensor | float) -> None:
    """tensor[slot] = value, in place; of a sharded tensor on the process that holds the slot.

    Args:
        tensor: (E, ...), a parameter or its optimizer state.
        value: (...), the same on all processes, or a number.
    """
    if is_sharded(tensor):
        # FSDP2 cuts the first axis as torch.chunk does; its last processes may hold less or none.
        mesh, slots = tensor.device_mesh, tensor.shape[0]
        slot -= mesh.get_local_rank() * -(-slots // mesh.size())
        tensor = tensor.to_local()
        if not 0 <= slot < len(tensor):
            return
    tensor[slot] = value.to(tensor) if isinstance(value, Tensor) else value
