"""Batches are a function of (seed, epoch, batch), however the run is cut or shared."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.batches import BatchLoader, seeded_generator
from data.errors import DataError


def draw(indices, local, generator, epoch):
    """A batch that shows its samples and its randomness."""
    noise = torch.rand(len(indices), generator=generator)
    return list(zip(indices[local].tolist(), noise[local], strict=True))


def trainer(epoch=0, batch=0, rank=0, world_size=1):
    """A stand-in for Lightning's, as far as a loader asks."""
    progress = SimpleNamespace(current=SimpleNamespace(ready=batch))
    return SimpleNamespace(
        current_epoch=epoch,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        global_rank=rank,
        world_size=world_size,
    )


def loader(n=23, batch_size=4, **options):
    options = {"shuffle": True, "seed": 3, "drop_last": True, "trainer": None} | options
    return BatchLoader(draw, n, batch_size, **options)


def test_equal_seed_gives_equal_epochs_and_each_epoch_differs():
    first, second = loader(), loader()
    epochs = [list(first), list(first)]
    assert epochs == [list(second), list(second)]
    assert epochs[0] != epochs[1]
    assert list(loader(seed=4)) != epochs[0]
    indices = [index for batch in epochs[0] for index, _ in batch]
    assert len(set(indices)) == 20 and indices != sorted(indices)


def test_random_numbers_differ_between_batches():
    values = [value.item() for batch in loader() for _, value in batch]
    assert len(set(values)) == len(values)


def test_starting_in_the_middle_equals_uninterrupted():
    whole = loader()
    epochs = [list(whole) for _ in range(3)]
    for epoch in range(3):
        for first in (0, 2, 5):
            assert list(loader(trainer=trainer(epoch, first))) == epochs[epoch][first:]


def test_position_is_asked_at_every_iteration():
    resumable = loader(trainer=trainer())
    first = list(resumable)
    assert list(resumable) == first
    batches = iter(resumable)
    resumable.trainer.current_epoch = 1
    assert list(batches) != first


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_share_one_global_batch(world_size):
    ranks = range(world_size)
    parts = [loader(trainer=trainer(rank=rank, world_size=world_size)) for rank in ranks]
    for together, *shares in zip(loader(), *parts, strict=True):
        assert [sample for share in shares for sample in share] == together
        assert {len(share) for share in shares} == {4 // world_size}


@given(
    world_size=st.integers(1, 8),
    factor=st.integers(1, 5),
    n=st.integers(1, 200),
    rounded=st.integers(0, 7),
)
def test_evaluation_counts_every_sample_once(world_size, factor, n, rounded):

    def share(rank):
        at = trainer(3, 1, rank, world_size)  # where training stands is nothing to evaluation
        size = factor * world_size - rounded % world_size
        return loader(n, size, shuffle=False, drop_last=False, trainer=at)

    if n < world_size:
        with pytest.raises(DataError, match="fewer devices"):
            share(0)
        return
    ranks = [share(rank) for rank in range(world_size)]
    assert {rank.batch_size for rank in ranks} == {factor * world_size}
    batches = [list(rank) for rank in ranks]
    assert [len(rank) for rank in ranks] == [len(rank) for rank in batches]
    seen = []
    for shares in zip(*batches, strict=True):
        sizes = [len(share) for share in shares]
        assert min(sizes) > 0 and max(sizes) - min(sizes) <= 1
        seen += [index for share in shares for index, _ in share]
    assert seen == list(range(n))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 5, "trainer": trainer(world_size=2)}, "batch_size=5"),
        ({"batch_size": 24}, "batch_size=24"),
        ({"n": 0, "drop_last": False}, "0 samples"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_impossible_settings_are_named(options, named):
    with pytest.raises(DataError, match=named):
        loader(**options)


def test_generators_of_neighbouring_keys_are_unrelated():
    keys = [(0, 1), (1, 0), (0, 1, 0), (1, 1), (1, 0, 5)]
    values = {torch.rand(1, generator=seeded_generator(1, *key)).item() for key in keys[:2]}
    values |= {torch.rand(1, generator=seeded_generator(2, *key)).item() for key in keys}
    assert len(values) >= 6  # (0, 1) and (0, 1, 0) may agree: a key's length is the caller's


def test_error_is_one_line():
    assert str(DataError("a file: \n  broken\n\nfix it\n")) == "a file: broken fix it"
