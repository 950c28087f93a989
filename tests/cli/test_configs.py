"""Every file in configs/ trains and validates two batches, at the width of a toy.

What a file says of depth, MoE layers, experts, routers, callbacks and losses is kept; widths and
batches are overridden, and small files of the same layout stand in for the data sets.
"""

import csv
import io
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from omegaconf import OmegaConf
from PIL import Image

from app.cli import main as cli
from app.cli.config_files import expand
from app.moe import moe_blocks
from app.tasks import LanguageModeling
from data.text import corpus

ROOT = Path(__file__).parents[2] / "configs"
FOLDERS = ("", "vision", "language")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.yaml"))]

TOPK, TOPANY, TERNARY = "app.moe.TopK", "app.moe.TopAny", "app.moe.Ternary"
METHODS = {
    "default": (TOPK, {"k": 2}, "DefaultVectors", {}),
    "dense": None,
    "dynmoe_average": (TOPANY, {}, "AdaptiveExperts", {"initialization": "average"}),
    "dynmoe_most_activated": (TOPANY, {}, "AdaptiveExperts", {"initialization": "most_activated"}),
    "dynmoe_original": (TOPANY, {}, "AdaptiveExperts", {"initialization": "last_removed"}),
    "dynmoe_steps": (TOPANY, {}, "AdaptiveExperts", {"window_steps": [300, 600, 900]}),
    "dynmoe_weighted_average": (
        *(TOPANY, {}, "AdaptiveExperts"),
        {"initialization": "weighted_average", "window_steps": None},
    ),
    "lossfree": (TOPK, {"k": 2}, "LossFreeBalance", {}),
    "tcmoe": (TERNARY, {"k": 2}, None, {}),
    "tcmoe_fine": (TERNARY, {"k": 4}, None, {}),
    "topany": (TOPANY, {}, None, {}),
    "topk1": (TOPK, {"k": 1}, None, {}),
    "topk2": (TOPK, {"k": 2}, None, {}),
    "topk4": (TOPK, {"k": 4}, None, {}),
    "topk8": (TOPK, {"k": 8}, None, {}),
    "topp": ("app.moe.TopP", {"p": 0.4}, None, {}),
}
"""File of a method: router, its settings, the method's callback, its settings; None for dense."""

NAMED_OTHERWISE = {
    "quickstart": "dynmoe_weighted_average",
    "quickstart_lm": "topk2",
    "shakespeare_dynmoe": "dynmoe_steps",
    "fineweb_topk": "topk2",
}
"""Files whose name doesn't end with that of their method."""


def bases(path: Path) -> list[Path]:
    """The files that a config is built from, itself included."""
    return [Path(part) for part in expand(["--config", str(path)]) if part.endswith(".yaml")]


def merged(path: Path) -> dict:
    """A config with its base files, as a plain dictionary."""
    return OmegaConf.to_container(OmegaConf.merge(*map(OmegaConf.load, bases(path))))


def method_of(path: Path) -> str:
    named = [name for name in METHODS if path.stem.endswith(f"_{name}")]
    return NAMED_OTHERWISE.get(path.stem) or max(named, key=len)


# ---- data


