"""Exported networks: the same outputs, without unused slots, Lightning or unpickling."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn

import app
from app.cli.main import main
from app.commands.export import export
from app.errors import ConfigError
from app.models.exported import CONFIG, KNOWN, WEIGHTS, build_network, checksum
from app.moe import MoEBlock, moe_blocks

CONFIGS = Path(__file__).parents[2] / "configs"
SLOTS = 6
QUIET = (
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
)
VISION = {"image_size": 8, "patch_size": 4, "channels": 1, "dim": 16, "depth": 3, "heads": 2}
LANGUAGE = {"vocab_size": 40, "dim": 16, "depth": 3, "num_heads": 2, "max_length": 12}


def network_spec(kind: str, router: dict | str | None, **moe) -> dict:
    """A small network with two MoE layers of six slots, as a config describes it."""
    if isinstance(router, str):
        router = {"class_path": f"app.moe.{router}"}
    experts = "app.moe.GeluExperts" if kind == "vision" else "app.moe.SwiGLUExperts"
    block = {"class_path": "app.moe.MoEBlock"}
    block["init_args"] = {"num_experts": SLOTS, "experts": {"class_path": experts}, **moe}
    if router is not None:
        block["init_args"]["router"] = router
    name = "VisionTransformer" if kind == "vision" else "Decoder"
    sizes = VISION if kind == "vision" else LANGUAGE
    arguments = sizes | {"moe_blocks": [0, 2] if router is not None else [], "moe": block}
    return {"class_path": f"app.models.{name}", "init_args": arguments}


@torch.no_grad()
def lively(network: nn.Module, holes: dict[str, list[int]]) -> nn.Module:
    """Random weights, buffers included, and experts missing in the given slots."""
    generator = torch.Generator().manual_seed(1)
    for name, value in network.named_parameters():
        if not name.endswith("log_temperature"):
            noise = torch.randn(value.shape, generator=generator)
            value.copy_(0.3 * noise + ("norm" in name and name.endswith("weight")))
    for name, block in moe_blocks(network).items():
        if hasattr(block.router, "balance_bias_E"):
            block.router.balance_bias_E.normal_(std=0.05, generator=generator)
        if block.default_vectors == "ema":
            block.default_ED.normal_(generator=generator)
            block.default_seen_E.fill_(True)
        for slot in holes.get(name, []):
            block.deactivate(slot)
    return network.eval()


def checkpoint(folder: Path, network: nn.Module, spec: dict, **more) -> Path:
    """A checkpoint of this network, as a run would leave it."""
    config = {"model": {"class_path": "app.tasks.Any", "init_args": {"network": spec}}}
    state = {f"network.{name}": value for name, value in network.state_dict().items()}
    path = folder / "last.ckpt"
    torch.save({"state_dict": state, "config": yaml.safe_dump(config)} | more, path)
    return path


def inputs(network: nn.Module, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    if kind == "language":
        return torch.randint(40, (3, 12), generator=generator)
    dtype = next(network.parameters()).dtype
    return torch.randn(5, 1, 8, 8, generator=generator, dtype=torch.float64).to(dtype)


def router(name: str, **arguments) -> dict:
    return {"class_path": f"app.moe.{name}", "init_args": arguments}


CASES = {
    "dense": (None, {}),
    "mixture": ("Dense", {}),
    "top2": (router("TopK", k=2, normalize=True), {}),
    "top5 of 3": (router("TopK", k=5), {}),
    "noisy": (router("TopK", k=2, noise=True, jitter=0.1), {}),
    "sparsemixer": (router("TopK", k=2, estimator="sparsemixer"), {}),
    "topp": (router("TopP", p=0.6), {}),
    "topany": ("TopAny", {"max_experts": SLOTS, "num_experts": 4}),
    "topany mlp": (router("TopAny", mlp_hidden=6, learn_temperature=True, gates="score"), {}),
    "topany none": (router("TopAny", fallback="none"), {}),
    "ternary": (router("Ternary", k=2, null_shift=-1.0), {}),
    "ternary levels": (router("Ternary", k=6, gates="selected", levels=[1.0, -1.0, 0.5]), {}),
    "default vectors": (router("TopK", k=1), {"default_vectors": "ema"}),
    "trained vectors": (router("TopP"), {"default_vectors": "trained"}),
    "ternary vectors": (router("Ternary", gates="raw"), {"default_vectors": "ema"}),
    "shared": (router("TopK"), {"shared_experts": 2, "expert_ratio": 0.5}),
}
HOLES = {"blocks.0": [1, 2, 5], "blocks.2": [3]}  # in the middle, and not as many in each layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["vision", "language"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_stay(tmp_path, name: str, kind: str, dtype: torch.dtype) -> None:
    spec = network_spec(kind, CASES[name][0], **CASES[name][1])
    network = lively(build_network(spec), HOLES).to(dtype)
    if name.startswith("topany"):  # all slots lived once, also those that were free at the start
        for block in moe_blocks(network).values():
            block.active_E |= torch.tensor([False] * 4 + [True] * 2)
        moe_blocks(network)["blocks.0"].deactivate(5)
    export(checkpoint(tmp_path, network, spec), tmp_path / "out")
    loaded = app.load_model(tmp_path / "out")
    x = inputs(network, kind)
    with torch.inference_mode():
        expected, got = network(x), loaded(x)
    assert got.dtype == dtype and not loaded.training
    close = {torch.float32: 3e-6, torch.float64: 1e-14}[dtype]  # of the largest output
    scale = float(expected.abs().max())
    torch.testing.assert_close(got, expected, rtol=0, atol=close * scale)
    blocks = moe_blocks(loaded)
    assert {n: block.slots for n, block in blocks.items()} == (
        {} if name == "dense" else {"blocks.0": 3, "blocks.2": 5}
    )
    for block in blocks.values():
        assert block.active_E.all()
        assert all(len(p) == block.slots for p in block.experts.parameters())


@pytest.mark.parametrize("kind", ["vision", "language"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "topany"])
def test_outputs_are_the_same_bits_where_no_slot_goes(tmp_path, name: str, kind: str) -> None:
    spec = network_spec(kind, CASES[name][0], **CASES[name][1])
    network = lively(build_network(spec), {})
    export(checkpoint(tmp_path, network, spec), tmp_path / "out")
    x = inputs(network, kind)
    with torch.inference_mode():
        assert torch.equal(app.load_model(tmp_path / "out")(x), network(x))


def test_tied_embeddings_and_bfloat16(tmp_path) -> None:
    spec = network_spec("language", "TopK")
    spec["init_args"] |= {"tie_embeddings": True, "num_kv_heads": 1, "moe": "app.moe.MoEBlock"}
    spec["init_args"]["moe"] = network_spec("language", "TopK")["init_args"]["moe"]
    network = lively(build_network(spec), HOLES).bfloat16()
    export(checkpoint(tmp_path, network, spec), tmp_path / "out")
    loaded = app.load_model(tmp_path / "out")
    assert loaded.head.weight is loaded.embed.weight
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    x = inputs(network, "language")
    with torch.inference_mode():
        torch.testing.assert_close(loaded(x), network(x), rtol=0.02, atol=0.02)


def test_the_default_moe_of_a_decoder(tmp_path) -> None:
    spec = {"class_path": "app.models.Decoder", "init_args": LANGUAGE | {"moe_blocks": [1]}}
    spec["init_args"]["moe"] = "app.models.decoder.swiglu_moe"
    network = lively(build_network(spec), {"blocks.1": [0]})
    export(checkpoint(tmp_path, network, spec), tmp_path / "out")
    assert moe_blocks(app.load_model(tmp_path / "out"))["blocks.1"].slots == 7


def test_compact_can_fail() -> None:
    """Keeping other slots than the active ones changes the output."""
    block = lively(MoEBlock(8, 8, num_experts=4), {"": [1]})
    x = torch.randn(9, 8)
    before = block(x)
    block.keep_slots([0, 1, 3])
    assert not torch.allclose(block(x), before)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A short run of each modality, with experts missing in the vision run's checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    for config in ("quickstart.yaml", "quickstart_lm.yaml"):
        argv = ["fit", f"--config={CONFIGS / config}", f"--runs={folder}", *QUIET]
        more = ["--model.sample_tokens=0"] if "lm" in config else ["--trainer.limit_val_batches=1"]
        if "lm" in config:
            more += [f"--data.cache_dir={folder / 'cache'}", "--trainer.limit_val_batches=1"]
            more += ["--trainer.val_check_interval=null", "--trainer.check_val_every_n_epoch=1"]
        assert main([*argv, *more]) == 0
    return folder


READ = """
import sys, torch, app
assert "torch" not in vars(app)
for folder in sys.argv[1:]:
    model = app.load_model(folder)
    images = model.exported["images"]
    if images:
        size = images["image_size"]
        y = model(torch.zeros(2, images["channels"], size, size))
    else:
        y = model(torch.arange(10)[None])
    print(type(model).__name__, tuple(y.shape), model.training)
