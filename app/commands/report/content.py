"""What a report says: its tables and pictures, and the same figures as data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ...figures import save_figure
from . import pictures
from .published import Table, tables_for
from .runs import Run
from .summary import Group, Section, Stat, stat

DASH = "\N{EN DASH}"  # for what is not known


def part(section: Section, out: Path) -> dict[str, Any]:
    """What the page shows of a section; writes its pictures to `out`."""

    def drawn(figure: Any, name: str) -> Path:
        path = out / f"{section.slug}_{name}.png"
        save_figure(figure, path)
        return path

    timelines: dict[str, Path] = {}
    for group in filter(pictures.has_timeline, section.groups):
        name = "experts_" + re.sub(r"\W+", "_", group.method.label.lower())
        if any(path.stem == f"{section.slug}_{name}" for path in timelines.values()):
            name += f"_{len(timelines)}"
        timelines[group.label] = drawn(pictures.timeline(group, section.by), name)
    counted = any(group.gflops()[0] for group in section.groups)
    return {
        "section": section,
        "main": main_table(section),
        "published": [(each, published_table(section, each)) for each in tables_for(section)],
        "convergence": drawn(pictures.convergence(section), "convergence"),
        "compute": drawn(pictures.compute(section), "compute") if counted else None,
        "loads": load_table(section),
        "timelines": timelines,
    }


def main_table(section: Section) -> pd.DataFrame:
    """A row for each group; all tables hold texts."""
    unit = next((unit for group in section.groups if (unit := group.gflops()[1])), "image")
    name = "accuracy in %" if section.percent else "loss"
    scale, prefix = _flops_scale(section)
    rows = []
    for group in section.groups:
        scores = zip(section.marks, section.scores(group), strict=True)
        rows.append(
            {
                "method": group.label + " *" * bool(group.unfinished),
                "seeds": group.seeds(),
                **{
                    f"{name}, {section.by} {mark}": _score(value, group, section)
                    for mark, value in scores
                },
                "active experts": _layers(group.by_layer("active_experts"), 1),
                "experts per token": _layers(group.by_layer("experts_per_token"), 2),
                f"{prefix}FLOPs per {unit}": _value(
                    group.gflops()[0], lambda x: f"{x * scale:.4g}"
                ),
                "parameters": _value(group.last("parameters"), _parameters),
                "wall time": _wall_time(group),
            }
        )
    return pd.DataFrame(rows)


def _flops_scale(section: Section) -> tuple[float, str]:
    known = [flops.mean for group in section.groups if (flops := group.gflops()[0])]
    return (1000.0, "M") if known and max(known) < 0.5 else (1.0, "G")


def load_table(section: Section) -> pd.DataFrame:
    """A row for each MoE layer of each group that knows its loads."""
    rows = []
    for group in section.groups:
        for layer in group.layers("load_max"):
            mean, largest, smallest = (
                _value(stat(group.shares(layer, load)), lambda x: f"{100 * x:.1f}")
                for load in ("mean", "load_max", "load_min")
            )
            experts, taken = (
                group.last(f"val_routing/{layer}/{key}")
                for key in ("active_experts", "experts_per_token")
            )
            rows.append(
                {
                    "method": group.label,
                    "layer": layer,
                    "active experts": _layers([experts] if experts else [], 1),
                    "experts per token": _value(taken, lambda x: f"{x:.2f}"),
                    "share of tokens, mean expert in %": mean,
                    "largest in %": largest,
                    "smallest in %": smallest,
                }
            )
    return pd.DataFrame(rows)


def published_table(section: Section, table: Table) -> pd.DataFrame:
    """The published rows, beside the last values of the same methods here."""
    rows = []
    for row in table.rows:
        ours = [group for group in section.groups if table.row(group) is row]
        for group in ours or [None]:
            here = f" (here: {group.label})" if len(ours) > 1 else ""
            value = group and section.shown(group.last(section.metric))
            accuracy = zip(table.epochs, row["accuracy"], strict=True)
            rows.append(
                {
                    "method, as published": row["label"] + here,
                    "experts per token, published": f"{row['k']:g}",
                    **{f"published, epoch {epoch}": f"{each:.2f}" for epoch, each in accuracy},
                    "here, last accuracy in %": _score(value, group, section) if group else DASH,
                    "here, at": group.furthest[0].progress() if group else DASH,
                }
            )
    return pd.DataFrame(rows)


def _score(value: Stat | None, group: Group, section: Section) -> str:
    text = _stat(value, 2 if section.percent else 3)
    return text if value is None or value.n == len(group.runs) else f"{text} (n = {value.n})"


def _stat(value: Stat | None, places: int) -> str:
    if value is None:
        return DASH
    std = "" if value.std is None else f" ± {value.std:.{places}f}"
    return f"{value.mean:.{places}f}{std}"


def _value(value: Stat | None, words: Any) -> str:
    return DASH if value is None else words(value.mean)


def _layers(stats: Sequence[Stat], places: int) -> str:
    """Means layer by layer; of many layers, their range."""
    if not stats:
        return DASH
    texts = [
        f"{each.mean:.0f}"
        if abs(each.mean - round(each.mean)) < 1e-6
        else f"{each.mean:.{places}f}"
        for each in stats
    ]
    if len(set(texts)) == 1:
        return texts[0]
    if len(texts) > 4:
        means = [each.mean for each in stats]
        return f"{min(means):.{places}f} to {max(means):.{places}f}"
    return " / ".join(texts)


def _parameters(count: float) -> str:
    return f"{count / 1e6:.2f} M" if count >= 1e6 else f"{count / 1e3:.1f} k"


def _wall_time(group: Group) -> str:
    seconds = group.last("seconds")
    if seconds is None:
        return DASH
    text = duration(seconds.mean)
    return f"{text} so far" if len(group.unfinished) == len(group.runs) else text


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, as `18 s`, `12 min` or `3 h 05 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def as_data(
    sections: Sequence[Section], runs: Sequence[Run], problems: Sequence[str]
) -> dict[str, Any]:
    """The report's figures for `--json`."""
    return {
        "sections": [
            {
                "title": section.title,
                "metric": section.metric,
                "marks": {"by": section.by, "at": section.marks},
                "methods": [_group_data(section, group) for group in section.groups],
            }
            for section in sections
        ],
        "runs": [
            {
                "name": run.name,
                "seed": run.seed,
                "finished": run.finished,
                "progress": run.progress(),
            }
            for run in runs
        ],
        "problems": list(problems),
    }


