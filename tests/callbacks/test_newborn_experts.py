"""What a new expert starts with: its weights, its optimizer state and its first steps."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from callbacks import AdaptiveExperts
from callbacks.methods.initialization import find_strategy
from tests.callbacks.callback_support import EXPERTS, At, Toy, fit, same, tokens, toy_block, weights

ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)


def mean(block, shares: dict[int, float]) -> dict[str, torch.Tensor]:
    """A weighted mean of experts, element by element in float64."""
    state, total = block.state_dict(), sum(shares.values())
    return {
        name: sum(state[name][slot].double() * (share / total) for slot, share in shares.items())
        for name in EXPERTS
    }


@pytest.mark.parametrize(
    ("initialization", "shares", "source"),
    [
        ("average", {0: 1, 1: 1, 2: 1}, "mean of slots 0 1 2"),
        ("weighted_average", {0: 5, 1: 1, 2: 2}, "weighted mean of slots 0 1 2"),
        ("most_activated", {0: 1}, "copy of slot 0"),
    ],
)
def test_weights_from_the_others(tmp_path, initialization, shares, source):
    """Expert 0 was taken by 5 tokens, 1 by one, 2 by two; 3 dies and has no part in it."""
    block = toy_block(num_experts=4)
    expected = mean(block, shares)
    adaptive = AdaptiveExperts(initialization, window=(0.0, 1.0))
    fit(tmp_path, Toy(block), [tokens("00007"), tokens("0122")], adaptive)
    death, birth = adaptive.events
    assert (death["event"], death["slot"]) == ("death", 3)
    assert (birth["event"], birth["slot"]) == ("birth", 3)
    assert (birth["initialization"], birth["source"]) == (initialization, source)
    for name, value in weights(block, 3).items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-7)


def test_equal_weights_where_no_token_took_any_expert(tmp_path):
    """R_E is 0 for the one expert that is left: its weights count once, not zero times."""
    block = toy_block(num_experts=2)
    adaptive = AdaptiveExperts("weighted_average", window=(0.0, 1.0))
    fit(tmp_path, Toy(block), [tokens("77")], adaptive)
    told = [(e["event"], e["slot"], e["reason"]) for e in adaptive.events]
    assert told == [
        ("death", 1, "no token took it"),
        ("refusal", 0, "the last expert is never removed"),
        ("birth", 1, "tokens took no expert"),
    ]
    assert same(weights(block, 1), weights(block, 0))


def test_most_activated_takes_the_lowest_slot_of_several(tmp_path):
    block = toy_block(num_experts=3)
    adaptive = AdaptiveExperts("most_activated")
    fit(tmp_path, Toy(block), [tokens("0112207")], adaptive)
    assert adaptive.events[0]["source"] == "copy of slot 0"
    assert same(weights(block, 3), weights(block, 0))


def test_random_weights_are_drawn_like_those_of_the_layer(tmp_path):
    """Another seed or layer gives others; the same seed the same; scale and biases as at start."""
    drawn = {}
    for run, seed in (("a", 0), ("b", 0), ("c", 1)):
        blocks = toy_block(), toy_block()
        for block in blocks:
            block.experts.scale_output(0.5)
        torch.rand(3)  # the global generator plays no part
        adaptive = AdaptiveExperts("random", seed=seed)
        fit(tmp_path / run, Toy(*blocks), [tokens("0127")], adaptive)
        assert [e["source"] for e in adaptive.events] == ["random", "random"]
        drawn[run] = [weights(block, 3) for block in blocks]
    assert same(drawn["a"], drawn["b"])
    assert not same(drawn["a"][0], drawn["a"][1]) and not same(drawn["a"], drawn["c"])
    several = [expert for run in ("a", "c") for expert in drawn[run]]
    for expert in several:
        assert not expert["experts.up_bias"].any() and not expert["experts.down_bias"].any()
    up = torch.cat([expert["experts.up"].flatten() for expert in several])
    down = torch.cat([expert["experts.down"].flatten() for expert in several])
    assert float(up.std()) == pytest.approx(0.02, rel=0.25)
    assert float(down.std()) == pytest.approx(0.01, rel=0.25)


def test_last_removed_comes_back_as_it_was_when_discarded(tmp_path):
    """50 AdamW steps with weight decay and leftover momentum lie between death and birth."""
    task, seen = Toy(toy_block(num_experts=3, slots=3), optimizer=ADAMW), {}
    block = task.blocks["blocks.0"]
    adaptive = AdaptiveExperts("last_removed", window_steps=(5, 10, 50))
    used, unused, homeless = tokens("0012"), tokens("0011"), tokens("0017")
    batches = [used] * 5 + [unused] * 5 + [homeless] * 51
    looks = {
        10: lambda task: seen.update(dead=weights(block, 2)),
        59: lambda task: seen.update(moved=weights(block, 2)),
        60: lambda task: seen.update(born=weights(block, 2)),
    }
    fit(tmp_path, task, batches, adaptive, At(looks))
    assert [(e["event"], e["slot"], e["step"]) for e in adaptive.events] == [
        ("death", 2, 10), ("birth", 2, 60),
    ]  # fmt: skip
    assert adaptive.events[1]["source"] == "slot 2 removed at step 10"
    assert not same(seen["moved"], seen["dead"]), "the optimizer moved what lies in the slot"
    assert same(seen["born"], seen["dead"])


def test_a_slot_never_used_brings_its_own_initial_weights(tmp_path):
    """Though 50 AdamW steps with weight decay have moved what lies in the slot."""
    block = toy_block(num_experts=2, slots=4)
    start = weights(block, 2)
    seen = {}
    adaptive = AdaptiveExperts("last_removed", window_steps=(48, 50, 50))
    looks = {
        49: lambda task: seen.update(moved=weights(block, 2)),
        50: lambda task: seen.update(born=weights(block, 2)),
    }
    fit(tmp_path, Toy(block, optimizer=ADAMW), [tokens("0017")] * 51, adaptive, At(looks))
    assert [(e["event"], e["slot"], e["source"]) for e in adaptive.events] == [
        ("birth", 2, "own initial weights")
    ]
    assert not same(seen["moved"], start)
    assert same(seen["born"], start)


def test_discarded_experts_come_back_latest_first(tmp_path):
    """3 and then 1 and 2 in one window die; 2, 1, 3 come back, then the slot never used, 4."""
    block, seen = toy_block(num_experts=4, slots=5), {}
    start = {slot: weights(block, slot) for slot in range(5)}
    adaptive = AdaptiveExperts("last_removed", window_steps=(0, 1, 1))
    batches = [tokens(text) for text in ("012", "0", "05", "056", "0567", "05674", "05674")]

    def spoil(task):  # what lies in the empty slots is nobody's business
        with torch.no_grad():
            for parameter in block.experts.parameters():
                parameter[1:] = 7.0
        seen["at"] = task.trainer.global_step

    fit(tmp_path, Toy(block), batches, adaptive, At({2: spoil}))
    told = [(e["event"], e["slot"], e["step"]) for e in adaptive.events]
    assert told == [
        ("death", 3, 1), ("death", 1, 2), ("death", 2, 2),
        ("birth", 2, 3), ("birth", 1, 4), ("birth", 3, 5), ("birth", 4, 6),
    ]  # fmt: skip
    assert seen == {"at": 2}
    assert [e["source"] for e in adaptive.events[3:]] == [
        "slot 2 removed at step 2", "slot 1 removed at step 2", "slot 3 removed at step 1",
        "own initial weights",
    ]  # fmt: skip
    assert all(same(weights(block, slot), start[slot]) for slot in range(1, 5))


def test_an_expert_discarded_twice_comes_back_as_at_the_second_time(tmp_path):
    block = toy_block(num_experts=2, slots=2)
    adaptive = AdaptiveExperts("last_removed", window_steps=(0, 1, 1))
    second = {}

    def change(task):
        with torch.no_grad():
            for parameter in block.experts.parameters():
                parameter[1] += 1.0
        second.update(weights(block, 1))

    batches = [tokens(text) for text in ("0", "05", "0", "06")]
    fit(tmp_path, Toy(block), batches, adaptive, At({2: change}))
    assert [(e["event"], e["slot"]) for e in adaptive.events] == [
        ("death", 1), ("birth", 1), ("death", 1), ("birth", 1),
    ]  # fmt: skip
    assert same(weights(block, 1), second)


# ---------------------------------------------------------------------- the optimizer

LR, DECAY = 1e-3, 0.1
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=LR, weight_decay=DECAY),
    "adamw foreach": partial(torch.optim.AdamW, lr=LR, weight_decay=DECAY, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, lr=LR, weight_decay=DECAY, fused=True),
    "adamw amsgrad": partial(torch.optim.AdamW, lr=LR, weight_decay=DECAY, amsgrad=True),
    "nadam": partial(torch.optim.NAdam, lr=LR, weight_decay=DECAY, decoupled_weight_decay=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=LR),
}
AIMED = ("router.weight", "router.threshold")


def first_step(tmp_path, optimizer, scale, waits=0, losses=None):
    """A slot that is used, dies and is born again late in a run, around its first step.

    Args:
        scale: of the loss after the birth: the newborn's gradients are out of proportion.
        waits: batches after the birth that do not use the newborn.

    Returns:
        {name: (before, after, gradient)}, rows of the slot around the first step that uses it.
    """
    block, seen = toy_block(num_experts=2, slots=3), {}
    task = Toy(block, optimizer=optimizer, losses=losses)
    adaptive = AdaptiveExperts("average", window_steps=(20, 25, 100))
    batches = [tokens("0011")] * 20 + [tokens("0007")] * 5
    batches += [tokens("0000")] * waits + [tokens("0077")] * 2
    born = 25

    def rows():
        own = {name: p for name, p in block.named_parameters() if len(p) == block.slots}
        return {name: p[1].detach().clone() for name, p in own.items()}

    def before(task):
        seen["before"] = rows()

    def after(task):
        seen["after"] = rows()
        seen["grad"] = {
            name: p.grad[1].clone() for name, p in block.named_parameters() if name in seen["after"]
        }

    def louder(task):
        assert block.active_slots() == [0, 1]
        task.loss_scale = scale
        for state in task.trainer.optimizers[0].state.values():
            if "step" in state:  # late in a run, where bias correction no longer damps
                state["step"].fill_(5000.0)
            if "mu_product" in state:
                state["mu_product"].fill_(0.0)

    actions = {born: louder}
    if waits:
        actions[born + waits] = before
    else:
        actions[born] = lambda task: (louder(task), before(task))
    actions[born + waits + 1] = after
    fit(tmp_path, task, batches, adaptive, At(actions))
    assert [(e["event"], e["slot"], e["step"]) for e in adaptive.events] == [
        ("death", 1, 25), ("birth", 1, 25),
    ]  # fmt: skip
    assert seen["grad"]["experts.up"].abs().max() > 0
    return {name: (seen["before"][name], seen["after"][name], seen["grad"][name])
            for name in seen["before"]}  # fmt: skip


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_no_element_moves_by_more_than_the_learning_rate(tmp_path, name, scale):
    """In the newborn's first step, however its gradients compare with those before."""
    for key, (before, after, _) in first_step(tmp_path, OPTIMIZERS[name], scale).items():
        decayed = DECAY if key in ("experts.up", "experts.down") else 0.0
        limit = LR * (1 + decayed * before.abs())
        assert ((after - before).abs() <= limit * (1 + 1e-3) + 1e-7).all(), key