for name in ("lightning", "jsonargparse", "torchmetrics", "data"):
    assert name not in sys.modules, name
"""


def test_runs_are_exported_and_read_without_lightning(runs, tmp_path, capsys) -> None:
    held, folders = {}, []
    for run in ("quickstart", "quickstart_lm"):
        out = tmp_path / "deep" / run
        last = ["--ckpt_path", "last", "--name", run, "--runs", str(runs)]
        assert main(["export", *last, "--out", str(out)]) == 0
        assert f"wrote {out}: " in capsys.readouterr().out
        held[run] = json.loads((out / CONFIG).read_text())
        folders.append(str(out))
        assert held[run]["trained"]["checkpoint"] == "last.ckpt"
        assert held[run]["trained"]["step"] == 2
    read = [sys.executable, "-c", READ, *folders]
    done = subprocess.run(read, capture_output=True, text=True, check=False)
    expected = ["VisionTransformer (2, 10) False", "Decoder (1, 10, 256) False"]
    assert done.stdout.splitlines() == expected, done.stderr
    images, text = held["quickstart"], held["quickstart_lm"]
    assert images["images"]["class_names"] == [str(digit) for digit in range(10)]
    assert images["images"]["mean"] == [0.3053] and images["text"] is None
    assert set(images["experts"].values()) == {4}  # of 16 slots
    assert text["text"]["tokenizer"]["kind"] == "bytes" and text["images"] is None
    assert sorted(file.name for file in (tmp_path / "deep").iterdir()) == sorted(held)


@pytest.fixture
def exported(tmp_path) -> Path:
    spec = network_spec("vision", "TopK")
    path = checkpoint(tmp_path, lively(build_network(spec), HOLES), spec)
    export(path, tmp_path / "out")
    return tmp_path / "out"


def test_nothing_is_overwritten_unasked(exported, capsys) -> None:
    argv = ["export", "--ckpt_path", str(exported.parent / "last.ckpt"), "--out", str(exported)]
    before = (exported / CONFIG).stat().st_mtime_ns
    assert main(argv) == 2
    assert "is not empty; choose another folder or add --overwrite" in capsys.readouterr().err
    assert (exported / CONFIG).stat().st_mtime_ns == before
    assert main([*argv, "--overwrite"]) == 0
    assert (exported / CONFIG).stat().st_mtime_ns > before
    (exported / "thesis.tex").write_text("years of work")
    assert main([*argv, "--overwrite"]) == 2
    assert "holds more than an export (thesis.tex)" in capsys.readouterr().err
    assert sorted(f.name for f in exported.iterdir()) == [CONFIG, WEIGHTS, "thesis.tex"]


@pytest.mark.parametrize("step", ["save_model", "file_sha256", "load_model"])
def test_an_interrupted_export_leaves_the_old_one(exported, monkeypatch, step) -> None:
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"app.commands.export.{step}", full)
    before = (exported / WEIGHTS).read_bytes()
    with pytest.raises(ConfigError, match="No space left"):
        export(exported.parent / "last.ckpt", exported, overwrite=True)
    assert (exported / WEIGHTS).read_bytes() == before
    assert {file.name for file in exported.parent.iterdir()} == {"last.ckpt", "out"}


def rewritten(folder: Path, **entries) -> None:
    """Changes config.json and makes its checksum right again."""
    config = json.loads((folder / CONFIG).read_text()) | entries
    config["checksum"] = checksum(config)
    (folder / CONFIG).write_text(json.dumps(config))


def foreign_class(folder: Path) -> None:
    network = network_spec("vision", {"class_path": "os.system", "init_args": {"k": "touch x"}})
    rewritten(folder, network=network)


def foreign_weights(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["head.weight"] = weights["head.weight"][:3].clone()
    save_file(weights, folder / WEIGHTS)
    from app.models.exported import file_sha256

    rewritten(folder, weights=file_sha256(folder / WEIGHTS))


def a_pickle(folder: Path) -> None:
    torch.save({"x": 1}, folder / WEIGHTS)


def flipped(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (folder / WEIGHTS).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "config.json is missing"),
        (lambda folder: (folder / WEIGHTS).unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / CONFIG).write_text("{"), "not readable as JSON"),
        (lambda folder: (folder / CONFIG).write_text("[]"), "not written by python -m app export"),
        (lambda folder: rewritten(folder, version=9), "format version 9, this program reads 1"),
        (
            lambda f: (f / CONFIG).write_text((f / CONFIG).read_text().replace("16", "32")),
            "damaged",
        ),
        (lambda folder: rewritten(folder, experts={}), "do not fit together"),
        (lambda folder: rewritten(folder, experts={"blocks.0": 3, "blocks.2": 99}), "fit together"),
        (lambda folder: rewritten(folder, network="app.moe.TopK"), "expected a class_path"),
        (foreign_class, "os.system is no class of app.models or app.moe"),
        (foreign_weights, "misshape head.weight"),
        (a_pickle, "damaged, its checksum is wrong"),
        (flipped, "damaged, its checksum is wrong"),
    ],
)
def test_damaged_and_foreign_folders_are_refused(exported, damage, says) -> None:
    damage(exported)
    with pytest.raises(ConfigError, match=says) as refusal:
        app.load_model(exported)
    assert "\n" not in str(refusal.value)


def test_reading_names_no_other_classes() -> None:
    assert all(path.startswith(("app.models", "app.moe")) for path in KNOWN)
    for value in KNOWN.values():
        assert value.__module__.startswith(("app.models", "app.moe"))


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"config": "model: 3"}, "has no model.network"),
        ({"config": "model: ["}, "has no model.network"),
        ({"state_dict": {}}, "do not fit its model"),
    ],
)
def test_unfit_checkpoints_are_refused(tmp_path, capsys, entries, says) -> None:
    spec = network_spec("vision", "TopK")
    path = checkpoint(tmp_path, build_network(spec), spec, **entries)
    assert main(["export", "--ckpt_path", str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_network_of_the_users_own_is_refused(tmp_path) -> None:
    spec = network_spec("vision", "TopK")
    path = checkpoint(tmp_path, build_network(spec), {"class_path": "mine.Net", "init_args": {}})
    with pytest.raises(ConfigError, match=r"mine\.Net is no class of app\.models or app\.moe"):
        export(path, tmp_path / "out")
