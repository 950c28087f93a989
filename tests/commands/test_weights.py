"""Saving a timm model's weights, and the recipes that build on them."""

from pathlib import Path

import pytest
import timm
import yaml
from safetensors.torch import load_file

from app.cli import main as cli
from app.models import VisionTransformer

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = "vit_tiny_patch16_224"


def resolved(capsys, *arguments: str) -> dict:
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", *arguments, "--print_config"])
    assert stop.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_saved_weights_are_the_models(tmp_path, capsys, monkeypatch):
    model = timm.create_model(TINY)
    monkeypatch.setattr(timm, "create_model", lambda name, **options: model)
    path = tmp_path / "deep" / "vit.safetensors"
    for flags in ([], ["--random"]):
        assert cli.main(["weights", TINY, "--out", str(path), *flags]) == 0
        saved = load_file(path)
        assert all((saved[key] == value).all() for key, value in model.state_dict().items())
        assert len(saved) == len(model.state_dict())
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert "random weights of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_model", "--out", "w.safetensors"], "timm has no model no_such_model"),
        ([TINY, "--out", "w.bin"], "w.bin must end in .safetensors"),
        ([TINY, "--out", "/proc/w.safetensors", "--random"], "cannot write /proc/w.safetensors"),
    ],
)
def test_mistakes(arguments, message, capsys):
    assert cli.main(["weights", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_upcycled_recipe_starts_from_a_file(tmp_path, capsys):
    """ViT-S's own shapes, patch 16 on 224 pixels resampled to patch 8 on 64, then one step."""
    path = tmp_path / "vit.safetensors"
    assert cli.main(["weights", "vit_small_patch16_224", "--out", str(path), "--random"]) == 0
    recipe = str(CONFIGS / "recipes" / "tiny_imagenet_upcycled.yaml")
    method = str(CONFIGS / "methods" / "topk2.yaml")
    config = resolved(
        capsys, "--config", recipe, "--config", method, "--model.network.pretrained", str(path)
    )
    network = config["model"]["init_args"]["network"]["init_args"]
    arguments = {k: v for k, v in network.items() if k != "moe"}
    model, saved = VisionTransformer(**arguments), load_file(path)
    block = model.blocks[8].mlp
    for expert in block.experts.up:
        assert (expert == saved["blocks.8.mlp.fc1.weight"]).all()
    assert (model.blocks[0].attn.qkv.weight == saved["blocks.0.attn.qkv.weight"]).all()


def test_strong_recipe_changes_augmentation_and_regularisation_only(capsys):
    vision = CONFIGS / "vision" / "cifar10_topk2.yaml"
    plain = resolved(capsys, "--config", str(vision))
    strong = CONFIGS / "recipes" / "strong.yaml"
    changed = resolved(capsys, "--config", str(vision), "--config", str(strong), "--name", "x")

    def flat(tree, prefix=""):
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

    before, after = dict(flat(plain)), dict(flat(changed))
    keys = {key.rpartition(".")[2] for key in after if after[key] != before.get(key)}
    expected = {"mixup", "cutmix", "label_smoothing", "drop_path", "randaugment_ops", "erasing"}
    assert keys - {"name"} == expected