@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
@pytest.mark.parametrize("waits", [1, 5])
def test_nor_if_its_first_tokens_come_later(tmp_path, name, waits):
    """An auxiliary loss moves its routing vector meanwhile; its weights have no gradient yet."""
    moved = first_step(tmp_path, OPTIMIZERS[name], 1e4, waits, losses={"topany": 1e-2})
    for key, (before, after, _) in moved.items():
        decayed = DECAY if key in ("experts.up", "experts.down") else 0.0
        limit = LR * (1 + decayed * before.abs())
        assert ((after - before).abs() <= limit * (1 + 1e-3) + 1e-7).all(), key


def test_a_step_that_overflows_is_not_the_first(tmp_path):
    """Under a loss scaler infinite gradients are skipped: they must not reach the state."""
    block = toy_block(num_experts=2, slots=3)
    adaptive = AdaptiveExperts("average", window_steps=(2, 4, 100))
    task = Toy(block, optimizer=OPTIMIZERS["adamw"])
    trainer = fit(tmp_path, task, [tokens("0011")] * 2 + [tokens("0017")] * 2, adaptive)
    assert adaptive.newborn == [("blocks.0", 2)]
    optimizer = trainer.optimizers[0]
    for parameter in block.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    adaptive.on_before_optimizer_step(trainer, task, optimizer)
    assert adaptive.newborn == [("blocks.0", 2)]
    for state in optimizer.state.values():
        assert state["exp_avg_sq"].isfinite().all()
    for parameter in block.parameters():
        parameter.grad = torch.ones_like(parameter)
    adaptive.on_before_optimizer_step(trainer, task, optimizer)
    assert adaptive.newborn == []
    assert (optimizer.state[block.experts.up]["exp_avg_sq"][2] >= 1).all()


