"""FLOPs against formulas written out by hand, and against torch's counter on real passes."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from app.models import Decoder, VisionTransformer
from app.moe import Dense, MoEBlock, Ternary, TopAny, TopK, TopP
from app.moe.flops import FlopMeter, dense_flops, forward_flops
from app.moe.routing import Routing

BATCH = 3


def counted(network: nn.Module, inputs: torch.Tensor) -> int:
    """What torch's counter sees of a real forward pass.

    It does not know the fused attention kernel of the CPU, so attention is computed by products.
    """
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(inputs)
    return counter.get_total_flops()


def images(size: int = 8, channels: int = 1) -> torch.Tensor:
    return torch.randn(BATCH, channels, size, size, generator=torch.Generator().manual_seed(0))


def small_vit(router=TopK, moe_blocks=(1,), training=False, **block) -> VisionTransformer:
    torch.manual_seed(0)
    moe = partial(MoEBlock, router=router, num_experts=4, max_experts=6, **block)
    network = VisionTransformer(
        image_size=8, patch_size=2, channels=1, dim=16, depth=2, heads=2, mlp_ratio=2.0,
        moe=moe, moe_blocks=moe_blocks,
    )  # fmt: skip
    return network.train(training)


def vit_by_hand(patches, patch_values, tokens, dim, hidden, depth, classes, moe=0) -> int:
    """All blocks' attention, the feed-forward layer of all but `moe` blocks."""
    attention = 2 * tokens * dim * 4 * dim + 2 * 2 * tokens * tokens * dim
    feed_forward = 2 * tokens * 2 * dim * hidden
    embedding = 2 * patches * patch_values * dim
    return embedding + depth * attention + (depth - moe) * feed_forward + 2 * dim * classes


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_dense_vision_transformer(pool):
    network = VisionTransformer(
        image_size=8, patch_size=2, channels=3, dim=24, depth=3, heads=2, mlp_ratio=1.5,
        drop_rate=0.1, drop_path=0.1, pool=pool, moe_blocks=[],
    )  # fmt: skip
    inputs = images(channels=3)
    tokens = 17 if pool == "token" else 16
    expected = vit_by_hand(16, 12, tokens, 24, 36, 3, 10)
    assert dense_flops(network, inputs) == expected
    assert forward_flops(network, inputs) == expected
    assert counted(network, inputs) == BATCH * expected


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_dense_decoder(kv_heads):
    """Per token at its sequence length; with grouped queries every query head attends."""
    dim, hidden, vocab, depth = 32, 48, 50, 2
    network = Decoder(
        vocab, dim, depth, num_heads=4, num_kv_heads=kv_heads, hidden=hidden, dropout=0.1
    )
    for length in (7, 16):
        tokens = torch.zeros(BATCH, length, dtype=torch.long)
        projections = 2 * dim * (dim + 2 * kv_heads * dim // 4) + 2 * dim * dim
        attention = projections + 2 * 2 * length * dim
        expected = depth * (attention + 3 * 2 * dim * hidden) + 2 * dim * vocab
        assert forward_flops(network, tokens) == expected
        assert dense_flops(network, tokens) == length * expected
        assert counted(network, tokens) == BATCH * length * expected


def test_tied_output_layer_counts():
    sizes = {"vocab_size": 50, "dim": 16, "depth": 1, "num_heads": 2}
    tokens = torch.zeros(1, 8, dtype=torch.long)
    tied = forward_flops(Decoder(**sizes, tie_embeddings=True), tokens)
    assert tied == forward_flops(Decoder(**sizes), tokens)


class Fixed(TopK):
    """Token t takes `taken[t % len(taken)]`."""

    taken = ([], [0], [1, 3], [0, 1, 2, 3])

    def forward(self, x_TD, active_E):
        mask_TE = torch.zeros(len(x_TD), self.slots, dtype=torch.bool)
        for token in range(len(x_TD)):
            mask_TE[token, self.taken[token % len(self.taken)]] = True
        return Routing(mask_TE, mask_TE.float(), active_E, x_TD)


@pytest.mark.parametrize("shared", [0, 2])
def test_known_routing(shared):
    """17 tokens of each image take 0, 1, 2, 4, 0, ... experts, counted by hand."""
    network = small_vit(Fixed, shared_experts=shared, expert_ratio=0.5)
    tokens = BATCH * 17
    pairs = sum((0, 1, 2, 4)[token % 4] for token in range(tokens))
    expert = 2 * 2 * 16 * 16
    block = pairs * expert + tokens * (2 * 6 * 16 + shared * expert)
    expected = vit_by_hand(16, 4, 17, 16, 32, 2, 10, moe=1) + block / BATCH
    assert forward_flops(network, images()) == expected


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("router", "block"),
    [
        (Dense, {}),
        (TopK, {"shared_experts": 1}),
        (partial(TopK, noise=True), {}),
        (partial(TopP, p=0.3), {"expert_ratio": 0.5}),
        (TopAny, {}),
        (partial(TopAny, mlp_hidden=8), {}),
        (TopK, {"default_vectors": "ema"}),
        (TopK, {"default_vectors": "trained"}),
    ],
)
def test_experts_against_the_counter(router, block, training):
    """On the CPU experts are plain products, so that the counter sees the real routing."""
    network = small_vit(router, **block, training=training)
    assert forward_flops(network, images()) == counted(network, images()) / BATCH


