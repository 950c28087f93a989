"""Slots of parameters that are sharded over processes along the slot axis (FSDP2's DTensors).

Everything here is also for plain tensors, for which it does the obvious. On sharded ones all
processes have to call, with the same arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor (not imported: that takes a second)."""
    return hasattr(tensor, "full_tensor")


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, without gradient: of a sharded one gathered from all processes."""
    tensor = tensor.detach()
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def slot_rows(module: nn.Module, slots: int) -> dict[str, Tensor]:
    """Row e for slot e, (E, 1), of each of a module's own parameters and buffers of that length."""
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    rows_E1 = torch.arange(slots)[:, None]
    return {name: rows_E1 for name, each in tensors if each.ndim and len(each) == slots}


@torch.no_grad()
def keep_rows(module: nn.Module, rows: dict[str, Tensor], keep: Sequence[int]) -> None:
    """Drops the rows of all slots but some; the others, rows of no slot among them, stay in order.

    Args:
        module: its tensors are replaced (none may be sharded).
        rows: by name the rows of each slot (E, n).
        keep: the slots that remain.
    """
    for name, rows_En in rows.items():
        old = getattr(module, name)
        gone_E = torch.ones(len(rows_En), dtype=torch.bool)
        gone_E[list(keep)] = False
        kept = torch.ones(len(old), dtype=torch.bool, device=old.device)
        kept[rows_En[gone_E].flatten()] = False
        new = old.detach()[kept]
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        setattr(module, name, new)


def sum_over_processes(*tensors: Tensor) -> None:
    """Adds tensors up over all processes, in place."""
    if dist.is_available() and dist.is_initialized():
        for tensor in tensors:
            dist.all_reduce(tensor)


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
