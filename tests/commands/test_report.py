"""`python -m app report`: its figures against plain csv and statistics, and broken folders."""

import csv
import json
import re
import statistics
from pathlib import Path

import pytest
import yaml
from matplotlib.text import Text

from app.cli.main import main
from app.commands.report.content import DASH, duration
from app.commands.report.methods import method_of
from app.commands.report.pictures import _overlap, place_labels
from app.commands.report.published import tables
from app.commands.report.runs import find_runs
from app.commands.report.summary import sections, stat
from app.figures import new_figure

LAYERS = ("blocks.1", "blocks.3")


def config(
    name, seed, router="TopK", k=2, epochs=10, data="CIFAR10Data", callbacks=(), package="app.moe",
    **losses,
):  # fmt: skip
    moe = {"router": {"class_path": f"{package}.{router}", "init_args": {"k": k}}, "num_experts": 8}
    network = {"dim": 128, "depth": 4, "moe_blocks": [1, 3]}
    return {
        "seed_everything": seed,
        "trainer": {"max_epochs": epochs, "max_steps": -1, "callbacks": list(callbacks)},
        "model": {
            "class_path": "app.tasks.ImageClassification",
            "init_args": {
                "network": {
                    "class_path": "app.models.VisionTransformer",
                    "init_args": network
                    | {"moe": {"class_path": "app.moe.MoEBlock", "init_args": moe}},
                },
                "losses": losses,
            },
        },
        "data": {"class_path": f"data.{data}", "init_args": {"root": "/some/where/cifar"}},
        "name": name,
        "runs": "/some/where/runs",
    }


def adaptive(start="weighted_average"):
    init = {"initialization": start}
    return [{"class_path": "callbacks.AdaptiveExperts", "init_args": init}]


def write_run(root: Path, its: dict, epochs: int, offset=0.0, metric="val/accuracy") -> Path:
    folder = root / its["name"] / "version_0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(its))
    rows = []
    for epoch in range(epochs):
        row = {"epoch": epoch, "step": 10 * (epoch + 1), "seconds": 2.5 * (epoch + 1) + offset}
        row |= {"parameters": 1_460_000 + epoch, metric: 0.3 + 0.05 * epoch + offset}
        for place, layer in enumerate(LAYERS):
            row[f"val_routing/{layer}/active_experts"] = 8 + place
            row[f"val_routing/{layer}/experts_per_token"] = 2.0 + place + offset
            row[f"val_routing/{layer}/load_max"] = 1.5
            row[f"val_routing/{layer}/load_min"] = 0.5 * place
        row["val_compute/gflops_per_image"] = 1.25 + offset
        rows.append(row)
    write_rows(folder / "metrics.csv", rows)
    return folder