def write_parquet(file: Path, column: str, size: int, labels: list[int]) -> None:
    """Random images, encoded and laid out as Hugging Face datasets does."""
    pixels = np.random.default_rng(0).integers(0, 256, (len(labels), size, size, 3), np.uint8)
    cells = []
    for image in pixels:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "PNG")
        cells.append({"bytes": stream.getvalue(), "path": None})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: cells, "label": labels}), file)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small stand-ins for CIFAR-10, Tiny ImageNet and a text."""
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "test"):
        name = f"{split}-00000-of-00001.parquet"
        write_parquet(folder / "cifar10" / name, "img", 32, [i % 10 for i in range(8)])
    for split in ("train", "valid"):
        name = f"{split}-00000-of-00001.parquet"
        write_parquet(folder / "tiny" / name, "image", 64, [25 * i for i in range(8)])
    (folder / "text.txt").write_text("The cat sat on the mat, and the dog looked on. " * 60)
    return folder


def overrides(path: Path, files: Path) -> list[str]:
    """What makes a config small: widths, batches, and the place of its data."""
    config = merged(path)
    source = config["data"]["class_path"]
    options = {"data.batch_size": 4}
    if config["model"]["class_path"].endswith("ImageClassification"):
        options |= {"model.network.dim": 12, "model.network.heads": 2, "trainer.max_epochs": 1}
        if "Digits" not in source:
            options["data.root"] = files / ("cifar10" if "CIFAR10" in source else "tiny")
        else:
            options["data.batch_size"] = 16
        return [f"--{key}={value}" for key, value in options.items()]
    options |= {"model.network.dim": 16, "model.network.num_heads": 2, "model.sample_tokens": 3}
    options |= {"model.network.max_length": 16, "data.block_size": 16, "data.dataset": "null"}
    options |= {"trainer.max_steps": 2, "trainer.val_check_interval": 1}
    options |= {"data.cache_dir": files / "cache"}
    if "HuggingFace" in source:
        options |= {"data": "data.TextData", "data.tokenizer": "bytes", "data.files": None}
        options |= {"model.network.num_kv_heads": 1, "model.network.hidden": 24}
        options |= {"model.network.vocab_size": 256, "trainer.accumulate_grad_batches": 2}
    if path.stem != "quickstart_lm":  # whose text is embedded
        options["data.files"] = files / "text.txt"
    # The class first: what follows are its settings.
    return [f"--{key}={options[key]}" for key in sorted(options)]


def fit(path: Path, runs: Path, *options: str) -> Path:
    """Trains on two batches and validates on one; the run's folder."""
    command = ["fit", "--config", str(path), f"--runs={runs}", "--trainer.accelerator=cpu"]
    command += ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"]
    command += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    command += ["--trainer.log_every_n_steps=1", "--monitor.every_n_steps=1"]
    command += ["--pictures.enabled=false", *options]
    assert cli.main(command) == 0
    return runs / path.stem / "version_0"


# ---- every file trains


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_trains_and_validates(path: Path, files: Path, tmp_path: Path) -> None:
    run = fit(path, tmp_path, *overrides(path, files))

    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert rows and all(math.isfinite(float(row["val/loss"])) for row in rows)
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 2
    assert all(v.isfinite().all() for v in checkpoint["state_dict"].values())

    config = yaml.safe_load((run / "config.yaml").read_text())
    check_method(config, METHODS[method_of(path)], path.stem)
    network = config["model"]["init_args"]["network"]["init_args"]
    layers = {key.split(".")[2] for key in checkpoint["state_dict"] if ".mlp.router." in key}
    assert layers == set(map(str, network["moe_blocks"]))


def check_method(config: dict, expected: tuple | None, name: str) -> None:
    """Router and callback of a resolved config are those of the method that its name promises."""
    network = config["model"]["init_args"]["network"]["init_args"]
    added = {each["class_path"]: each["init_args"] for each in config["trainer"]["callbacks"] or []}
    if expected is None:
        assert network["moe_blocks"] == [] and not added
        return
    router, settings, callback, callback_settings = expected
    if name == "fineweb_default":
        settings = {"k": 1}  # the paper's 8c1
    if name == "shakespeare_dynmoe":
        callback_settings = callback_settings | {"window_steps": [50, 100, 150]}  # a short run
    moe = network["moe"]["init_args"]
    assert network["moe_blocks"]
    assert moe["router"]["class_path"] == router
    assert settings.items() <= moe["router"]["init_args"].items()
    assert list(added) == ([f"callbacks.{callback}"] if callback else [])
    assert all(callback_settings.items() <= each.items() for each in added.values())
    assert (moe["default_vectors"] == "ema") == (callback == "DefaultVectors")
    assert (moe["max_experts"] == 16) == (callback == "AdaptiveExperts")


def test_every_recipe_and_method_is_used() -> None:
    suites = sorted((ROOT / "suites").glob("*.yaml"))
    entries = [entry for path in suites for entry in yaml.safe_load(path.read_text())["entries"]]
    files = [ROOT / "suites" / file for entry in entries for file in entry["configs"]]
    used = {base.resolve() for path in [*FILES, *files] for base in bases(path)}
    parts = {p for folder in ("recipes", "methods") for p in (ROOT / folder).glob("*.yaml")}
    assert parts - used == set()
    assert {path.stem for path in (ROOT / "methods").glob("*.yaml")} == set(METHODS)


