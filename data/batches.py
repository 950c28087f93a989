"""Batches whose content depends on (seed, epoch, batch index) alone.

A loader that keeps no state needs none saved: a run resumed at (epoch, batch) sees the samples
and random draws that it would have seen uninterrupted, and so does a run on another number of
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch

from .errors import DataError

# Leading words that keep the two streams apart for equal (seed, epoch).
_ORDER, _BATCH = 1, 2


def seeded_generator(*key: int) -> torch.Generator:
    """Return a CPU generator that is a pure function of `key`, non-negative integers.

    The key is hashed, so that neighbouring keys (seed 1 epoch 0, seed 0 epoch 1) are unrelated.
    """
    seed = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed))


def trainer_position(trainer: Any) -> Callable[[], tuple[int, int]]:
    """Return a function that says which (epoch, batch) a Lightning trainer will train on next."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return lambda: (trainer.current_epoch, progress.current.ready)


def processes(trainer: Any) -> dict[str, int]:
    """Rank of this process and number of processes, as `BatchLoader` wants them."""
    if trainer is None:
        return {}
    return {"rank": trainer.global_rank, "world_size": trainer.world_size}


@dataclass(eq=False)
class BatchLoader:
    """A sized iterable of batches, to hand to Lightning in place of a DataLoader.

    With `drop_last`, samples that do not fill a batch sit out the epoch. Without, the last batch is
    shorter, and every batch is divided so that processes differ by one sample at most. Should the
    last batch hold fewer samples than there are processes, it is joined to the one before: every
    process has the same number of batches, none empty, and each sample is counted exactly once.

    Args:
        make_batch: Called with the dataset indices of the whole batch (int64, [B]), the slice of
            them that belongs to this process, and a CPU generator. It must draw what is random for
            all B samples and only then take the slice: then a trajectory does not depend on the
            number of processes.
        num_samples: Size of the dataset.
        batch_size: Samples in a batch over all processes together.
        shuffle: Whether each epoch has an order of its own.
        seed: Non-negative; with the epoch and batch index it determines all randomness.
        drop_last: Whether to leave out a last batch that is not full.
        position: Returns (epoch, first batch) to iterate from; asked when an iterator yields its
            first batch, the moment at which a restarted trainer has settled its counters. Without
            it, epochs are counted from 0, one for each iteration begun.
        rank: Index of this process.
        world_size: Number of processes that share each batch.

    Raises:
        DataError: If the batch size is not a positive multiple of `world_size`, or there are too
            few samples for one batch.
    """

    make_batch: Callable[[torch.Tensor, slice, torch.Generator], Any]
    num_samples: int
    batch_size: int
    _: KW_ONLY
    shuffle: bool
    seed: int
    drop_last: bool
    position: Callable[[], tuple[int, int]] | None = None
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.batch_size % self.world_size:
            raise DataError(
                f"batch_size={self.batch_size} must be a positive multiple of the number of "
                f"processes, {self.world_size}: it counts the samples of all processes together"
            )
        if self.drop_last and self.num_samples < self.batch_size:
            most = self.num_samples // self.world_size * self.world_size
            raise DataError(
                f"batch_size={self.batch_size} is larger than the dataset of {self.num_samples} "
                f"samples: set it to {most} or less"
            )
        if self.num_samples < self.world_size:
            raise DataError(
                f"the dataset has {self.num_samples} samples for {self.world_size} processes: "
                f"use fewer devices or more data"
            )
        if self.seed < 0:
            raise DataError(f"seed={self.seed} must not be negative")
        self._next_epoch = 0

    def __len__(self) -> int:
        """Number of batches in an epoch, the same on every process."""
        full, rest = divmod(self.num_samples, self.batch_size)
        if self.drop_last:
            return full
        # A rest too small to give every process a sample joins the batch before it.
        return full + (rest >= self.world_size or (rest > 0 and full == 0))

    def __iter__(self) -> Iterator[Any]:
        if self.position is None:
            epoch, first = self._next_epoch, 0
            self._next_epoch += 1
        else:
            epoch, first = self.position()
        order = self._order(epoch)
        for batch in range(first, len(self)):
            indices = order[self._span(batch)]
            generator = seeded_generator(_BATCH, self.seed, epoch, batch)
            yield self.make_batch(indices, self._share(len(indices)), generator)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position is the trainer's. Tells Lightning that resuming is exact."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept what `state_dict` returned."""

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = seeded_generator(_ORDER, self.seed, epoch)
        return torch.randperm(self.num_samples, generator=generator)

    def _span(self, batch: int) -> slice:
        start = batch * self.batch_size
        is_rest = batch == len(self) - 1 and not self.drop_last
        return slice(start, self.num_samples if is_rest else start + self.batch_size)

    def _share(self, size: int) -> slice:
        """This process's part of a batch of `size` samples."""
        return slice(self.rank * size // self.world_size, (self.rank + 1) * size // self.world_size)


def ordered_loader(
    make_batch: Callable[[torch.Tensor, slice, torch.Generator], Any],
    num_samples: int,
    batch_size: int,
    trainer: Any,
) -> BatchLoader:
    """All samples in order, for evaluation; `batch_size` is rounded up to suit the processes."""
    shares = processes(trainer)
    world_size = shares.get("world_size", 1)
    batch_size = -(-batch_size // world_size) * world_size
    return BatchLoader(
        make_batch, num_samples, batch_size, shuffle=False, seed=0, drop_last=False, **shares
    )
