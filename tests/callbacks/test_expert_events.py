"""How births, deaths and refusals are told: the table file, TensorBoard and the screen."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from app.moe import Dense, Ternary
from callbacks import AdaptiveExperts
from callbacks.methods.expert_events import COLUMNS
from tests.callbacks.callback_support import (
    Toy,
    fit,
    read_rows,
    read_scalars,
    read_texts,
    tokens,
    toy_block,
)

# A window of two batches each; slots 0 to 2, of which 0 and 1 are active.
WINDOWS = [("0001", "0007"), ("0000", "0077"), ("0077", "0006"), ("0710", "0056")]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Slot 2 is born, 1 dies, 1 is born again, and two tokens find no free slot."""
    folder = tmp_path_factory.mktemp("events")
    batches = [tokens(text) for pair in WINDOWS for text in pair]
    adaptive = AdaptiveExperts("most_activated", window_steps=(0, 2, 2))
    block = toy_block(num_experts=2, slots=3)
    fit(folder, Toy(block), batches, adaptive)
    return folder / "log"


TOLD = [
    ("2", "birth", "2", "tokens took no expert", "8", "0", "1", "3", "copy of slot 0"),
    ("4", "death", "1", "no token took it", "8", "0", "0", "2", ""),
    ("6", "birth", "1", "tokens took no expert", "8", "0", "1", "3", "copy of slot 0"),
    ("8", "refusal", "", "no birth: no free slot", "8", "", "2", "3", ""),
]


def test_table_of_events(run):
    """One row an event, with step, slot, reason, token counts, initialisation and source."""
    rows = read_rows(run / "expert_events.csv")
    assert list(rows[0]) == list(COLUMNS)
    keys = (
        "step", "event", "slot", "reason", "tokens", "expert_tokens", "unrouted_tokens",
        "active_experts", "source",
    )  # fmt: skip
    assert [tuple(row[key] for key in keys) for row in rows] == TOLD
    for row in rows:
        assert row["layer"] == "blocks.0"
        assert row["initialization"] == ("most_activated" if row["event"] == "birth" else "")
        assert row["epoch"] == "0"


def test_a_refusal_is_told(tmp_path):
    """With all slots taken, and with one expert left."""
    full = AdaptiveExperts()
    fit(tmp_path / "full", Toy(toy_block(slots=3)), [tokens("0127")], full)
    [row] = read_rows(tmp_path / "full" / "log" / "expert_events.csv")
    assert row == {
        "step": "1", "epoch": "0", "layer": "blocks.0", "event": "refusal", "slot": "",
        "reason": "no birth: no free slot", "tokens": "4", "expert_tokens": "",
        "unrouted_tokens": "1", "active_experts": "3", "initialization": "", "source": "",
    }  # fmt: skip
    last = AdaptiveExperts()
    fit(tmp_path / "last", Toy(toy_block(num_experts=1)), [tokens("77")], last)
    rows = read_rows(tmp_path / "last" / "log" / "expert_events.csv")
    assert [(r["event"], r["slot"], r["reason"]) for r in rows] == [
        ("refusal", "0", "the last expert is never removed"),
        ("birth", "1", "tokens took no expert"),
    ]


def test_opposite_tokens_give_no_direction(tmp_path):
    """R_S that cancels to zero: no birth, and the table says why."""
    block = toy_block()
    opposite = torch.tensor([[0.0] * 7 + [1.0], [0.0] * 7 + [-1.0]])  # across all experts
    adaptive = AdaptiveExperts(window=(0.0, 1.0))
    fit(tmp_path, Toy(block), [tokens("012"), opposite], adaptive)
    [row] = read_rows(tmp_path / "log" / "expert_events.csv")
    assert row["event"] == "refusal" and row["unrouted_tokens"] == "2"
    assert row["reason"].endswith("cancel to zero and give no direction")
    assert block.active_slots() == [0, 1, 2]


def test_tensorboard(run):
    """Running counts and the active experts after each window with an event; a text for each."""
    scalars = read_scalars(run)
    counts = {kind: scalars[f"experts/blocks.0/{kind}s"] for kind in ("birth", "death", "refusal")}
    assert counts["birth"] == [(2, 1), (4, 1), (6, 2), (8, 2)]
    assert counts["death"] == [(2, 0), (4, 1), (6, 1), (8, 1)]
    assert counts["refusal"] == [(2, 0), (4, 0), (6, 0), (8, 1)]
    assert scalars["experts/blocks.0/active"] == [(2, 3), (4, 2), (6, 3), (8, 3)]
    texts = read_texts(run)["experts/blocks.0"]
    assert texts == [
        (2, "step 2: birth of slot 2: tokens took no expert, copy of slot 0"),
        (4, "step 4: death of slot 1: no token took it"),
        (6, "step 6: birth of slot 1: tokens took no expert, copy of slot 0"),
        (8, "step 8: refusal: no birth: no free slot"),
    ]


def test_refusal_in_tensorboard(tmp_path):
    fit(tmp_path, Toy(toy_block(slots=3)), [tokens("0127")] * 3, AdaptiveExperts(), max_epochs=2)
    scalars = read_scalars(tmp_path / "log")
    assert scalars["experts/blocks.0/refusals"] == [(2, 1), (5, 2)]
    assert read_texts(tmp_path / "log")["experts/blocks.0"][0] == (
        2, "step 2: refusal: no birth: no free slot",
    )  # fmt: skip


def test_a_table_is_printed_at_the_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    adaptive = AdaptiveExperts()
    blocks = toy_block(num_experts=4), toy_block()
    fit(tmp_path, Toy(*blocks), [tokens("0012")], adaptive)
    printed = capsys.readouterr().out.splitlines()
    [quiet] = [line for line in printed if "blocks.1" in line]
    [line] = [line for line in printed if "blocks.0" in line]
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    last = "step 1: death of slot 3: no token took it"
    assert cells == ["blocks.0", "4", "0", "1", "0", "3", last]
    assert [cell.strip() for cell in quiet.strip("│ ").split("│")][1:] == [
        "3", "0", "0", "0", "3", "-",
    ]  # fmt: skip
    assert any("births" in line and "deaths" in line and "refusals" in line for line in printed)


def test_without_a_logger_training_goes_on(tmp_path):
    adaptive = AdaptiveExperts()
    fit(tmp_path, Toy(toy_block()), [tokens("0127")], adaptive, logger=False)
    assert len(adaptive.events) == 1


@pytest.mark.parametrize("router", [Dense, Ternary])
def test_routers_without_a_vector_for_each_expert_are_refused(tmp_path, router):
    with pytest.raises(MisconfigurationException) as error:
        fit(tmp_path, Toy(toy_block(router)), [tokens("0")], AdaptiveExperts())
    message = str(error.value)
    assert f"the router {router.__name__} of blocks.0: " in message and "\n" not in message


def test_a_network_without_experts_is_refused(tmp_path):
    task = Toy()
    task.network.blocks.append(nn.Linear(8, 8))
    with pytest.raises(MisconfigurationException, match="AdaptiveExperts works on MoE blocks"):
        fit(tmp_path, task, [tokens("0")], AdaptiveExperts())
