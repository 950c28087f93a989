"""Every tag that docs/monitoring.md names is in TensorBoard's files, and no other is."""

import csv
import math
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

from app.cli.main import main

ROOT = Path(__file__).parents[2]
QUIET = ("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false")
DETAILED = ("--monitor.detail=detailed", "--pictures.time_share=1", "--monitor.every_n_steps=2")
VARIABLES = {"layer": r"blocks\.\d+", "slot": r"\d\d", "loss": r"\w+"}


def documented() -> list[dict[str, str]]:
    """The rows of all tables of the page, by their column names."""
    rows, columns = [], []
    for line in (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = cells
        elif not set(line) <= set("|- "):
            rows.append(dict(zip(columns, cells, strict=True)))
    return rows


def pattern(tag: str) -> str:
    """A documented tag as a regular expression."""
    parts = re.split(r"<(\w+)>", tag.strip("`"))
    return "".join(VARIABLES[p] if i % 2 else re.escape(p) for i, p in enumerate(parts))


def expected(kind: str, methods: set[str]) -> list[tuple[str, str]]:
    """(pattern, where) of the scalars that a run of some methods has."""
    tags = []
    for row in documented():
        words = set(row.get("method", "none").split(", "))
        if "where" not in row or not words & methods or words & {"images", "text"} - {kind}:
            continue
        own = pattern(row["tag"])
        for where in row["where"].split(", "):
            tags.append((f"val_{own}" if where == "val" else own, where))
            if where == "detailed":
                tags.append((f"val_{own}", "val"))
    return tags


def loaded(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0}).Reload()


@pytest.fixture(scope="module")
def vision(tmp_path_factory):
    """A short quickstart: its folder and its events."""
    runs = tmp_path_factory.mktemp("vision")
    short = ("--trainer.max_epochs=2", "--trainer.limit_train_batches=6")
    config = f"--config={ROOT / 'configs' / 'quickstart.yaml'}"
    assert main(["fit", config, f"--runs={runs}", *short, *QUIET, *DETAILED]) == 0
    folder = runs / "quickstart" / "version_0"
    return folder, loaded(folder)


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A short quickstart_lm: its folder and its events."""
    runs = tmp_path_factory.mktemp("language")
    short = (
        "--trainer.max_steps=6", "--trainer.val_check_interval=3", "--trainer.limit_val_batches=3",
        "--trainer.log_every_n_steps=2", "--model.network.dim=32", "--data.block_size=64",
        "--model.network.max_length=64", "--model.sample_tokens=0", "--data.eval_batch_size=4",
        f"--data.cache_dir={runs}",
    )  # fmt: skip
    config = f"--config={ROOT / 'configs' / 'quickstart_lm.yaml'}"
    assert main(["fit", config, f"--runs={runs}", *short, *QUIET, *DETAILED]) == 0
    folder = runs / "quickstart_lm" / "version_0"
    return folder, loaded(folder)


STEPS = {  # what Lightning logs itself has the number of the last step, counted from 0
    "vision": {
        "train": [2, 4, 6, 8, 10, 12], "detailed": [2, 4, 6, 8, 10, 12], "val": [6, 12],
        "validations": [5, 11], "epochs": [5, 11],
    },
    "language": {
        "train": [2, 4, 6], "detailed": [2, 4, 6], "val": [3, 6], "validations": [2, 5],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("run", "methods"),
    [("vision", {"all", "DynMoE", "with that loss"}), ("language", {"all", "with that loss"})],
)
def test_every_documented_tag(run, methods, request):
    """There, finite, and at the right steps; and no other tag."""
    _, events = request.getfixturevalue(run)
    tags, steps = events.Tags()["scalars"], STEPS[run]
    rows = expected({"vision": "images", "language": "text"}[run], methods)
    assert len(rows) > 40
    for own, where in rows:
        found = [tag for tag in tags if re.fullmatch(own, tag)]
        assert found or where == "clock", f"no tag {own}"
        for tag in found:
            values = events.Scalars(tag)
            assert all(math.isfinite(each.value) for each in values), tag
            at = [each.step for each in values]
            if where in steps and "experts/" not in tag:
                assert at == steps[where], tag
            elif where == "steps":
                assert at and at == sorted(at), tag
    unknown = [tag for tag in tags if not any(re.fullmatch(own, tag) for own, _ in rows)]
    assert not unknown


@pytest.mark.parametrize("run", ["vision", "language"])
def test_pictures(run, request):
    """Each documented picture in TensorBoard at each validation, and as a file."""
    folder, events = request.getfixturevalue(run)
    tags, other = events.Tags()["images"], {"vision": "tokens", "language": "patches"}[run]
    patterns = [pattern(r["tag"]) for r in documented() if r["tag"].startswith("`pictures/")]
    patterns = [each for each in patterns if not each.endswith(other)]
    assert len(patterns) == 4
    for own in patterns:
        found = [tag for tag in tags if re.fullmatch(own, tag)]
        assert found, own
        for tag in found:
            assert [each.step for each in events.Images(tag)] == STEPS[run]["val"]
            newest = events.Images(tag)[-1].encoded_image_string
            assert newest.startswith(b"\x89PNG")
            assert (folder / f"{tag}.png").read_bytes().startswith(b"\x89PNG")
    assert not [tag for tag in tags if not any(re.fullmatch(own, tag) for own in patterns)]
    assert (folder / "pictures" / "tokens.html").exists() == (run == "language")


@pytest.mark.parametrize("run", ["vision", "language"])
def test_config_settings_and_layout(run, request):
    """The config as text, hparams with the metrics that they are compared by, charts of layers."""
    folder, events = request.getfixturevalue(run)
    (text,) = events.Tensors("config/text_summary")
    assert (folder / "config.yaml").read_text().splitlines()[-1] in text.tensor_proto.string_val[
        0
    ].decode()

    hparams = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(hparams).session_start_info.hparams
    assert start["router"].string_value == {"vision": "TopAny", "language": "TopK"}[run]
    assert start["seed"].number_value == 0 and start["lr"].number_value > 0
    assert start["experts"].number_value >= 4 and "batch_size" in start
    assert all("." not in key for key in start)
    hparams = events.summary_metadata["_hparams_/experiment"].plugin_data.content
    metrics = plugin_data_pb2.HParamsPluginData.FromString(hparams).experiment.metric_infos
    names = {metric.name.tag for metric in metrics}
    assert names == {
        "vision": {"val/accuracy", "val/loss"}, "language": {"val/loss", "val/perplexity"},
    }[run]  # fmt: skip
    assert names <= set(events.Tags()["scalars"]) and "hp_metric" not in events.Tags()["scalars"]

    (proto,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(proto.tensor_proto.string_val[0])
    charts = {chart.title: chart for category in layout.category for chart in category.chart}
    assert {"active experts", "load cv", "loss", "forward GFLOPs"} <= set(charts)
    for title, chart in charts.items():
        lines = [
            tag for tag in events.Tags()["scalars"] for own in chart.multiline.tag
            if re.match(own, tag)
        ]  # fmt: skip
        assert lines or (title, run) == ("accuracy", "language"), title
    assert len(charts["load cv"].multiline.tag) == len(
        {tag.split("/")[1] for tag in events.Tags()["scalars"] if tag.startswith("routing/")}
    )


def test_the_heat_maps_events_are_the_runs(vision):
    """Births are in the file that the picture marks them from."""
    folder, _ = vision
    with (folder / "expert_events.csv").open(newline="") as file:
        assert [row for row in csv.DictReader(file) if row["event"] == "birth"]
