"""Loss-free balancing moves its bias as the formula says, and nothing but the selection."""

from functools import partial

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from app.moe import Dense, Ternary, TopAny, TopK, TopP
from callbacks import LossFreeBalance
from tests.callbacks.callback_support import Recorder, Toy, fit, toy_block


def batches(count: int, size: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(size, 8, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_bias_by_the_formula(tmp_path, accumulate):
    """rate * sign(mean load - load) once a step, over active experts; inactive ones stay put."""
    block, recorder = toy_block(partial(TopK, k=2), num_experts=4, slots=6), Recorder()
    biases = []

    class Look(Recorder):
        def on_train_batch_end(self, trainer, pl_module, *_):
            biases.append(block.router.balance_bias_E.clone())

    block.router.balance_bias_E[5] = 0.5  # what an inactive slot may have had
    options = {"accumulate_grad_batches": accumulate}
    fit(tmp_path, Toy(block), batches(6), recorder, LossFreeBalance(0.01), Look(), **options)
    expected = [0.0, 0.0, 0.0, 0.0, 0.0, 0.5]
    for step in range(6 // accumulate):
        here = slice(step * accumulate, (step + 1) * accumulate)
        for within in biases[here][:-1]:
            assert within.tolist() == pytest.approx(expected)
        load = [0] * 6
        for routings in recorder.train[here]:
            for token in routings["blocks.0"].mask_TE.tolist():
                load = [n + taken for n, taken in zip(load, token, strict=True)]
        mean = sum(load) / 4
        for e in range(4):
            expected[e] += 0.01 * ((mean > load[e]) - (mean < load[e]))
        assert biases[here][-1].tolist() == pytest.approx(expected)
    assert min(expected) < 0 < max(expected[:4])


@pytest.mark.parametrize(("earlier", "signs"), [(None, [-1, 1]), ([0.0, 9.0], [1, -1])])
def test_loads_from_a_checkpoint_count(tmp_path, earlier, signs):
    """3 tokens to 1 now, and 9 more for expert 1 in the part of the step before the checkpoint."""
    block, balance = toy_block(partial(TopK, k=1), num_experts=2, slots=2), LossFreeBalance(0.5)
    if earlier:
        balance.load_state_dict({"blocks.0": torch.tensor(earlier)})
    fit(tmp_path, Toy(block), [torch.eye(8)[[0, 0, 0, 1]]], balance)
    assert block.router.balance_bias_E.tolist() == [0.5 * sign for sign in signs]
    assert balance.state_dict() == {}


def test_an_even_load_moves_nothing(tmp_path):
    block = toy_block(partial(TopK, k=1), num_experts=4, slots=4)
    even = torch.eye(8)[:4]
    fit(tmp_path, Toy(block), [even] * 3, LossFreeBalance(0.1))
    assert not block.router.balance_bias_E.any()


def test_the_load_evens_out(tmp_path):
    """Towards balance: after many small steps the largest load is closer to the mean."""
    block, recorder = toy_block(partial(TopK, k=1), num_experts=4, slots=4), Recorder()
    with torch.no_grad():
        block.router.weight[0, 7] = 2.0
    given = [x + torch.eye(8)[7] for x in batches(60, 64)]
    fit(tmp_path, Toy(block), given, recorder, LossFreeBalance(0.02))
    load = [float(r["blocks.0"].load_E().max()) / 16 for r in recorder.train]
    assert sum(load[:5]) / 5 > 2.0 and sum(load[-5:]) / 5 < 1.6


def test_gates_come_from_unbiased_probabilities(tmp_path):
    """A large bias decides which experts are taken; their gates are still p."""
    block, recorder = toy_block(partial(TopK, k=2), num_experts=4, slots=4), Recorder()
    block.router.balance_bias_E.copy_(torch.tensor([9.0, 0.0, 9.0, 0.0]))
    fit(tmp_path, Toy(block), batches(1), recorder, LossFreeBalance(0.1))
    routing = recorder.train[0]["blocks.0"]
    assert routing.mask_TE.tolist() == [[True, False, True, False]] * 12
    probs = torch.softmax(batches(1)[0] @ torch.eye(4, 8).t(), dim=1)
    torch.testing.assert_close(routing.probs_TE, probs)
    torch.testing.assert_close(routing.gates_TE[:, [0, 2]], probs[:, [0, 2]])


@pytest.mark.parametrize("router", [Dense, TopP, TopAny, Ternary])
def test_other_routers_are_refused(tmp_path, router):
    with pytest.raises(
        MisconfigurationException, match=f"{router.__name__} of blocks.0: its selection"
    ):
        fit(tmp_path, Toy(toy_block(router)), batches(1), LossFreeBalance())


def test_sparsemixer_is_refused(tmp_path):
    """It draws its experts from p while training: a bias would count in evaluation only."""
    router = partial(TopK, k=1, estimator="sparsemixer")
    with pytest.raises(MisconfigurationException, match="sparsemixer"):
        fit(tmp_path, Toy(toy_block(router)), batches(1), LossFreeBalance())


def test_rate_must_be_positive():
    with pytest.raises(ValueError, match=r"rate must be positive, got 0\.0"):
        LossFreeBalance(0.0)