def test_no_setting_is_written_twice_in_a_chain_of_files() -> None:
    """A file of a recipe or experiment changes what it builds on, or leaves it alone."""
    for path in [*FILES, *(ROOT / "recipes").glob("*.yaml"), *(ROOT / "methods").glob("*.yaml")]:
        *below, own = bases(path)
        if not below:
            continue
        inherited = OmegaConf.to_container(OmegaConf.merge(*map(OmegaConf.load, below)))
        repeated = [
            key
            for key, value in leaves(yaml.safe_load(own.read_text()))
            if key[-1] != "class_path" and dict(leaves(inherited)).get(key) == value
        ]
        assert not repeated, f"{path.name} repeats {repeated}"


def leaves(tree: dict, above: tuple[str, ...] = ()):
    for key, value in tree.items():
        if isinstance(value, dict) and value and key != "losses":  # replaced as a whole
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


# ---- FineWeb: the stream, and the sizes


def test_fineweb_streams_its_documents(files: Path, tmp_path: Path, monkeypatch) -> None:
    """The data section as it stands: only the documents are local, and the sizes small."""
    pytest.importorskip("tokenizers")
    asked = []

    def documents(dataset, name, split, field, start, stop):
        asked.append((dataset, name, split, field))
        rows = [f"Document {i}: the cat sat on the mat number {i * i}. " * 4 for i in range(90)]
        yield from rows[start:stop]

    monkeypatch.setattr(corpus, "stream_documents", documents)
    path = ROOT / "language" / "fineweb_tcmoe.yaml"
    replaced = (
        "--data=",
        "--data.tokenizer",
        "--data.files",
        "--data.dataset",
        "--model.network.v",
    )
    small = [o for o in overrides(path, files) if not o.startswith(replaced)]
    small += ["--data.vocab_size=300", "--model.network.vocab_size=300", "--data.val_documents=9"]
    run = fit(path, tmp_path, *small, f"--data.cache_dir={tmp_path / 'cache'}")
    assert set(asked) == {("HuggingFaceFW/fineweb-edu", "sample-10BT", "train", "text")}
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["tokenizer"]["kind"] == "bpe"


def full_size(path: Path) -> LanguageModeling:
    """The model that a config describes, without memory for its weights."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LanguageModeling, "model")
    with torch.device("meta"):
        return parser.instantiate_classes(
            parser.parse_object({"model": merged(path)["model"]})
        ).model


@pytest.mark.parametrize(
    ("name", "total", "experts", "active"),
    [
        # TC-MoE's model card: 681 M active, 2.3 B parameters.
        ("fineweb_topk", 2.34e9, 2.21e9, 681e6),
        ("fineweb_tcmoe", 2.34e9, 2.21e9, 681e6),
        # Default MoE: 1.6 B parameters in the experts, 200 M of them active. Its total of 1.96 B
        # has a larger vocabulary.
        ("fineweb_default", 1.78e9, 1.62e9, 355e6),
    ],
)
def test_fineweb_models_have_the_sizes_of_the_papers(name, total, experts, active) -> None:
    network = full_size(ROOT / "language" / f"{name}.yaml").network
    all_weights = sum(p.numel() for p in network.parameters())
    blocks = moe_blocks(network)
    in_experts = sum(p.numel() for b in blocks.values() for p in b.experts.parameters())
    k = next(iter(blocks.values())).router.k
    assert all_weights == pytest.approx(total, rel=0.01)
    assert in_experts == pytest.approx(experts, rel=0.01)
    assert all_weights - in_experts * (1 - k / 8) == pytest.approx(active, rel=0.01)


def test_fineweb_vocabularies_and_batches_fit() -> None:
    for path in (ROOT / "language").glob("fineweb_*.yaml"):
        config = merged(path)
        network, source = config["model"]["init_args"]["network"]["init_args"], config["data"]
        assert network["vocab_size"] == source["init_args"]["vocab_size"]
        assert network["max_length"] == source["init_args"]["block_size"] == 2048
        assert network["moe_blocks"] == list(range(network["depth"]))
        blocks = source["init_args"]["batch_size"] * config["trainer"]["accumulate_grad_batches"]
        tokens = blocks * 2048
        assert tokens == 2**22  # the 4 M tokens of a step
        assert config["trainer"]["max_steps"] * tokens <= source["init_args"]["max_tokens"]
