"""The decoder against transformers' Llama, its cache against no cache, and causality."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from app.models.decoder import Decoder, SwiGLU, rename_llama_weights, rotate
from app.moe import MoEBlock, SwiGLUExperts, moe_blocks


def tiny(**options) -> Decoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "dim": 32, "depth": 3, "num_heads": 4, "hidden": 48}
    return Decoder(**(sizes | {"max_length": 24} | options)).eval()


def moe(**options) -> partial:
    return partial(MoEBlock, experts=SwiGLUExperts, num_experts=4, **options)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_llama(kv_heads: int, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=24,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.1,  # far from the near-uniform logits of a fresh model
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in llama.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    ours = tiny(num_kv_heads=kv_heads, tie_embeddings=tied)
    ours.load_state_dict(rename_llama_weights(llama.state_dict()))
    tokens_BS = torch.randint(31, (2, 24))
    with torch.no_grad():
        expected = llama(tokens_BS).logits
        torch.testing.assert_close(ours(tokens_BS), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("blocks", [(), (1,)])
def test_cache_changes_nothing(kv_heads: int, blocks: tuple[int, ...]) -> None:
    model = tiny(num_kv_heads=kv_heads, moe=moe(), moe_blocks=blocks)
    tokens_BS = torch.randint(31, (2, 20))
    with torch.no_grad():
        whole = model(tokens_BS)
        cache = model.new_cache(batch_size=2)
        # A prompt, a second piece with an offset mask, then token by token.
        pieces = [model(piece, cache) for piece in tokens_BS.split([6, 5] + [1] * 9, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-5, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(place=st.integers(0, 11), blocks=st.sampled_from([(), (0, 2)]))
def test_a_later_token_changes_nothing_before_it(place: int, blocks: tuple[int, ...]) -> None:
    model = tiny(num_kv_heads=2, moe=moe(), moe_blocks=blocks)
    tokens_BS = torch.randint(31, (1, 12))
    changed = tokens_BS.clone()
    changed[0, place] = (changed[0, place] + 1) % 31
    with torch.no_grad():
        before, after = model(tokens_BS), model(changed)
    torch.testing.assert_close(after[:, :place], before[:, :place], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(after[:, place], before[:, place], atol=1e-3)


def test_moe_blocks_get_gradients_and_names() -> None:
    model = tiny(moe=moe(max_experts=5), moe_blocks=[0, 2]).train()
    assert list(moe_blocks(model)) == ["blocks.0", "blocks.2"]
    assert isinstance(model.blocks[1].mlp, SwiGLU)
    model(torch.randint(31, (2, 24))).logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_initial_scale() -> None:
    model = Decoder(dim=128, depth=8, moe=moe(), moe_blocks=[3])
    residual = 0.02 / 4
    for weight, std in (
        (model.embed.weight, 0.02),
        (model.head.weight, 0.02),
        (model.blocks[0].attn.qkv.weight, 0.02),
        (model.blocks[0].attn.out.weight, residual),
        (model.blocks[0].mlp.up.weight, 0.02),
        (model.blocks[0].mlp.down.weight, residual),
        (model.blocks[3].attn.out.weight, residual),
        (model.blocks[3].mlp.experts.down, residual),
        (model.blocks[3].mlp.experts.up, 0.02),
    ):
        assert weight.std().item() == pytest.approx(std, rel=0.05)


def test_rotation_depends_on_distance_only() -> None:
    model = tiny()
    q, k = torch.randn(2, 1, 1, 1, 8)
    scores = []
    for shift in (0, 7):
        rope = model._rope(0, 24, q.device)
        turned_q = rotate(q, rope[:, 5 + shift : 6 + shift])
        turned_k = rotate(k, rope[:, 2 + shift : 3 + shift])
        scores.append((turned_q * turned_k).sum())
    torch.testing.assert_close(scores[0], scores[1])


def test_too_long_a_sequence() -> None:
    model = tiny()
    with pytest.raises(ValueError, match="25 tokens is longer than the model's max_length 24"):
        model(torch.zeros(1, 25, dtype=torch.long))
    cache = model.new_cache()
    model(torch.zeros(1, 20, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="25 tokens"):
        model(torch.zeros(1, 5, dtype=torch.long), cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "even multiple of num_heads"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads"),
        ({"moe_blocks": [3], "moe": moe()}, r"moe_blocks \[3\]"),
    ],
)
def test_sizes_that_do_not_fit(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_dropout_only_while_training() -> None:
    model = tiny(dropout=0.5)
    tokens_BS = torch.randint(31, (2, 8))
    assert torch.equal(model(tokens_BS), model(tokens_BS))
    model.train()
    assert not torch.equal(model(tokens_BS), model(tokens_BS))
    assert isinstance(model.blocks[0].dropout, nn.Dropout)
