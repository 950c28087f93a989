"""The command line: runs end to end on embedded data, and mistakes cost one clear line."""

import csv
import io
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.cli.config_files import expand, with_run_config
from app.cli.main import main
from app.errors import ConfigError
from app.runs.checkpoints import newest_checkpoint

CONFIGS = Path(__file__).parents[2] / "configs"
SHORT = ("--trainer.max_epochs=2", "--trainer.limit_train_batches=6", "--trainer.accelerator=cpu")


def fit(tmp_path, *more, config="quickstart.yaml") -> int:
    runs = f"--runs={tmp_path}"
    quiet = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")
    quiet += ("--pictures.enabled=false",)  # tests/callbacks/test_monitoring_docs.py draws them
    return main(["fit", "--config", str(CONFIGS / config), runs, *SHORT, *quiet, *more])


def status(*argv) -> int:
    try:
        return main(list(argv))
    except SystemExit as stop:
        return stop.code


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short quickstart run: its folder."""
    runs = tmp_path_factory.mktemp("runs")
    assert fit(runs, "--monitor.every_n_steps=2") == 0
    return runs / "quickstart" / "version_0"


def test_a_run_leaves_its_folder(run):
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_epochs"] == 2
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert {"epoch", "step", "val/accuracy", "val/loss"} <= set(rows[0])
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert (run / "expert_events.csv").read_text().startswith("step,epoch,layer,event,slot")


def test_tensorboard_has_the_documented_tags(run):
    events = EventAccumulator(str(run)).Reload()
    tags = set(events.Tags()["scalars"])
    statistics = (
        "active_experts",
        "experts_per_token",
        "load_cv",
        "router_entropy",
        "unrouted_fraction",
    )
    layers = [
        f"routing/{layer}/{name}" for layer in ("blocks.1", "blocks.2") for name in statistics
    ]
    assert {"train/loss", "val/accuracy", "val/loss", *layers} <= tags
    for tag in layers:
        values = events.Scalars(tag)
        assert [value.step for value in values] == [2, 4, 6, 8, 10, 12]
        assert all(torch.isfinite(torch.tensor(value.value)) for value in values)


def test_validate_and_test_need_the_checkpoint_alone(run, capsys):
    checkpoint = str(run / "checkpoints" / "last.ckpt")
    for command in ("validate", "test"):
        assert main([command, f"--ckpt_path={checkpoint}", "--trainer.accelerator=cpu"]) == 0
    out = capsys.readouterr().out
    logged = list(csv.DictReader((run / "metrics.csv").open()))[-1]["val/accuracy"]
    assert logged[:8] in out  # validation says what the last row of the run says


def test_without_a_checkpoint_validation_says_whose_weights_it_uses(tmp_path, caplog):
    limit = ["--trainer.limit_val_batches=1", "--trainer.accelerator=cpu", f"--runs={tmp_path}"]
    with caplog.at_level("INFO"):
        assert main(["validate", "--config=configs/quickstart.yaml", *limit]) == 0
    assert "weights that training would start from" in caplog.text


def test_a_reader_that_has_had_enough_is_no_error(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "suite", "configs/suites/digits.yaml", "--dry-run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=120) == 128 + signal.SIGPIPE


def test_predict_writes_a_table(run, capsys):
    checkpoint = str(run / "checkpoints" / "last.ckpt")
    assert main(["predict", f"--ckpt_path={checkpoint}", "--trainer.accelerator=cpu"]) == 0
    (path,) = run.parent.glob("predictions.csv")
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 359
    assert rows[0]["sample"].startswith("row ")
    assert all(0 <= int(row["class"]) < 10 and 0 < float(row["probability"]) <= 1 for row in rows)


def test_resuming_last_goes_on_in_the_same_folder(tmp_path, capsys):
    assert fit(tmp_path, "--trainer.max_epochs=1") == 0
    assert fit(tmp_path, "--ckpt_path=last") == 0
    (version,) = (tmp_path / "quickstart").iterdir()
    rows = list(csv.DictReader((version / "metrics.csv").open()))
    assert [row["epoch"] for row in rows] == ["0", "1"]


def test_last_passes_over_a_truncated_checkpoint(run, tmp_path, capsys):
    whole = run / "checkpoints" / "last.ckpt"
    folder = tmp_path / "version_0" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "whole.ckpt").write_bytes(whole.read_bytes())
    (folder / "last.ckpt").write_bytes(whole.read_bytes()[:-5000])
    assert newest_checkpoint(tmp_path).name == "whole.ckpt"
    assert "last.ckpt: it is not complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--model.network.dpth=3", "unknown key model.network.dpth (did you mean depth?)"),
        ("--model.network.depth=zz", "model.network.depth: expected int, got zz"),
        ("--model.network.moe.router.k=3", "unknown key model.network.moe.router.k"),
        ("--model.network.moe.router=TopKK", "there is no class TopKK"),
        ("--model.network.moe.router.gates=soft", "expected one of 'equal', 'score', got soft"),
        ("--model.network.moe.num_experts=0", "num_experts must lie between 1 and max_experts"),
        ("--model.network.moe.default_vectors=ema", "can't be combined with the router TopAny"),
        ("--model.network.moe_blocks=[7]", "there is no block 7"),
        ("--model.network.num_classes=5", "set num_classes: 10"),
        ("--model.network.pretrained=nowhere.pt", "neither a file nor a timm model nowhere.pt"),
        ("--model.losses={foo: 0.1}", "no loss 'foo'; there are load_balance"),
        ("--model.losses={reward: 0.1}", "defined for ternary routing only"),
        ("--model.optimizer.lr=-1", "model.optimizer: Invalid learning rate"),
        ("--model.schedule=linear", "model.schedule: expected one of 'cosine', 'constant'"),
        ("--model.warmup=2", "warmup is a share of all steps"),
        ("--trainer.max_epoch=3", "did you mean --trainer.max_epochs"),
        ("--trainer.callbacks+=Foo", "there is no class Foo"),
        ("--trainer.callbacks+=callbacks.DefaultVectors", "no MoE block has default_vectors"),
        ("--trainer.callbacks+=callbacks.LossFreeBalance", "takes no account of a bias; use TopK"),
        ("--data.root=x", "unknown key data.root; DigitsData accepts: channels"),
        ("--data.batch_size=0", "batch_size is 0"),
        ("--data.batch_size=5000", "batch_size=5000 is larger than the dataset"),
        ("--ckpt_path=nowhere.ckpt", "there is no checkpoint nowhere.ckpt"),
        ("--ckpt_path=last", "there is no complete checkpoint below"),
        ("--config=nowhere.yaml", "there is no file nowhere.yaml"),
    ],
)
def test_a_mistake_costs_one_line(tmp_path, capsys, arguments, says):
    with pytest.raises(SystemExit) as stop:
        raise SystemExit(fit(tmp_path, arguments))
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert says in lines[0]
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_a_missing_gpu_is_named(tmp_path, capsys):
    assert fit(tmp_path, "--trainer.accelerator=cuda") == 2
    assert "accelerator" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a list", "a config is a mapping"),
        ("model: [", "not valid YAML"),
        ("base: [nowhere.yaml]", "base file nowhere.yaml does not exist"),
        ("base: nowhere.yaml", "`base` must be a list"),
        ("base: [bad.yaml]", "builds on itself"),
    ],
)
def test_a_bad_config_file_is_named(tmp_path, capsys, text, says):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert status("fit", "--config", str(path)) == 2
    line = capsys.readouterr().err
    assert "bad.yaml" in line
    assert says in line


def test_a_checkpoint_of_another_model_names_what_differs(run, tmp_path, capsys):
    checkpoint = run / "checkpoints" / "last.ckpt"
    assert fit(tmp_path, f"--ckpt_path={checkpoint}", "--model.network.dim=32") == 2
    assert "model.network.dim is 32 here, 64 there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"junk", "is damaged or is no checkpoint"),
        ({"weights": 1}, "it holds no weights"),
        ({"state_dict": {}}, "it holds no config"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, capsys, content, says):
    path = tmp_path / "bad.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert fit(tmp_path, f"--ckpt_path={path}") == 2
    line = capsys.readouterr().err
    assert "bad.ckpt" in line
    assert says in line


def test_bases_come_first_and_the_command_line_last(tmp_path):
    for name, text in (("a", ""), ("b", "base: [a.yaml]"), ("c", "base: [a.yaml, b.yaml]")):
        (tmp_path / f"{name}.yaml").write_text(text)
    argv = expand(["fit", "--config", str(tmp_path / "c.yaml"), "--x=1"])
    files = [Path(argument).name for argument in argv if argument.endswith(".yaml")]
    assert files == ["a.yaml", "a.yaml", "b.yaml", "c.yaml"]
    assert argv[-1] == "--x=1"
    assert argv[argv.index("--name") + 1] == "c"
    with pytest.raises(ConfigError, match="needs a file"):
        expand(["fit", "--config"])


def test_the_config_of_a_checkpoints_run_is_found(run, tmp_path):
    checkpoint = str(run / "checkpoints" / "last.ckpt")
    argv = with_run_config(["test", "--ckpt_path", checkpoint])
    assert argv[1:3] == ["--config", str(run / "config.yaml")]
    given = ["test", "--config", "x.yaml", "--ckpt_path", checkpoint]
    assert with_run_config(given) == given


def test_help_and_print_config(capsys):
    assert status("--help") == 0
    assert "generate" in capsys.readouterr().out
    config = str(CONFIGS / "quickstart.yaml")
    assert status("fit", "--config", config, "--print_config") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["network"]["class_path"] == "app.models.VisionTransformer"


def png(value: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (value, 100, 50)).save(buffer, "PNG")
    return buffer.getvalue()


def parquet(folder: Path, labels: list[int]) -> None:
    """CIFAR-10 in Hugging Face's layout, an image for each label."""
    folder.mkdir()
    images = [{"bytes": png(label % 256), "path": None} for label in labels]
    for split in ("train", "test"):
        pq.write_table(pa.table({"img": images, "label": labels}), folder / f"{split}-0.parquet")


