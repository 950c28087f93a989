"""The figures of a run of benchmarks/gpu.sh, from the files in its folder: OUT/summary.md.

python benchmarks/summary.py OUT
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import yaml

EPOCHS = 200
IMAGES = 50_000


def main(out: Path) -> None:
    """Writes summary.md; what is not there yet is left out."""
    lines = ["# Summary", "", *_parts(out), *_correctness(out)]
    for path in sorted(out.glob("*.json")):
        if path.stem != "correctness":
            lines += _benchmark(path)
    lines += _trainings(out)
    (out / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _parts(out: Path) -> list[str]:
    rows = list(csv.reader((out / "parts.csv").open(encoding="utf-8")))
    return _table(rows[0], rows[1:])


def _correctness(out: Path) -> list[str]:
    path = out / "correctness.json"
    if not path.is_file():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))
    bad = [row for row in rows if not row["good"]]
    return [f"Correctness: {len(rows) - len(bad)} of {len(rows)} checks good.", ""] + [
        f"- {row['check']}: {row['found']}" for row in bad
    ]


def _benchmark(path: Path) -> list[str]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    ratios = sorted(
        {key for row in rows for key, value in row.items()
         if key.startswith("ratio_to_") and isinstance(value, float)}
    )  # fmt: skip
    columns = ["case", "phase", "ms", *ratios, "images_per_second"]
    table = [
        [row["case"], row["phase"], f"{row['median_s'] * 1e3:.3f}"]
        + [f"{row[key]:.3f}" if key in row else "" for key in ratios]
        + [f"{row['images_per_second']:,.0f}" if "images_per_second" in row else ""]
        for row in rows
    ]
    first = rows[0]
    return [
        f"## {path.stem}: {first['hardware']}, torch {first['torch']}, {first['dtype']}",
        "",
        *_table(columns, table),
    ]


def _trainings(out: Path) -> list[str]:
    table = []
    for path in sorted(out.glob("*/metrics.csv")):
        rows = list(csv.DictReader(path.open(encoding="utf-8")))
        if len(rows) < 2:  # the first epoch has compilation and first allocations in it
            continue
        config = yaml.safe_load((path.parent / "config.yaml").read_text(encoding="utf-8"))
        batch = config["data"]["init_args"]["batch_size"]
        first, last = rows[0], rows[-1]
        seconds = float(last["seconds"]) - float(first["seconds"])
        rate = (int(last["step"]) - int(first["step"])) * batch / seconds
        table.append(
            [
                path.parent.name,
                str(len(rows)),
                f"{seconds / (len(rows) - 1):.2f}",
                f"{rate:,.0f}",
                f"{EPOCHS * IMAGES / rate / 60:.1f}",
                f"{float(last['val/accuracy']):.4f}",
            ]
        )
    if not table:
        return []
    heads = ["run", "epochs", "seconds an epoch", "images/s", f"minutes for {EPOCHS}", "accuracy"]
    words = (
        "From the end of the first epoch on, evaluations included; minutes are projected for "
        f"epochs of {IMAGES:,} images."
    )
    return ["## Trainings", "", words, "", *_table(heads, table)]


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines] + [""]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
