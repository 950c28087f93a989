"""A reused slot: nothing of the dead expert stays in the optimizer, and the others don't notice."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

from app.moe import MoEBlock, SwiGLUExperts, Ternary, TopAny, TopK
from app.moe.slots import (
    bound_first_step,
    forget_slot,
    read_expert,
    slot_parameters,
    write_expert,
)

from .cases import DIM, HIDDEN, SLOTS, make_block, randomize

LR, DECAY, SLOT, STEPS = 0.01, 0.1, 2, 60
BOUNDED = {
    "adamw": AdamW,
    "adamw-foreach": partial(AdamW, foreach=True),
    "adamw-single": partial(AdamW, foreach=False),
    "adamw-fused": partial(AdamW, fused=True),
    "adamw-amsgrad": partial(AdamW, amsgrad=True),
    "adamw-amsgrad-fused": partial(AdamW, amsgrad=True, fused=True),
    "adamw-betas": partial(AdamW, betas=(0.8, 0.99)),
    "adam": partial(Adam, weight_decay=0.0),
    "nadam": partial(NAdam, decoupled_weight_decay=True),
    "nadam-foreach": partial(NAdam, decoupled_weight_decay=True, foreach=True),
    "adam-l2": Adam,
    "nadam-l2": NAdam,
    "rmsprop-l2": RMSprop,
    "rmsprop": partial(RMSprop, weight_decay=0.0),
    "rmsprop-momentum": partial(RMSprop, momentum=0.9, weight_decay=0.0, foreach=True),
}
MOMENTUM = {
    "sgd": partial(SGD, momentum=0.9),
    "sgd-nesterov": partial(SGD, momentum=0.9, nesterov=True),
    "sgd-foreach": partial(SGD, momentum=0.9, foreach=True),
    "sgd-fused": partial(SGD, momentum=0.9, fused=True),
}
EVERY = BOUNDED | MOMENTUM
PLAIN = ("adam", "rmsprop", "rmsprop-momentum")  # used without weight decay


def fresh_block(router=TopAny, seed: int = 0, **options) -> MoEBlock:
    return make_block(router, seed, active=[0, 2, 3, 5], double=False, **options)


def parameter_groups(block: MoEBlock, decay: bool) -> list[dict]:
    """Weight decay on expert matrices only, as a task would have it: two groups."""
    matrices = [p for p in block.experts.parameters() if p.ndim == 3]
    rest = [p for p in block.parameters() if all(p is not m for m in matrices)]
    if not decay:
        return [{"params": matrices}, {"params": rest}]
    return [
        {"params": matrices, "weight_decay": DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]


def make_optimizer(name: str, block: MoEBlock) -> Optimizer:
    return EVERY[name](parameter_groups(block, name not in PLAIN), lr=LR)


def set_gradients(block: MoEBlock, step: int, scale: float = 1.0) -> None:
    """Gradients of a known, reproducible size, a tenth of them zero."""
    generator = torch.Generator().manual_seed(step)
    for parameter in block.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
        parameter.grad[torch.rand(parameter.shape, generator=generator) < 0.1] = 0.0


def train(block: MoEBlock, optimizer: Optimizer, steps: int = STEPS, scale: float = 1.0) -> None:
    """Many steps: bias corrections are long over, as at step 100,000."""
    for step in range(steps):
        set_gradients(block, step, scale)
        optimizer.step()
    if steps >= STEPS:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].fill_(100_000)


def copies(block: MoEBlock) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, (p, _) in slot_parameters(block).items()}


def rebirth(block: MoEBlock, optimizer: Optimizer, slot: int = SLOT) -> None:
    """An expert goes and another one starts in its slot."""
    block.deactivate(slot)
    generator = torch.Generator().manual_seed(99)
    write_expert(block, slot, block.experts.fresh(generator))
    block.router.aim(slot, torch.randn(DIM, generator=generator))
    block.activate(slot)
    forget_slot(optimizer, block, slot)


def first_move(
    name: str, grad: Callable[[Tensor], Tensor], router=TopAny, steps: int = STEPS
) -> tuple[dict[str, Tensor], dict[str, Tensor], MoEBlock]:
    """The new expert's parameters before and after its first step, after a long training."""
    block = fresh_block(router)
    optimizer = make_optimizer(name, block)
    train(block, optimizer, steps)
    rebirth(block, optimizer)
    set_gradients(block, steps)
    for parameter, _ in slot_parameters(block).values():
        parameter.grad[SLOT] = grad(parameter.grad[SLOT])
    assert bound_first_step(optimizer, block, SLOT)
    before = copies(block)
    optimizer.step()
    return before, copies(block), block