def write_rows(path: Path, rows: list[dict]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def runs(tmp_path):
    """Top-2 with three seeds, one of them unfinished; DynMoE with one, and its births."""
    for seed, epochs in enumerate((10, 10, 6)):
        write_run(tmp_path, config(f"s/topk2-seed{seed}", seed), epochs, 0.01 * seed**2)
    its = config("s/dyn-seed0", 0, "TopAny", callbacks=adaptive(), topany=0.01)
    folder = write_run(tmp_path, its, 10)
    events = [
        {"step": 20 * n, "epoch": 2 * n, "layer": LAYERS[n % 2], "event": kind, "slot": 8,
         "active_experts": 9}
        for n, kind in enumerate(("birth", "death", "refusal", "birth"), 1)
    ]  # fmt: skip
    write_rows(folder / "expert_events.csv", events)
    return tmp_path


def test_the_table_is_what_plain_csv_and_statistics_say(runs, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["report", str(runs / "s"), "--out", str(out), "--epochs", "1", "6", "10"]
    assert main([*arguments, "--json", str(out / "r.json")]) == 0
    by_method = {row["method"]: row for row in csv.DictReader((out / "table.csv").open())}
    tables_of_runs = [
        list(csv.DictReader((runs / f"s/topk2-seed{s}/version_0/metrics.csv").open()))
        for s in range(3)
    ]
    row = by_method["top-k, k = 2"]
    assert row["seeds"] == "0 1 2"
    for epoch in (1, 6, 10):
        values = [float(t[epoch - 1]["val/accuracy"]) for t in tables_of_runs if len(t) >= epoch]
        assert float(row[f"epoch_{epoch}_mean"]) == pytest.approx(statistics.mean(values))
        assert float(row[f"epoch_{epoch}_std"]) == pytest.approx(statistics.stdev(values))
        assert int(row[f"epoch_{epoch}_n"]) == len(values)
    last = [t[-1] for t in tables_of_runs if len(t) == 10]  # the finished ones alone
    for column, key in (
        ("last", "val/accuracy"),
        ("gflops_per_image", "val_compute/gflops_per_image"),
        ("parameters", "parameters"),
        ("seconds", "seconds"),
    ):
        values = [float(each[key]) for each in last]
        assert float(row[f"{column}_mean"]) == pytest.approx(statistics.mean(values))
        assert float(row[f"{column}_std"]) == pytest.approx(statistics.stdev(values))
    taken = [
        statistics.mean(float(each[f"val_routing/{layer}/experts_per_token"]) for layer in LAYERS)
        for each in last
    ]
    assert float(row["experts_per_token_mean"]) == pytest.approx(statistics.mean(taken))
    assert by_method["DynMoE, weighted average"]["last_std"] == ""
    data = json.loads((out / "r.json").read_text())
    assert data["sections"][0]["methods"][0]["scores"]["10"]["n"] == 2
    assert [run["finished"] for run in data["runs"]].count(False) == 1


def test_the_page_reads_well(runs, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["report", str(runs / "s"), "--out", str(out), "--epochs", "1", "10"]) == 0
    page = (out / "report.md").read_text()
    (topk,) = [line for line in page.splitlines() if line.startswith("| top-k, k = 2 *")]
    cells = [cell.strip() for cell in topk.strip("|").split("|")]
    assert cells[1] == "0, 1, 2"
    assert cells[2] == "31.67 ± 2.08"  # 30, 31, 34
    assert cells[3] == "75.50 ± 0.71 (n = 2)"
    assert cells[4:] == ["8 / 9", "2.00 / 3.00", "1.255", "1.46 M", "25 s"]
    (dyn,) = [line for line in page.splitlines() if line.startswith("| DynMoE, weighted")][:1]
    assert "| 30.00 | 75.00 |" in dyn  # one seed: no spread
    # Three of nine experts: the mean one is taken by a third of the tokens, the largest by half.
    assert "| DynMoE, weighted average | blocks.3 | 9 | 3.00 | 33.3 | 50.0 | 16.7 |" in page
    assert "| DynMoE, weighted average | blocks.1 | 8 | 2.00 | 25.0 | 37.5 | 0.0 |" in page
    assert "`s/topk2-seed2`: epoch 6 of 10" in page
    assert "Published figures, not run here. Source: DynMoE (arXiv 2405.14297)" in page
    assert "here 4 blocks of width 128, there 12 of width 384" in page
    assert "| MoE, 8 experts, k = 2 | 2 | 47.10 | 60.44 | 66.07 | 70.86 | 73.79 |" in page
    pictures = re.findall(r"!\[.+\]\((.+)\)", page)
    assert len(pictures) == 3
    assert all((out / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    html = (out / "report.html").read_text()
    assert html.count('src="data:image/png;base64,') == 3
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert '<meta name="viewport"' in html and "@media print" in html


def test_a_report_from_the_kept_small_files_is_the_same(runs, tmp_path, capsys):
    kept, page = tmp_path / "docs" / "results", tmp_path / "docs" / "results.md"
    page.parent.mkdir()
    page.write_text("# Ours\n\n<!-- report: begin -->\nold\n<!-- report: end -->\n\nWhy.\n")
    first = ["report", str(runs / "s"), "--out", str(tmp_path / "a"), "--copy", str(kept)]
    assert main(first) == 0
    assert main(["report", str(kept), "--out", str(kept), "--markdown", str(page)]) == 0
    tables_of = [(folder / "table.csv").read_text() for folder in (tmp_path / "a", kept)]
    assert tables_of[0] == tables_of[1]
    text = page.read_text()
    assert text.startswith("# Ours\n") and text.endswith("Why.\n") and "old" not in text
    assert "](results/cifar_10_convergence.png)" in text
    assert "/some/where" not in (kept / "s/topk2-seed0/config.yaml").read_text()
    page.write_text("written by hand")
    assert main(["report", str(kept), "--out", str(kept), "--markdown", str(page)]) == 2
    assert page.read_text() == "written by hand"
    assert "<!-- report: begin -->" in capsys.readouterr().err


def test_broken_folders_cost_a_line_each(runs, tmp_path, capsys):
    whole = runs / "s"
    damaged = write_run(runs, config("s/damaged", 5), 4)
    text = (damaged / "metrics.csv").read_text().splitlines()
    (damaged / "metrics.csv").write_text("\n".join([*text[:3], text[3][:9], text[4]]))
    binary = write_run(runs, config("s/binary", 7), 4)
    (binary / "metrics.csv").write_bytes(b"\x00\xff\x00")
    for name, key, value in (("nan", "val/accuracy", "nan"), ("noval", "val/other", 0.5)):
        folder = write_run(runs, config(f"s/{name}", 9, k=3), 4)
        rows = list(csv.DictReader((folder / "metrics.csv").open()))
        for row in rows if name == "noval" else rows[-1:]:
            del row["val/accuracy"]
            row[key] = value
        write_rows(folder / "metrics.csv", [{**dict.fromkeys(rows[-1], ""), **r} for r in rows])
    (runs / "s/none").mkdir()
    (runs / "s/none/fit.log").write_text("error: no")
    noconfig = write_run(runs, config("s/noconfig", 8), 4)
    (noconfig / "config.yaml").write_text(": [")
    (runs / "empty").mkdir()
    found = [str(whole), str(runs / "empty"), str(runs / "nowhere")]
    assert main(["report", *found, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err.splitlines()
    assert all(line.startswith("note: ") for line in said)
    for line in (
        "s/damaged: metrics.csv is damaged: 1 of 4 rows",
        "s/binary: metrics.csv is damaged: it is no text",
        "s/nan: 1 of 4 evaluations have no finite val/accuracy; left out",
        "s/noval: 4 of 4 evaluations have no finite val/loss; left out",
        "s/none: has not begun",
        "s/noconfig: config.yaml is damaged",
        f"{runs / 'empty'}: is no run",
        f"{runs / 'nowhere'}: there is no such folder",
    ):
        assert sum(f"note: {line}" in each for each in said) == 1, line
    page = (tmp_path / "out" / "report.md").read_text()
    assert all(line.removeprefix("note: ") in page for line in said)


def test_nothing_readable_is_a_mistake(tmp_path, capsys):
    assert main(["report", str(tmp_path), "nothing"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert said[-1] == "error: report: none of these could be read; give folders of runs"


def test_older_tables_lack_columns_and_show_dashes(tmp_path, capsys):
    folder = write_run(tmp_path, config("old", 0), 3)
    rows = [{"epoch": e, "step": e + 1, "val/accuracy": 0.5, "val/loss": 1.0} for e in range(3)]
    write_rows(folder / "metrics.csv", rows)
    assert main(["report", "old", "--runs", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/report.md").read_text()
    assert f"| {' | '.join([DASH] * 5)} |" in page
    assert "compute.png" not in page


def test_language_runs_are_read_by_step_and_loss(tmp_path, capsys):
    for seed in (0, 1):
        its = config(f"l/topk2-seed{seed}", seed, data="TextData", epochs=-1)
        its["trainer"]["max_steps"] = 100
        folder = write_run(tmp_path, its, 10, 0.1 * seed, metric="val/loss")
        rows = list(csv.DictReader((folder / "metrics.csv").open()))
        write_rows(folder / "metrics.csv", [
            {k.replace("image", "token"): v for k, v in row.items()} | {"epoch": 0} for row in rows
        ])  # fmt: skip
    assert main(["report", "l", "--runs", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/report.md").read_text()
    assert "| method | seeds | loss, step 10 |" in page
    assert "loss, step 100" in page and "GFLOPs per token" in page
    assert "| 0.800 ± 0.071 |" in page
    assert "Published" not in page


def test_only_the_seed_may_differ_within_a_group(tmp_path):
    write_run(tmp_path, config("s/a", 0), 3)
    write_run(tmp_path, config("s/b", 1), 3)
    write_run(tmp_path, config("s/again", 1), 2)  # the same run, not as far
    write_run(tmp_path, config("s/longer", 0, epochs=20), 3)
    (section,), problems = sections(find_runs([str(tmp_path)], tmp_path)[0])
    groups = {group.label: [run.name for run in group.runs] for group in section.groups}
    assert groups == {
        "top-k, k = 2 (max_epochs 10)": ["s/a", "s/b"],
        "top-k, k = 2 (max_epochs 20)": ["s/longer"],
    }
    (problem,) = problems
    assert problem.startswith("s/again") and "s/b" in problem


@pytest.mark.parametrize(
    ("its", "label"),
    [
        (config("r", 0, k=4), "top-k, k = 4"),
        (config("r", 0, "Ternary"), "TC-MoE, k = 2"),
        (config("r", 0, "TopAny"), "top-any, fixed experts"),
        (
            config("r", 0, "TopAny", callbacks=adaptive("last_removed"), topany=0.01),
            "DynMoE, original",
        ),
        (
            config("r", 0, "TopAny", callbacks=adaptive("my.own"), topany=0.01),
            "DynMoE, my.own",
        ),
        (
            config("r", 0, "TopAny", callbacks=adaptive(), load_balance=0.01, efficiency=0.01),
            "DynMoE, weighted average + balance and efficiency losses",
        ),
        (config("r", 0, "MyRouter"), "MyRouter"),
        (config("r", 0, "TopK", package="mine"), "TopK"),
        ({}, "dense"),
    ],
)
def test_a_config_tells_its_method(its, label):
    assert method_of(its).label == label


def test_published_rows_are_those_of_the_discussion():
    (table,) = tables()
    assert len(table.rows) == 8
    assert all(len(row["accuracy"]) == len(table.epochs) == 5 for row in table.rows)
    assert {row["method"]: row["accuracy"][-1] for row in table.rows} == {
        "top-k, k = 1": 72.66,
        "top-k, k = 2": 73.79,
        "top-k, k = 4": 72.77,
        "top-k, k = 8": 70.68,
        "DynMoE, original": 74.84,
        "DynMoE, average": 74.70,
        "DynMoE, weighted average": 74.16,
        "DynMoE, most activated": 71.71,
    }


def test_statistics_and_words():
    assert stat([1.0, None, 3.0]).std == pytest.approx(2**0.5)
    assert stat([1.0]).std is None and stat([None]) is None
    assert [duration(s) for s in (9.6, 600, 11_100)] == ["10 s", "10 min", "3 h 05 min"]


def test_labels_cover_neither_each_other_nor_a_point():
    figure, axes = new_figure()
    ax = axes[0, 0]
    points = [(1 + 0.001 * n, 2 + 0.002 * (n % 3)) for n in range(8)]
    ax.plot(*zip(*points, strict=True), "o")
    ax.set(xlim=(0.9, 1.1), ylim=(1.9, 2.1))
    place_labels(ax, points, [f"a method with a name {n}" for n in range(8)])
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    # Of the texts alone, without the lines that lead to them.
    boxes = [Text.get_window_extent(text, renderer).extents for text in ax.texts]
    dots = [(x - 2, y - 2, x + 2, y + 2) for x, y in ax.transData.transform(points)]
    assert len(boxes) == 8
    for number, box in enumerate(boxes):
        assert not any(_overlap(box, other) for other in [*boxes[:number], *dots])
