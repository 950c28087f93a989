"""Experts into networks of timm and transformers. Weights are random: nothing is downloaded."""

import copy
from functools import partial

import pytest
import timm
import torch
from torch import nn

from app.models import TimmClassifier, with_experts
from app.models.with_experts import chosen_layers, feed_forwards, transformer_blocks
from app.moe import Dense, MoEBlock, TopAny, TopK, moe_blocks
from app.moe.layer_experts import LayerExperts

transformers = pytest.importorskip("transformers")

ROUTERS = {"top2": partial(TopK, k=2, normalize=True), "topany": TopAny, "dense": Dense}

VISION = {
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 2},
    "deit3_small_patch16_224": {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3},
    "eva02_tiny_patch14_224": {"img_size": 28, "depth": 2},
    "vit_small_patch14_reg4_dinov2": {"img_size": 28, "depth": 2, "embed_dim": 48, "num_heads": 3},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "depths": (1, 1, 1, 1), "embed_dim": 24},
    "beit_base_patch16_224": {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3},
}
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDE = SIZES | {"hidden_size": 32, "intermediate_size": 48}
LANGUAGE = {
    "Bert": ("BertModel", WIDE),
    "Roberta": ("RobertaModel", WIDE),
    "ModernBert": ("ModernBertModel", WIDE | {"cls_token_id": 1, "sep_token_id": 2}),
    "DistilBert": (
        "DistilBertModel",
        SIZES | {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    ),
    "GPT2": ("GPT2LMHeadModel", SIZES | {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "Llama": ("LlamaForCausalLM", WIDE),
    "Qwen2": ("Qwen2ForCausalLM", WIDE | {"num_key_value_heads": 2}),
}


def vision(name: str) -> tuple[nn.Module, torch.Tensor]:
    options = VISION[name]
    network = timm.create_model(name, num_classes=5, **options)
    return network, torch.randn(2, 3, options["img_size"], options["img_size"])


def language(name: str) -> tuple[nn.Module, torch.Tensor]:
    model, sizes = LANGUAGE[name]
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, model)(config), torch.randint(3, 60, (2, 7))


def outputs(network: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = network(x)
    return y if isinstance(y, torch.Tensor) else y[0]


def perturbed(network: nn.Module) -> nn.Module:
    """Layer scales, biases and the like away from where they start."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return network.eval()


@pytest.mark.parametrize("name", [*VISION, *LANGUAGE])
def test_upcycled_outputs_are_the_original(name):
    """With every router whose gates sum to 1, to float32 rounding; the original is left alone."""
    network, x = (vision if name in VISION else language)(name)
    network = perturbed(network)
    before = outputs(network, x)
    for router in ROUTERS.values():
        moe = partial(MoEBlock, router=router, num_experts=3, max_experts=4)
        upcycled = with_experts(copy.deepcopy(network), moe)
        assert len(moe_blocks(upcycled)) == len(feed_forwards(network)) >= 2
        assert not any(p.is_meta for p in upcycled.parameters())
        torch.testing.assert_close(outputs(upcycled, x), before, rtol=2e-5, atol=2e-5)
    assert torch.equal(outputs(network, x), before)
    assert len(transformer_blocks(network)) == len(feed_forwards(network))


def test_experts_differ_and_learn_as_a_loop_says():
    """Different experts of a gated form: outputs and gradients equal a loop over tokens."""
    network = timm.create_model("eva02_tiny_patch14_224", img_size=28, depth=1).double()
    layer = network.blocks[0].mlp
    moe = partial(MoEBlock, router=partial(TopK, k=2, normalize=True), num_experts=3)
    block = with_experts(network, moe).blocks[0].mlp
    assert isinstance(block.experts, LayerExperts)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = torch.randn(5, 192, dtype=torch.float64, requires_grad=True)
    y = block(x)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    ours = {name: p.grad.clone() for name, p in block.named_parameters()}
    grad_x, block.router.weight.grad, x.grad = x.grad.clone(), None, None

    stacked = {n: p.detach().clone().requires_grad_() for n, p in block.experts.named_parameters()}
    names = [name for name, _ in layer.named_parameters()]
    total = torch.zeros((), dtype=torch.float64)
    p_TE = (x @ block.router.weight.t()).softmax(1)
    for t in range(5):
        kept = p_TE[t].topk(2).indices.tolist()
        for e in kept:
            own = {name: stacked[name.replace(".", "_")][e] for name in names}
            out = torch.func.functional_call(layer, own, (x[t],))
            total = total + (p_TE[t, e] / p_TE[t, kept].sum() * out * weight[t]).sum()
    total.backward()
    torch.testing.assert_close(x.grad, grad_x)
    torch.testing.assert_close(block.router.weight.grad, ours["router.weight"])
    for name, value in stacked.items():
        torch.testing.assert_close(value.grad, ours[f"experts.{name}"])


def test_layers_by_index_every_and_last():
    assert chosen_layers(None, 3) == [0, 1, 2]
    assert chosen_layers([-1, 0, 0], 4) == [0, 3]
    assert chosen_layers({"every": 2}, 5) == [1, 3]
    assert chosen_layers({"last": 2}, 5) == [3, 4]
    assert chosen_layers([], 5) == []
    for wrong in ([5], [-6], {"first": 1}, {"every": 0}, {"last": 6}, {}):
        with pytest.raises(ValueError, match="layers"):
            chosen_layers(wrong, 5)


def test_a_network_without_feed_forward_layers():
    with pytest.raises(ValueError, match=r"ResNet has no feed-forward .* BasicBlock"):
        with_experts(timm.create_model("resnet18", num_classes=2))


@pytest.mark.parametrize("setting", [{"expert_ratio": 0.5}, {"shared_experts": 1}])
def test_what_copies_cant_have(setting):
    network, _ = vision("vit_tiny_patch16_224")
    with pytest.raises(ValueError, match=rf"{next(iter(setting))}.*anew"):
        with_experts(network, partial(MoEBlock, **setting))
    assert with_experts(network, partial(MoEBlock, **setting), start="anew")


def test_a_new_expert_is_drawn_as_the_layer_is():
    """Of the layer's own scale, different for each seed; no random number of others is used up."""
    layer = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 64))
    experts = LayerExperts(layer, 2)
    torch.manual_seed(3)
    first, second = (experts.fresh(torch.Generator().manual_seed(seed)) for seed in (0, 1))
    after = torch.rand(())
    torch.manual_seed(3)
    assert torch.rand(()) == after
    assert not torch.equal(first["0_weight"], second["0_weight"])
    assert float(first["0_weight"].std()) == pytest.approx(
        float(layer[0].weight.detach().std()), rel=0.1
    )
    assert torch.equal(first["2_weight"], torch.ones(96))
    experts.reset()
    assert not torch.equal(experts.get_parameter("0_weight")[0], layer[0].weight)


def test_dropout_follows_the_mode():
    layer = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8))
    block = MoEBlock(8, 16, num_experts=2)
    block.experts = LayerExperts(layer, 2)
    x = torch.randn(6, 8)
    assert torch.equal(block.eval()(x), block(x))
    assert not torch.equal(block.train()(x), block(x))


def test_a_name_that_timm_does_not_know():
    with pytest.raises(ValueError, match="timm has no model vit_tinny"):
        TimmClassifier("vit_tinny")
