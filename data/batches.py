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

MakeBatch = Callable[[torch.Tensor, slice, torch.Generator, int], Any]


def seeded_generator(*key: int) -> torch.Generator:
    """Return a CPU generator that is a pure function of `key`, non-negative integers.

    The key is hashed, so that neighbouring keys (seed 1 epoch 0, seed 0 epoch 1) are unrelated.
    """
    seed = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(seed))


@dataclass(eq=False)
class BatchLoader:
    """A sized iterable of batches, to hand to Lightning in place of a DataLoader.

    With `drop_last`, samples that do not fill a batch sit out the epoch. Without, the last batch is
    shorter, and every batch is divided so that processes differ by one sample at most. Should the
    last batch hold fewer samples than there are processes, it is joined to the one before: every
    process has the same number of batches, none empty, and each sample is counted exactly once.

    Args:
        make_batch: Called with the dataset indices of the whole batch (int64, [B]), the slice of
            them that belongs to this process, a CPU generator and the epoch. It must draw what is
            random for all B samples and only then take the slice: then a trajectory does not depend
            on the number of processes.
        num_samples: Size of the dataset.
        batch_size: Samples in a batch over all processes together; in order, it is rounded up to a
            multiple of their number.
        shuffle: Whether each epoch has an order of its own.
        seed: Non-negative; with the epoch and batch index it determines all randomness.
        drop_last: Whether to leave out a last batch that is not full.
        trainer: A Lightning trainer, which knows the processes and, if `shuffle`, from which epoch
            and batch to go on. Without one, each iteration is the next epoch.

    Raises:
        DataError: If the batch size is not a positive multiple of the number of processes, or there
            are too few samples for one batch.
    """

    make_batch: MakeBatch
    num_samples: int
    batch_size: int
    _: KW_ONLY
    trainer: Any
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False

    def __post_init__(self) -> None:
        trainer = self.trainer
        self._rank, world = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        self._world_size, self._next_epoch = world, 0
        if not self.shuffle:
            self.batch_size = -(-self.batch_size // world) * world
        if self.batch_size < 1 or self.batch_size % world:
            raise DataError(
                f"batch_size={self.batch_size} must be a positive multiple of the number of "
                f"processes, {world}: it counts the samples of all processes together"
            )
        if self.drop_last and self.num_samples < self.batch_size:
            most = self.num_samples // world * world
            raise DataError(
                f"batch_size={self.batch_size} is larger than the dataset of {self.num_samples} "
                f"samples: set it to {most} or less"
            )
        if self.num_samples < world:
            raise DataError(
                f"the dataset has {self.num_samples} samples for {world} processes: "
                f"use fewer devices or more data"
            )
        if self.seed < 0:
            raise DataError(f"seed={self.seed} must not be negative")

    def __len__(self) -> int:
        """Number of batches in an epoch, the same on every process."""
        full, rest = divmod(self.num_samples, self.batch_size)
        if self.drop_last:
            return full
        # A rest too small to give every process a sample joins the batch before it.
        return full + (rest >= self._world_size or (rest > 0 and full == 0))

    def __iter__(self) -> Iterator[Any]:
        # Asked for the first batch only: a restarted trainer settles its counters before that.
        epoch, first = self._position()
        order = torch.arange(self.num_samples)
        if self.shuffle:
            generator = seeded_generator(_ORDER, self.seed, epoch)
            order = torch.randperm(self.num_samples, generator=generator)
        for batch in range(first, len(self)):
            start = batch * self.batch_size
            is_rest = batch == len(self) - 1 and not self.drop_last
            indices = order[start : None if is_rest else start + self.batch_size]
            share = (
                rank * len(indices) // self._world_size for rank in (self._rank, self._rank + 1)
            )
            generator = seeded_generator(_BATCH, self.seed, epoch, batch)
            yield self.make_batch(indices, slice(*share), generator, epoch)

    def _position(self) -> tuple[int, int]:
        """Epoch, and batch in it, to go on from."""
        if self.shuffle and self.trainer:
            progress = self.trainer.fit_loop.epoch_loop.batch_progress
            return self.trainer.current_epoch, progress.current.ready
        self._next_epoch += 1
        return self._next_epoch - 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position is the trainer's. Tells Lightning that resuming is exact."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept what `state_dict` returned."""
