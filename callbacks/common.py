"""What several callbacks need."""

from __future__ import annotations

import errno

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from app.moe import MoEBlock, moe_blocks
from app.moe.sharded import sum_over_processes as sum_over_ranks


def find_blocks(callback: L.Callback, module: L.LightningModule) -> dict[str, MoEBlock]:
    """The MoE blocks of a task, by layer name.

    Raises:
        MisconfigurationException: if there is none.
    """
    blocks = moe_blocks(module)
    if not blocks:
        raise MisconfigurationException(
            f"{type(callback).__name__} works on MoE blocks and the network has none: "
            "remove the callback or set model.network.moe_blocks"
        )
    return blocks


def for_checkpoint(*tensors: Tensor) -> list[Tensor]:
    """Copies of sums, over all processes: every process builds a checkpoint, one writes it."""
    copies = [tensor.clone() for tensor in tensors]
    sum_over_ranks(*copies)
    return copies


def from_checkpoint(*tensors: Tensor) -> list[Tensor]:
    """What this process goes on with: the first with all of the sums, the others with zeros."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return [tensor.clone() if rank == 0 else torch.zeros_like(tensor) for tensor in tensors]


def widest_float(device: torch.device | str) -> torch.dtype:
    """float64, for sums over many batches, where the device has it."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def disk_error(error: BaseException | None) -> OSError | None:
    """The system's refusal to write that an error comes from: no room, no permission; or None."""
    known = NO_ROOM + NOT_ALLOWED
    while error is not None:
        if isinstance(error, OSError) and error.errno in known:
            return error
        known = NO_ROOM  # a library may have met the others on its way and gone on
        error = error.__cause__ or error.__context__
    return None


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
