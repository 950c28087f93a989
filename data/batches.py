"""Batches whose content depends on (seed, epoch, batch index) alone.

A loader that keeps no state needs none saved: a run resumed at (epoch, batch) sees the samples
and random draws that it would have seen uninterrupted, and so does a run on another number of
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

    def __init__(
        self,
        make_batch: Callable[[torch.Tensor, slice, torch.Generator], Any],
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        position: Callable[[], tuple[int, int]] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ):
        if batch_size < 1 or batch_size % world_size:
            raise DataError(
                f"batch_size={batch_size} must be a positive multiple of the number of processes, "
                f"{world_size}: it counts the samples of all processes together"
            )
        if drop_last and num_samples < batch_size:
            raise DataError(
                f"batch_size={batch_size} is larger than the dataset of {num_samples} samples: "
                f"set it to {num_samples // world_size * world_size} or less"
            )
        if num_samples < world_size:
            raise DataError(
                f"the dataset has {num_samples} samples for {world_size} processes: "
                f"use fewer devices or more data"
            )
        if seed < 0:
            raise DataError(f"seed={seed} must not be negative")
        self._make_batch = make_batch
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._position = position
        self._rank = rank
        self._world_size = world_size
        self._next_epoch = 0

    def __len__(self) -> int:
        """Number of batches in an epoch, the same on every process."""
        full, rest = divmod(self._num_samples, self._batch_size)
        if self._drop_last:
            return full
        # A rest too small to give every process a sample joins the batch before it.
        return full + (rest >= self._world_size or (rest > 0 and full == 0))

    def __iter__(self) -> Iterator[Any]:
        if self._position is None:
            epoch, first = self._next_epoch, 0
            self._next_epoch += 1
        else:
            epoch, first = self._position()
        order = self._order(epoch)
        for batch in range(first, len(self)):
            indices = order[self._span(batch)]
            generator = seeded_generator(_BATCH, self._seed, epoch, batch)
            yield self._make_batch(indices, self._share(len(indices)), generator)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position is the trainer's. Tells Lightning that resuming is exact."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept what `state_dict` returned."""

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._num_samples)
        generator = seeded_generator(_ORDER, self._seed, epoch)
        return torch.randperm(self._num_samples, generator=generator)

    def _span(self, batch: int) -> slice:
        start = batch * self._batch_size
        is_rest = batch == len(self) - 1 and not self._drop_last
        return slice(start, self._num_samples if is_rest else start + self._batch_size)

    def _share(self, size: int) -> slice:
        """This process's part of a batch of `size` samples."""
        return slice(
            self._rank * size // self._world_size, (self._rank + 1) * size // self._world_size
        )