def _group_data(section: Section, group: Group) -> dict[str, Any]:
    flops, unit = group.gflops()

    def plain(value: Stat | None) -> dict[str, Any] | None:
        return value and {"mean": value.mean, "std": value.std, "n": value.n}

    return {
        "method": group.label,
        "runs": [run.name for run in group.runs],
        "seeds": [run.seed for run in group.runs],
        "finished": not group.unfinished,
        "scores": {
            str(mark): plain(group.at(section.metric, mark, section.by)) for mark in section.marks
        },
        "last": plain(group.last(section.metric)),
        "active_experts": plain(group.over_layers("active_experts")),
        "experts_per_token": plain(group.over_layers("experts_per_token")),
        f"gflops_per_{unit or 'image'}": plain(flops),
        "parameters": plain(group.last("parameters")),
        "seconds": plain(group.last("seconds")),
    }


def as_table(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """The report's figures as flat rows, one a group: for table.csv."""
    rows = []
    for section in sections:
        for group in section.groups:
            data = _group_data(section, group)
            row = {
                "section": section.title,
                "method": group.label,
                "runs": " ".join(data["runs"]),
                "seeds": " ".join(map(str, data["seeds"])),
                "finished": data["finished"],
                "metric": section.metric,
            }
            scores = {f"{section.by}_{mark}": v for mark, v in data["scores"].items()}
            keys = ("last", "active_experts", "experts_per_token", "gflops_per_image",
                    "gflops_per_token", "parameters", "seconds")  # fmt: skip
            for name, value in (scores | {key: data.get(key) for key in keys}).items():
                for part in ("mean", "std", "n"):
                    row[f"{name}_{part}"] = "" if value is None else value[part]
            rows.append(row)
    return rows