@pytest.mark.parametrize("foreach", [False, True])
def test_momentum_of_the_dead_expert_is_gone(tmp_path, foreach):
    """SGD with momentum 0.9: the first step is exactly -lr times the gradient."""
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=foreach)
    for key, (before, after, gradient) in first_step(tmp_path, optimizer, 1.0).items():
        torch.testing.assert_close(after, before - 0.01 * gradient, rtol=1e-6, atol=1e-7, msg=key)


def test_a_newborn_that_waits_does_not_drift(tmp_path):
    """Without decay, gradient and momentum nothing moves until the first token comes."""
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    block = toy_block(num_experts=2, slots=3)
    adaptive = AdaptiveExperts("average", window_steps=(2, 4, 100))
    seen = {}
    looks = {4: lambda task: seen.update(born=weights(block, 1))}
    batches = [tokens("0011")] * 2 + [tokens("0007")] * 2 + [tokens("0000")] * 4
    fit(tmp_path, Toy(block, optimizer=optimizer), batches, adaptive, At(looks))
    assert same(weights(block, 1), seen["born"])


@pytest.mark.parametrize("name", ["adamw amsgrad", "nadam", "rmsprop"])
def test_state_of_a_newborn(tmp_path, name):
    """Momentum 0; squared-gradient averages the mean of the other active experts'."""
    block = toy_block(num_experts=2, slots=3)
    adaptive = AdaptiveExperts("average", window_steps=(4, 6, 6))
    task = Toy(block, optimizer=OPTIMIZERS[name])
    trainer = fit(tmp_path, task, [tokens("0011")] * 5 + [tokens("0017")], adaptive)
    assert block.active_slots() == [0, 1, 2]
    for parameter in block.parameters():
        for key, value in trainer.optimizers[0].state[parameter].items():
            if value.shape == parameter.shape and key == "exp_avg":
                assert value[:2].any() and not value[2].any()
            elif value.shape == parameter.shape:
                assert key in ("exp_avg_sq", "max_exp_avg_sq", "square_avg") and value[2].any()
                torch.testing.assert_close(value[2], (value[0] + value[1]) / 2)


