"""The decision at the end of a recording window, on numbers that can be checked by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.moe.routing import Routing
from callbacks.methods.birth_rule import Plan, WindowRecord, plan_window


def record(load: list[int], unrouted: int, tokens: int, direction=(1.0, 0.0)) -> WindowRecord:
    values = (load, [each * unrouted for each in direction], [unrouted, tokens])
    return WindowRecord(*(torch.tensor(each, dtype=torch.float64) for each in values))


def mask(text: str) -> torch.Tensor:
    return torch.tensor([each == "1" for each in text])


def test_unused_experts_go_and_one_comes():
    """Four active, two of them unused, ten tokens without an expert: exactly that happens."""
    plan = plan_window(record([30, 0, 7, 0, 0], unrouted=10, tokens=40), mask("11110"))
    assert plan == Plan(deaths=(1, 3), kept=None, birth=True, refusal=None)


def test_one_use_in_the_window_keeps_an_expert():
    plan = plan_window(record([99_999, 1, 0], unrouted=0, tokens=100_000), mask("111"))
    assert plan == Plan(deaths=(2,), kept=None, birth=False, refusal=None)


def test_one_token_without_an_expert_adds_one():
    plan = plan_window(record([99_999, 1], unrouted=1, tokens=100_000), mask("10"))
    assert plan.birth and not plan.deaths


def test_nothing_happens_where_all_are_used_and_all_are_routed():
    assert plan_window(record([5, 5, 0], 0, 8), mask("110")) == Plan((), None, False, None)


def test_an_inactive_slot_can_not_die():
    assert plan_window(record([5, 0, 0], 0, 5), mask("100")).deaths == ()


def test_the_last_expert_stays_and_that_is_told():
    plan = plan_window(record([0], unrouted=6, tokens=6), mask("1"))
    assert plan == Plan(deaths=(), kept=0, birth=False, refusal="no free slot")


def test_of_several_unused_the_lowest_slot_stays():
    plan = plan_window(record([0, 0, 0], unrouted=6, tokens=6), mask("011"))
    assert plan == Plan(deaths=(2,), kept=1, birth=True, refusal=None)


def test_of_several_too_little_used_the_most_used_stays():
    plan = plan_window(record([2, 9, 1], 0, 100), mask("111"), min_load_fraction=0.5)
    assert plan == Plan(deaths=(0, 2), kept=1, birth=False, refusal=None)


def test_no_free_slot():
    plan = plan_window(record([5, 5], unrouted=1, tokens=11), mask("11"))
    assert plan == Plan((), None, False, "no free slot")


def test_a_slot_that_dies_is_free_for_the_birth():
    plan = plan_window(record([5, 0], unrouted=1, tokens=6), mask("11"))
    assert plan == Plan((1,), None, True, None)


@pytest.mark.parametrize("direction", [(0.0, 0.0), (float("nan"), 0.0), (float("inf"), 0.0)])
def test_no_direction_no_birth(direction):
    """Inputs that cancel, or that are not finite, point nowhere."""
    plan = plan_window(record([5, 0], 4, 9, direction), mask("10"))
    assert not plan.birth
    assert "give no direction" in plan.refusal


def test_opposite_tokens_cancel_through_the_record():
    """R_S of x and -x, and of x, y and -(x + y), is refused; of x and y it is not."""
    x, y = torch.tensor([[0.3, -0.7]]), torch.tensor([[0.1, 0.9]])
    for features, births in (
        (torch.cat([x, -x]), False),
        (torch.cat([x, y, -(x + y)]), False),
        (torch.cat([x, y]), True),
    ):
        nobody = torch.zeros(len(features), 2, dtype=torch.bool)
        filled = WindowRecord.of(Routing(nobody, nobody.float(), mask("10"), features))
        filled.load_E[0] = 1
        assert filled.counts.tolist() == [len(features), len(features)]
        assert plan_window(filled, mask("10")).birth == births


def test_smallest_unrouted_share():
    """5 of 100 tokens: enough for a smallest share of 0.05, not for more."""
    for share, birth in ((0.0, True), (0.05, True), (0.0501, False)):
        plan = plan_window(record([95, 0], 5, 100), mask("10"), min_unrouted_fraction=share)
        assert plan == Plan((), None, birth, None)


def test_smallest_load_share():
    """5 of 100 tokens: enough to stay at a smallest share of 0.05, not at more."""
    for share, deaths in ((0.0, ()), (0.05, ()), (0.0501, (1,))):
        plan = plan_window(record([95, 5], 0, 100), mask("11"), min_load_fraction=share)
        assert plan.deaths == deaths


def test_a_window_without_tokens_decides_nothing():
    assert plan_window(record([0, 0], 0, 0), mask("11")) == Plan((), None, False, None)


@st.composite
def windows(draw):
    slots = draw(st.integers(1, 6))
    active = draw(st.lists(st.booleans(), min_size=slots, max_size=slots).filter(any))
    load = [draw(st.integers(0, 20)) if each else 0 for each in active]
    unrouted = draw(st.integers(0, 20))
    tokens = max(max(load) + unrouted, draw(st.integers(0, 60)))
    direction = draw(st.sampled_from([(1.0, 0.0), (-0.1, 2.0), (0.0, 0.0)]))
    return record(load, unrouted, tokens, direction), torch.tensor(active)


@settings(max_examples=300, deadline=None)
@given(windows(), st.sampled_from([0.0, 0.1, 0.9]), st.sampled_from([0.0, 0.1, 0.9]))
def test_properties_of_every_plan(window, min_unrouted, min_load):
    """Someone is always left; only active ones die; a birth has a slot, a cause and a direction."""
    filled, active_E = window
    plan = plan_window(filled, active_E, min_unrouted, min_load)
    active = active_E.nonzero().flatten().tolist()
    left = len(active) - len(plan.deaths)
    unrouted, total = filled.counts.tolist()
    assert left >= 1
    assert set(plan.deaths) <= set(active) and list(plan.deaths) == sorted(set(plan.deaths))
    assert plan.kept is None or (plan.kept in active and left == 1)
    assert not (plan.birth and plan.refusal)
    if plan.birth:
        assert left < len(active_E) and unrouted and float(filled.unrouted_D.norm()) > 0
    if not min_load:
        assert all(filled.load_E[slot] == 0 for slot in plan.deaths)
        stays = [slot for slot in active if slot not in plan.deaths]
        if total:
            assert all(filled.load_E[slot] > 0 or slot == plan.kept for slot in stays)
    if total and unrouted and not min_unrouted:
        assert plan.birth or plan.refusal