def wild(grad: Tensor) -> Tensor:
    """Every element at a scale of its own, 1e-15 to 1e15."""
    generator = torch.Generator().manual_seed(grad.numel())
    return grad.sign() * 10.0 ** (torch.rand(grad.shape, generator=generator) * 30 - 15)


GRADIENTS = {
    "tiny": lambda grad: grad * 1e-12,
    "small": lambda grad: grad * 1e-4,
    "usual": lambda grad: grad,
    "large": lambda grad: grad * 1e4,
    "huge": lambda grad: grad * 1e15,
    "wild": wild,
}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("name", BOUNDED)
def test_first_step_is_at_most_the_learning_rate(name: str, gradient: str) -> None:
    """In every element, plus what decoupled weight decay takes: lr * wd * |p|."""
    before, after, _ = first_move(name, GRADIENTS[gradient])
    for key, old in before.items():
        moved = (after[key][SLOT] - old[SLOT]).abs()
        decoupled = name not in PLAIN and not name.endswith("-l2")  # else it is in the gradient
        decay = DECAY if old.ndim == 3 and decoupled else 0.0
        limit = LR * (1 + 1e-5) + (LR * decay + 2e-7) * old[SLOT].abs()
        assert moved.isfinite().all(), key
        assert (moved <= limit).all(), f"{key}: {float((moved / LR).max()):.2f} learning rates"


@pytest.mark.parametrize("name", ["adamw", "nadam", "rmsprop"])
def test_first_step_without_the_bound_would_be_too_long(name: str) -> None:
    """What the test above guards against: zeroed moments at a late step."""
    block = fresh_block()
    optimizer = make_optimizer(name, block)
    train(block, optimizer)
    for state in optimizer.state.values():
        for value in state.values():
            if value.ndim and value.shape[0] == SLOTS:
                value[SLOT] = 0.0
    set_gradients(block, STEPS)
    before = block.experts.down.detach().clone()
    optimizer.step()
    assert (block.experts.down - before)[SLOT].abs().max() > 1.2 * LR


@pytest.mark.parametrize("steps", [0, 1, 2, 1000])
@pytest.mark.parametrize("name", ["adamw", "adamw-amsgrad", "rmsprop"])
def test_first_step_early_and_late(name: str, steps: int) -> None:
    """Whenever the expert is born, before the optimizer's first step too."""
    before, after, _ = first_move(name, lambda grad: grad, steps=steps)
    for key, old in before.items():
        slack = (LR * DECAY + 2e-7) * old[SLOT].abs()
        limit = LR * (1 + 1e-5) + slack
        if name == "rmsprop" and steps == 0:
            continue  # RMSprop without any state: its own very first step is 10 learning rates
        assert ((after[key][SLOT] - old[SLOT]).abs() <= limit).all(), key