@pytest.mark.parametrize("name", ["adamw", "nadam", "rmsprop"])
def test_the_other_experts_keep_their_state(tmp_path, name):
    """A birth in slot 3 leaves the optimizer state and the weights of all other slots alone."""
    states = []
    for births in (False, True):
        torch.manual_seed(1)
        task = Toy(toy_block(), optimizer=OPTIMIZERS[name])
        window = (9, 10, 10) if births else (10, 11, 11)
        trainer = fit(
            tmp_path / str(births), task, [tokens("01270")] * 10,
            AdaptiveExperts("average", window_steps=window),
        )  # fmt: skip
        block = task.blocks["blocks.0"]
        assert block.active_E[3] == births
        optimizer = trainer.optimizers[0]
        states.append(
            {
                (name, key): torch.cat([value[:3], value[4:]])
                for name, p in block.named_parameters()
                for key, value in (("weight", p.detach()), *optimizer.state[p].items())
                if getattr(value, "shape", None) == p.shape
            }
        )
    assert len(states[0]) > 10 and same(*states)


def test_a_newborn_computes_with_its_new_weights(tmp_path):
    """The output for its first token is that of the written weights, with gate 1."""
    block = toy_block(num_experts=2)
    fit(tmp_path, Toy(block), [tokens("0017")], AdaptiveExperts("average"))
    x = tokens("7")
    expert = weights(block, 2)
    up, up_bias, down, down_bias = (expert[name] for name in EXPERTS)
    expected = F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)
    torch.testing.assert_close(block.train()(x), expected)
    assert math.isclose(float(block.routing.gates_TE[0, 2].detach()), 1.0)


def zeros(birth):
    """A strategy of one's own, found by its import path."""
    weights = {name: 0 * p[0] for name, p in birth.block.experts.named_parameters()}
    return weights, "zeros"


def test_a_strategy_of_ones_own_and_none():
    assert find_strategy(f"{__name__}.zeros") is zeros
    for wrong, why in (("avrage", "no strategy"), (f"{__name__}.none", "no strategy"),
                       ("no_such_module.zeros", "No module named 'no_such_module'")):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            AdaptiveExperts(wrong)
