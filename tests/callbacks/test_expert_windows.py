"""Which batches a window holds and when its decision falls, seen from a real training run.

Every expert of these blocks is used and every slot is taken, so that each window ends with one
refusal. Batch i holds 4 * 2**i tokens: the token count of the event tells which batches counted.
"""

import math

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from callbacks import AdaptiveExperts
from tests.callbacks.callback_support import (
    At,
    Endless,
    Recorder,
    Toy,
    digits,
    fit,
    make_trainer,
    tokens,
    toy_block,
    vision_task,
)


def full_block():
    return toy_block(num_experts=3, slots=3)


def batches(count: int) -> list[torch.Tensor]:
    return [tokens("0127" * 2**i) for i in range(count)]


def recorded(event: dict) -> list[int]:
    """The batches that a window counted."""
    count = event["tokens"] // 4
    assert event["unrouted_tokens"] == count and event["reason"] == "no birth: no free slot"
    return [i for i in range(count.bit_length()) if count >> i & 1]


def windows(adaptive: AdaptiveExperts) -> list[tuple[int, int, list[int]]]:
    return [(e["epoch"], e["step"], recorded(e)) for e in adaptive.events]


@pytest.mark.parametrize(
    ("count", "options", "expected"),
    [
        (9, {}, (6, [3, 4, 5])),
        (10, {}, (6, [3, 4, 5])),
        (3, {}, (2, [1])),
        (2, {}, (1, [0])),
        (1, {}, (1, [0])),
        (9, {"limit_train_batches": 6}, (4, [2, 3])),
        (9, {"limit_train_batches": 2}, (1, [0])),
        (9, {"limit_train_batches": 1}, (1, [0])),
        (10, {"limit_train_batches": 0.6}, (4, [2, 3])),
        # Snapped outwards to whole optimizer steps.
        (9, {"accumulate_grad_batches": 2}, (3, [2, 3, 4, 5])),
        (10, {"accumulate_grad_batches": 4}, (2, [0, 1, 2, 3, 4, 5, 6, 7])),
        (8, {"accumulate_grad_batches": 3}, (2, [0, 1, 2, 3, 4, 5])),
        # The last step of an epoch may hold fewer micro-batches.
        (5, {"accumulate_grad_batches": 4, "limit_train_batches": 3}, (1, [0, 1, 2])),
    ],
)
def test_window_by_fractions_of_an_epoch(tmp_path, count, options, expected):
    """A third to two thirds of the batches that an epoch really has; one decision at the end."""
    adaptive = AdaptiveExperts()
    fit(tmp_path, Toy(full_block()), batches(count), adaptive, **options)
    assert windows(adaptive) == [(0, *expected)]


@pytest.mark.parametrize(
    ("window", "accumulate", "expected"),
    [
        ((0.0, 1.0), 1, (6, [0, 1, 2, 3, 4, 5])),
        ((0.5, 1.0), 1, (6, [3, 4, 5])),
        ((0.9, 1.0), 4, (2, [4, 5])),
        ((0.0, 0.01), 1, (1, [0])),
    ],
)
def test_other_fractions(tmp_path, window, accumulate, expected):
    adaptive = AdaptiveExperts(window=window)
    options = {"accumulate_grad_batches": accumulate}
    fit(tmp_path, Toy(full_block()), batches(6), adaptive, **options)
    assert windows(adaptive) == [(0, *expected)]


def test_window_by_steps(tmp_path):
    """[1, 3, 4]: the second and third step of every four, across the borders of epochs."""
    adaptive = AdaptiveExperts(window_steps=(1, 3, 4))
    fit(tmp_path, Toy(full_block()), batches(5), adaptive, max_epochs=2)
    # Steps 0 to 9 see the batches 0 1 2 3 4 0 1 2 3 4.
    assert windows(adaptive) == [(0, 3, [1, 2]), (1, 7, [0, 1])]


def test_window_by_steps_counts_steps_and_not_batches(tmp_path):
    adaptive = AdaptiveExperts(window_steps=(1, 2, 3))
    options = {"accumulate_grad_batches": 2}
    fit(tmp_path, Toy(full_block()), batches(10), adaptive, **options)
    assert windows(adaptive) == [(0, 2, [2, 3]), (0, 5, [8, 9])]


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"every_n_epochs": 2}, [0, 2, 4]),
        ({"first_epoch": 1, "every_n_epochs": 3}, [1, 4]),
        ({"first_epoch": 2, "last_epoch": 3}, [2, 3]),
        ({"last_epoch": 0}, [0]),
    ],
)
def test_epochs_with_a_window(tmp_path, options, epochs):
    adaptive = AdaptiveExperts(**options)
    fit(tmp_path, Toy(full_block()), batches(3), adaptive, max_epochs=5)
    assert [event["epoch"] for event in adaptive.events] == epochs


