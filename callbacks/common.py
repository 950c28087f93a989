"""What several callbacks need."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from app.errors import causes
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


class RankSums:
    """Named sums over batches: kept on the device, one on each process, added up when taken.

    Args:
        sums: to begin with, by name.
    """

    def __init__(self, sums: Mapping[str, Sequence[Tensor]] | None = None) -> None:
        self._sums = {name: list(tensors) for name, tensors in (sums or {}).items()}

    def __bool__(self) -> bool:
        return bool(self._sums)

    def add(self, name: str, *values: Tensor) -> None:
        """Adds tensors to the sums of that name, the same number and shapes each time."""
        if name not in self._sums:
            self._sums[name] = [value.clone() for value in values]
            return
        for total, value in zip(self._sums[name], values, strict=True):
            total += value

    def take(self) -> dict[str, list[Tensor]]:
        """All sums over all processes, which have to ask together; begins anew."""
        taken, self._sums = self._sums, {}
        sum_over_ranks(*(each for own in taken.values() for each in own))
        return taken

    def clear(self) -> None:
        """Begins anew."""
        self._sums = {}

    def __getitem__(self, name: str) -> list[Tensor]:
        """This process's sums of a name."""
        return self._sums[name]

    def to(self, device: torch.device) -> None:
        """Goes on where the batches are; a checkpoint is read to the CPU."""
        wide = widest_float(device)
        for name, own in self._sums.items():
            self._sums[name] = [
                each.to(device, wide if each.dtype == torch.float64 else each.dtype) for each in own
            ]

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Copies over all processes: every process builds a checkpoint, one writes it."""
        copies = {name: [each.clone() for each in own] for name, own in self._sums.items()}
        sum_over_ranks(*(each for own in copies.values() for each in own))
        return copies

    def load_state_dict(self, state: Mapping[str, Tensor | Sequence[Tensor]]) -> None:
        """The first process goes on with all of the sums, the others with zeros."""
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        lists = {n: [own] if isinstance(own, Tensor) else own for n, own in state.items()}
        self._sums = {
            name: [each.clone() if rank == 0 else torch.zeros_like(each) for each in own]
            for name, own in lists.items()
        }


def widest_float(device: torch.device | str) -> torch.dtype:
    """float64, for sums over many batches, where the device has it."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def disk_error(error: BaseException | None) -> OSError | None:
    """The system's refusal to write that an error comes from: no room, no permission; or None."""
    known = NO_ROOM + NOT_ALLOWED
    for each in causes(error, hidden=True):
        if isinstance(each, OSError) and each.errno in known:
            return each
        known = NO_ROOM  # a library may have met the others on its way and gone on
    return None


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