def test_ternary():
    """Nulls cost nothing, both signs of an expert one run; the rest as the counter has it."""
    network = small_vit(partial(Ternary, k=5))
    block = network.blocks[1].mlp
    flops = forward_flops(network, images())
    routing = block.routing
    selected = int(routing.chosen_TLE.sum())
    both = int(routing.chosen_TLE.all(1).sum())
    nulls = int(routing.chosen_null_T.sum())
    assert both and nulls and selected + nulls == 5 * BATCH * 17
    fixed = vit_by_hand(16, 4, 17, 16, 32, 2, 10, moe=1) + 17 * 2 * (2 * 6 + 5) * 16
    flops = round(BATCH * flops)
    assert flops == BATCH * fixed + (selected - both) * 2 * 2 * 16 * 32
    # The counter also has the sum over levels (2 E per level and token), which we leave out.
    assert counted(network, images()) - flops == BATCH * 17 * 2 * 2 * 6


def test_decoder_with_experts():
    torch.manual_seed(0)
    network = Decoder(50, dim=32, depth=2, num_heads=2, moe_blocks=[1]).eval()
    tokens = torch.randint(50, (BATCH, 12))
    assert forward_flops(network, tokens) == counted(network, tokens) / tokens.numel()


def test_the_network_stays_as_it_is():
    network, inputs = small_vit(training=True), images()
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    random = torch.get_rng_state()
    dense_flops(network, inputs)
    assert torch.equal(torch.get_rng_state(), random)
    assert network.training and network.blocks[1].mlp.routing is None
    assert "forward" not in vars(network.blocks[1].mlp)
    assert all(torch.equal(state[name], tensor) for name, tensor in network.state_dict().items())


def test_the_dense_part_is_measured_once_a_shape(monkeypatch):
    calls = []
    monkeypatch.setattr("app.moe.flops.dense_flops", lambda n, x: calls.append(x.shape) or 1000)
    network = Decoder(50, dim=16, depth=1, num_heads=2)
    meter = FlopMeter(network)
    for batch, length in ((2, 8), (2, 8), (5, 8), (2, 4)):
        network(torch.zeros(batch, length, dtype=torch.long))
        assert meter.fixed() == (batch * length, batch * 1000) and meter.unit == "token"
    assert len(calls) == 2
    meter.remove()
    network(torch.zeros(9, 4, dtype=torch.long))
    assert meter.fixed() == (8, 2000)