def test_a_window_that_its_epoch_cuts_off_is_dropped(tmp_path):
    """Steps 1 to 3 of every 4, in every other epoch of 3 batches: records do not grow old."""
    adaptive = AdaptiveExperts(window_steps=(1, 4, 4), every_n_epochs=2)
    fit(tmp_path, Toy(full_block()), batches(3), adaptive, max_epochs=5)
    # Epochs 0, 2, 4 hold the steps 0-2, 6-8 and 12-14; the window of 5-7 ends within epoch 2.
    assert windows(adaptive) == [(2, 8, [0, 1])]


def test_validation_and_sanity_batches_are_not_recorded(tmp_path):
    """Validation falls into the window and before training, with batches of 4 * 4096 tokens."""
    adaptive = AdaptiveExperts()
    fit(
        tmp_path, Toy(full_block()), batches(9), adaptive, val=[tokens("0127" * 4096)],
        num_sanity_val_steps=2, val_check_interval=1,
    )  # fmt: skip
    assert windows(adaptive) == [(0, 6, [3, 4, 5])]


def test_validation_changes_no_expert(tmp_path):
    """A run with validation after every batch ends exactly like one without."""
    states = []
    for val in (None, [tokens("7777")]):
        torch.manual_seed(0)
        task = Toy(toy_block(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
        adaptive = AdaptiveExperts()
        given = [tokens("0011"), tokens("0122"), tokens("0156")]
        options = {"val_check_interval": 1} if val else {}
        fit(tmp_path, task, given, adaptive, val=val, max_epochs=3, **options)
        states.append(task.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_loader_of_unknown_length_is_refused(tmp_path):
    """No epoch, no fraction of it: the error says what to set."""
    trainer = make_trainer(tmp_path, AdaptiveExperts(), max_steps=3, max_epochs=-1)
    stream = torch.utils.data.DataLoader(Endless(batches(1)), batch_size=None)
    with pytest.raises(MisconfigurationException, match="no known length: set window_steps"):
        trainer.fit(Toy(full_block()), stream)


def test_a_loader_of_unknown_length_with_a_window_by_steps(tmp_path):
    adaptive = AdaptiveExperts(window_steps=(1, 3, 4))
    trainer = make_trainer(tmp_path, adaptive, max_steps=7, max_epochs=-1)
    stream = torch.utils.data.DataLoader(Endless(batches(5)), batch_size=None)
    trainer.fit(Toy(full_block()), stream)
    assert windows(adaptive) == [(0, 3, [1, 2]), (0, 7, [0, 1])]


def test_one_decision_for_each_layer(tmp_path):
    """Two layers over the same tokens decide apart: one loses an expert where the other gains."""
    first, second = toy_block(num_experts=3), toy_block(num_experts=4)
    adaptive = AdaptiveExperts(window=(0.0, 1.0))
    fit(tmp_path, Toy(first, second), [tokens("0013"), tokens("1123")], adaptive)
    told = [(e["layer"], e["event"], e["slot"], e["step"]) for e in adaptive.events]
    assert told == [("blocks.0", "birth", 3, 2)]
    assert first.active_slots() == [0, 1, 2, 3] and second.active_slots() == [0, 1, 2, 3]

    first, second = toy_block(num_experts=3), toy_block(num_experts=4)
    adaptive = AdaptiveExperts(window=(0.0, 1.0))
    fit(tmp_path, Toy(first, second), [tokens("0012"), tokens("1120")], adaptive, max_epochs=2)
    told = [(e["layer"], e["event"], e["slot"], e["step"]) for e in adaptive.events]
    assert told == [("blocks.1", "death", 3, 2)]
    assert second.active_slots() == [0, 1, 2]


def test_deaths_and_a_birth_in_one_window(tmp_path):
    """Known routing: experts 1 and 3 unused, expert 2 used once, two tokens without an expert."""
    block = toy_block(num_experts=4)
    adaptive = AdaptiveExperts(window=(0.0, 1.0))
    fit(tmp_path, Toy(block), [tokens("0007"), tokens("0020"), tokens("0076")], adaptive)
    told = [
        (e["event"], e["slot"], e["expert_tokens"], e["tokens"], e["unrouted_tokens"])
        for e in adaptive.events
    ]
    assert told == [("death", 1, 0, 12, 3), ("death", 3, 0, 12, 3), ("birth", 1, 0, 12, 3)]
    assert [e["active_experts"] for e in adaptive.events] == [3, 2, 3]
    assert block.active_slots() == [0, 1, 2]


def test_use_outside_the_window_does_not_keep_an_expert(tmp_path):
    block = toy_block(num_experts=3)
    adaptive = AdaptiveExperts()
    fit(tmp_path, Toy(block), [tokens("012"), tokens("001"), tokens("012")], adaptive)
    assert [(e["event"], e["slot"]) for e in adaptive.events] == [("death", 2)]


def test_an_expert_born_in_a_window_starts_a_fresh_record(tmp_path):
    """The next window counts the newborn from zero, and it is used: its tokens now find it."""
    block = toy_block(num_experts=3)
    adaptive = AdaptiveExperts()
    fit(tmp_path, Toy(block), [tokens("01277")] * 3, adaptive, max_epochs=3)
    assert [(e["event"], e["epoch"]) for e in adaptive.events] == [("birth", 0)]


def test_smallest_shares_reach_the_decision(tmp_path):
    """3 of 20 tokens use expert 2 and 2 of 20 use none."""
    given = [tokens("01" * 7 + "2227" + "70")]
    for shares, expected in (
        ({}, [("birth", 3)]),
        ({"min_unrouted_fraction": 0.11}, []),
        ({"min_load_fraction": 0.16}, [("death", 2), ("birth", 2)]),
    ):
        adaptive = AdaptiveExperts(**shares)
        fit(tmp_path, Toy(toy_block()), given, adaptive)
        assert [(e["event"], e["slot"]) for e in adaptive.events] == expected


def test_the_new_vector_is_the_mean_direction_of_the_unrouted(tmp_path):
    """On a real network: R_S / ||R_S|| of the recorded inputs of the window, and threshold 0."""
    task, adaptive, recorder = vision_task(), AdaptiveExperts(), Recorder()
    with torch.no_grad():
        for block in task.blocks.values():
            block.router.threshold.fill_(0.3)
    born = {}

    def look(task):
        for event in adaptive.events:
            router = task.blocks[event["layer"]].router
            born[event["layer"]] = (
                event["slot"], router.weight[event["slot"]].detach().clone(),
                router.threshold[event["slot"]].item(),
            )  # fmt: skip

    trainer = make_trainer(
        tmp_path, recorder, adaptive, At({6: look}), limit_train_batches=9, limit_val_batches=0
    )
    trainer.fit(task, digits())
    assert {event["event"] for event in adaptive.events} == {"birth"} and len(born) == 2
    for layer, (_, vector, threshold) in born.items():
        sum_D = torch.zeros(16, dtype=torch.float64)
        for routings in recorder.train[3:6]:
            routing = routings[layer]
            for x, taken in zip(routing.features_TD, routing.mask_TE, strict=True):
                if not taken.any():
                    sum_D += x.double()
        assert vector.tolist() == pytest.approx((sum_D / sum_D.norm()).tolist(), abs=1e-6)
        assert math.isclose(float(vector.norm()), 1.0, rel_tol=1e-6)
        assert threshold == 0.0


def test_a_newborn_threshold_starts_at_zero_whatever_the_slot_had(tmp_path):
    block = toy_block()
    with torch.no_grad():
        block.router.threshold.fill_(0.1)
    fit(tmp_path, Toy(block), [tokens("0127")], AdaptiveExperts())
    assert block.router.threshold.tolist() == pytest.approx([0.1, 0.1, 0.1, 0.0, 0.1])
    assert torch.allclose(block.router.weight[3], tokens("7")[0] / tokens("7")[0].norm())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initialization": "best"}, "no strategy 'best'; there are last_removed, average"),
        ({"window": (0.7, 0.3)}, "two rising fractions"),
        ({"window": (0.0, 1.1)}, "two rising fractions"),
        ({"window_steps": (5, 5, 10)}, r"start < end <= period"),
        ({"window_steps": (5, 11, 10)}, r"start < end <= period"),
        ({"every_n_epochs": 0}, "at least 1, got 0"),
        ({"min_unrouted_fraction": 1.0}, "min_unrouted_fraction must lie in"),
        ({"min_load_fraction": -0.1}, "min_load_fraction must lie in"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveExperts(**options)
