"""timm's Vision Transformer with MoE blocks, and sparse upcycling into it."""

from functools import partial

import pytest
import timm.models.vision_transformer as timm_vit
import torch
from safetensors.torch import save_file

from app.models import VisionTransformer
from app.moe import Dense, MoEBlock, TopAny, TopK, moe_blocks

SIZE = {"image_size": 16, "patch_size": 4, "dim": 32, "depth": 3, "heads": 2}


def timm_model(num_classes: int = 10, img_size: int = 16) -> timm_vit.VisionTransformer:
    torch.manual_seed(3)
    model = timm_vit.VisionTransformer(
        img_size=img_size, patch_size=4, num_classes=num_classes, embed_dim=32, depth=3, num_heads=2
    )
    for parameter in model.parameters():  # away from zero biases, so that each one counts
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def test_without_moe_blocks_it_is_timms_model():
    reference = timm_model()
    model = VisionTransformer(**SIZE, moe_blocks=[]).eval()
    model.load_state_dict(reference.state_dict())
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(images), reference(images), rtol=0, atol=0)


def test_moe_blocks_replace_the_chosen_mlps():
    model = VisionTransformer(**SIZE, moe_blocks=[0, 2])
    assert list(moe_blocks(model)) == ["blocks.0", "blocks.2"]
    images = torch.randn(2, 3, 16, 16)
    model(images).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("router", [Dense, partial(TopK, k=3), partial(TopK, k=2, normalize=True)])
def test_upcycled_experts_of_total_weight_one_compute_what_the_mlp_did(tmp_path, suffix, router):
    """Every expert is a copy of the MLP: gates that sum to 1 give its output."""
    reference, path = timm_model(), tmp_path / f"vit{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(reference.state_dict(), path)
    moe = partial(MoEBlock, router=router, num_experts=3, max_experts=5)
    model = VisionTransformer(**SIZE, moe=moe, moe_blocks=[1, 2], pretrained=str(path)).eval()
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(images), reference(images), rtol=1e-5, atol=1e-5)


def test_one_upcycled_expert_is_exactly_the_mlp(tmp_path):
    reference, path = timm_model(), tmp_path / "vit.pt"
    torch.save(reference.state_dict(), path)
    moe = partial(MoEBlock, router=TopAny, num_experts=1, max_experts=4)
    model = VisionTransformer(**SIZE, moe=moe, moe_blocks=[1], pretrained=str(path)).eval()
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(images), reference(images), rtol=0, atol=1e-6)
    experts = model.blocks[1].mlp.experts
    for slot in range(4):  # slots not in use start as copies too
        assert torch.equal(experts.up[slot], reference.blocks[1].mlp.fc1.weight)
        assert torch.equal(experts.down_bias[slot], reference.blocks[1].mlp.fc2.bias)


def test_other_image_size_and_classes_are_adapted(tmp_path):
    path = tmp_path / "vit.pt"
    torch.save(timm_model(num_classes=1000, img_size=32).state_dict(), path)
    model = VisionTransformer(**SIZE, moe_blocks=[1], pretrained=str(path))
    assert model.pos_embed.shape == (1, 17, 32)
    assert model(torch.randn(1, 3, 16, 16)).shape == (1, 10)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: path.write_bytes(b"junk"), "damaged"),
        (lambda path: path.unlink(), "neither a file nor a timm model"),
        (lambda path: torch.save({"a": 1}, path), "no state dict"),
        (lambda path: torch.save({"a": torch.ones(1)}, path), "no MLP in block 1"),
    ],
)
def test_bad_weights_are_refused(tmp_path, damage, says):
    path = tmp_path / "vit.pt"
    torch.save(timm_model().state_dict(), path)
    damage(path)
    with pytest.raises(ValueError, match=says):
        VisionTransformer(**SIZE, moe_blocks=[1], pretrained=str(path))


def test_other_widths_are_refused(tmp_path):
    path = tmp_path / "vit.pt"
    torch.save(timm_model().state_dict(), path)
    with pytest.raises(ValueError, match="equal widths"):
        VisionTransformer(
            **SIZE, moe=partial(MoEBlock, expert_ratio=0.5), moe_blocks=[1], pretrained=str(path)
        )
    with pytest.raises(ValueError, match="another architecture"):
        VisionTransformer(**SIZE | {"depth": 4}, moe_blocks=[1], pretrained=str(path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"image_size": 18}, "multiple of patch_size"),
        ({"heads": 3}, "multiple of heads"),
        ({"moe_blocks": [3]}, "no block 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        VisionTransformer(**SIZE | {"moe_blocks": [1]} | change)