def truncated(folder: Path) -> None:
    parquet(folder, list(range(10)))
    path = folder / "train-0.parquet"
    path.write_bytes(path.read_bytes()[:-100])


def without_images(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / split / "cat").mkdir(parents=True)


@pytest.mark.parametrize(
    ("make", "data", "names"),
    [
        (truncated, "CIFAR10Data", "train-0.parquet"),
        (without_images, "ImageFolderData", "images"),
        (lambda folder: parquet(folder, [3, 10]), "CIFAR10Data", "label"),
        (lambda folder: None, "ImageFolderData", "images"),
    ],
    ids=["truncated parquet", "folder without images", "label out of range", "missing path"],
)
def test_bad_images_cost_one_line(tmp_path, capsys, make, data, names):
    folder = tmp_path / "images"
    make(folder)
    arguments = (f"--data=data.{data}", f"--data.root={folder}", "--data.batch_size=1")
    config = "vision/cifar10_micro_topk2.yaml"
    assert fit(tmp_path, *arguments, config=config) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert names in lines[0]


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("default", ["--model.network.moe.router=TopP", "--model.losses={load_balance: 0.01}"]),
        ("default", ["--model.network.moe.router.estimator=sparsemixer"]),
        (
            "default",
            ["--model.network.moe.router=Ternary", "--model.network.moe.router.gates=raw"],
        ),
        (
            "dynmoe_weighted_average",
            ["--model.losses={topany: 0.01, load_balance: 0.01, efficiency: 0.01}"],
        ),
        ("topk2", ["--model.balance_over=step", "--trainer.accumulate_grad_batches=2"]),
        (
            "topk4",
            [
                "--model.network.moe.num_experts=16",
                "--model.network.moe.expert_ratio=0.5",
                "--model.network.moe.shared_experts=1",
            ],
        ),
    ],
)
def test_the_combinations_of_the_readme_train(tmp_path, method, more):
    method = f"--config={CONFIGS / 'methods' / method}.yaml"
    assert fit(tmp_path, method, *more, "--name=mine", config="recipes/digits.yaml") == 0
    (table,) = tmp_path.rglob("metrics.csv")
    assert len(table.read_text().splitlines()) == 3