@pytest.mark.parametrize("name", [name for name in EVERY if not name.endswith("-l2")])
def test_momentum_of_the_dead_expert_is_gone(name: str) -> None:
    """A zero gradient moves the new expert by weight decay alone."""
    before, after, _ = first_move(name, lambda grad: torch.ones_like(grad) * 1e-30)
    for key, old in before.items():
        factor = 1.9 if name == "sgd-nesterov" else 1.0  # its decay goes through the momentum
        decay = LR * DECAY * factor if old.ndim == 3 and name not in PLAIN else 0.0
        expected = old[SLOT] * (1 - decay)
        torch.testing.assert_close(after[key][SLOT], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", MOMENTUM)
def test_first_sgd_step_is_a_plain_one(name: str) -> None:
    """SGD's steps are proportional to gradients: lr * (g + wd p), without old momentum."""
    block = fresh_block()
    optimizer = make_optimizer(name, block)
    train(block, optimizer)
    rebirth(block, optimizer)
    set_gradients(block, STEPS)
    bound_first_step(optimizer, block, SLOT)
    before = copies(block)
    grads = {key: p.grad[SLOT].clone() for key, (p, _) in slot_parameters(block).items()}
    optimizer.step()
    for key, (parameter, _) in slot_parameters(block).items():
        decay = DECAY if parameter.ndim == 3 else 0.0
        gradient = grads[key] + decay * before[key][SLOT]
        factor = 1.9 if "nesterov" in name else 1.0  # g + momentum * buffer, the buffer being g
        expected = before[key][SLOT] - LR * factor * gradient
        torch.testing.assert_close(parameter.detach()[SLOT], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", EVERY)
def test_other_slots_move_exactly_as_without_the_reset(name: str) -> None:
    """Bit for bit, over the birth and twenty steps after it."""
    trajectories = []
    for reborn in (False, True):
        block = fresh_block()
        optimizer = make_optimizer(name, block)
        seen = []
        for step in range(40):
            set_gradients(block, step)
            if reborn and step == 20:
                rebirth(block, optimizer)
                bound_first_step(optimizer, block, SLOT)
            optimizer.step()
            seen.append(copies(block))
        trajectories.append(seen)
    others = [e for e in range(SLOTS) if e != SLOT]
    for without, with_reset in zip(*trajectories, strict=True):
        for key in without:
            assert torch.equal(without[key][others], with_reset[key][others]), key
    assert not torch.equal(without["experts.down"][SLOT], with_reset["experts.down"][SLOT])


def test_parameters_without_slots_are_left_alone() -> None:
    """Shared experts, the router's temperature and its MLP keep their state."""
    router = partial(TopAny, learn_temperature=True, mlp_hidden=SLOTS)
    block = fresh_block(router, shared_experts=1)
    optimizer = make_optimizer("adamw", block)
    train(block, optimizer, 5)
    owned = {id(p) for p, _ in slot_parameters(block).values()}
    kept = {
        name: {key: value.clone() for key, value in optimizer.state[p].items()}
        for name, p in block.named_parameters()
        if id(p) not in owned
    }
    assert set(kept) == {
        *(f"shared.{name}" for name, _ in block.shared.named_parameters()),
        "router.log_temperature",
        "router.mlp.0.weight",
        "router.mlp.0.bias",
        "router.mlp.2.weight",
        "router.mlp.2.bias",
    }
    rebirth(block, optimizer)
    bound_first_step(optimizer, block, SLOT)
    for name, state in kept.items():
        for key, value in state.items():
            assert torch.equal(optimizer.state[block.get_parameter(name)][key], value), name


@pytest.mark.parametrize(
    ("router", "options", "expected"),
    [
        (TopK, {}, {"router.weight"}),
        (partial(TopK, noise=True), {}, {"router.weight", "router.noise_weight"}),
        (TopAny, {}, {"router.weight", "router.threshold"}),
        (TopK, {"default_vectors": "trained"}, {"router.weight", "default_ED"}),
        (TopK, {"default_vectors": "ema"}, {"router.weight"}),
        (TopK, {"experts": SwiGLUExperts, "shared_experts": 1}, {"router.weight"}),
        (Ternary, {}, {"router.weight"}),
    ],
)
def test_slot_parameters(router, options: dict, expected: set[str]) -> None:
    """Whatever has one row for each slot."""
    block = fresh_block(router, **options)
    experts = {f"experts.{name}" for name, _ in block.experts.named_parameters()}
    assert set(slot_parameters(block)) == experts | expected


def test_forget_slot_takes_the_mean_of_the_other_active_experts() -> None:
    """First moments 0; second moments the mean over the active ones, inactive slots left out."""
    block = fresh_block()
    optimizer = make_optimizer("adamw-amsgrad", block)
    train(block, optimizer, 5)
    expected = {
        (name, key): optimizer.state[p][key][[0, 3, 5]].mean(0)
        for name, (p, _) in slot_parameters(block).items()
        for key in ("exp_avg_sq", "max_exp_avg_sq")
    }
    forget_slot(optimizer, block, SLOT)
    for name, (parameter, _) in slot_parameters(block).items():
        state = optimizer.state[parameter]
        assert not state["exp_avg"][SLOT].any()
        assert state["exp_avg"][0].any()
        for key in ("exp_avg_sq", "max_exp_avg_sq"):
            torch.testing.assert_close(state[key][SLOT], expected[name, key])


def test_the_only_active_expert_has_nobody_to_learn_from() -> None:
    """Second moments are 0 until the bound raises them to the gradient squared."""
    block = make_block(TopAny, active=[SLOT], double=False)
    optimizer = make_optimizer("adamw", block)
    train(block, optimizer)
    forget_slot(optimizer, block, SLOT)
    assert not optimizer.state[block.experts.down]["exp_avg_sq"][SLOT].any()
    set_gradients(block, STEPS)
    assert bound_first_step(optimizer, block, SLOT)
    before = block.experts.up_bias.detach().clone()
    optimizer.step()
    assert (block.experts.up_bias - before)[SLOT].abs().max() <= LR * (1 + 1e-5)


def test_bound_waits_for_the_first_gradient() -> None:
    """False while the slot has none, so that it is asked again; true once it came."""
    block = fresh_block()
    optimizer = make_optimizer("adamw", block)
    set_gradients(block, 0)
    optimizer.step()
    rebirth(block, optimizer)
    block.zero_grad()
    assert not bound_first_step(optimizer, block, SLOT)
    set_gradients(block, 1)
    for parameter, _ in slot_parameters(block).values():
        parameter.grad[SLOT] = 0.0
    assert not bound_first_step(optimizer, block, SLOT)
    set_gradients(block, 2)
    assert bound_first_step(optimizer, block, SLOT)


def test_first_step_of_an_expert_that_waits_for_its_first_token() -> None:
    """Auxiliary losses move a routing vector from the first step on. The expert's weights get
    their first gradient when a token takes it, steps later, and are bounded then.
    """
    block = fresh_block()
    optimizer = make_optimizer("adamw", block)
    train(block, optimizer, scale=1e-3)
    rebirth(block, optimizer)
    waiting = True
    for step in range(STEPS, STEPS + 5):
        set_gradients(block, step, scale=1e-3)
        for parameter in block.experts.parameters():
            parameter.grad[SLOT] = 0.0
        if waiting:
            waiting = not bound_first_step(optimizer, block, SLOT)
        optimizer.step()
    set_gradients(block, STEPS + 5)  # the first tokens, with a gradient above the usual one
    if waiting:
        bound_first_step(optimizer, block, SLOT)
    before = copies(block)
    optimizer.step()
    for name, parameter in block.experts.named_parameters():
        old = before[f"experts.{name}"][SLOT]
        moved = (parameter.detach()[SLOT] - old).abs()
        limit = LR * (1 + 1e-5) + (LR * DECAY + 2e-7) * old.abs()
        assert (moved <= limit).all(), f"{name}: {float((moved / LR).max()):.2f} learning rates"


def test_read_and_write_expert() -> None:
    """A copy, not a view; other slots stay."""
    block = fresh_block()
    weights = read_expert(block, 3)
    kept = {name: value.clone() for name, value in weights.items()}
    others = [e for e in range(SLOTS) if e != 3]
    before = copies(block)
    with torch.no_grad():
        for parameter in block.experts.parameters():
            parameter[3] = 7.0
    assert all(torch.equal(weights[name], kept[name]) for name in kept)
    write_expert(block, 3, weights)
    assert all(torch.equal(value, before[key]) for key, value in copies(block).items())
    write_expert(block, 3, read_expert(block, 0))
    for name, parameter in block.experts.named_parameters():
        assert torch.equal(parameter[3], parameter[0]), name
        assert torch.equal(parameter[others], before[f"experts.{name}"][others]), name


def test_activate_and_deactivate() -> None:
    """Only the mask changes; outputs of the remaining experts stay what they were."""
    block = fresh_block()
    before = copies(block)
    block.deactivate(0)
    assert block.active_slots() == [2, 3, 5]
    block.activate(4)
    block.activate(4)
    assert block.active_slots() == [2, 3, 4, 5]
    assert all(torch.equal(value, before[key]) for key, value in copies(block).items())


def test_a_real_birth_through_backward() -> None:
    """With gradients of a real loss instead of made ones, and two optimizer groups."""
    block = MoEBlock(DIM, HIDDEN, TopAny, num_experts=4, max_experts=SLOTS)
    randomize(block, 1)
    optimizer = make_optimizer("adamw", block)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS + 1):
        x_TD = torch.randn(64, DIM, generator=generator)
        if step == STEPS:
            rebirth(block, optimizer, slot=5)
        optimizer.zero_grad()
        (block(x_TD) - x_TD.roll(1, 1)).square().mean().backward()
        if step == STEPS:
            assert block.routing.mask_TE[:, 5].any()
            assert bound_first_step(optimizer, block, 5)
        before = copies(block)
        optimizer.step()
    for key, old in before.items():
        moved = (slot_parameters(block)[key][0].detach()[5] - old[5]).abs()
        assert (moved <= LR * (1 + 1e-5) + (LR * DECAY + 2e-7) * old[5].abs()).all(), key
