"""What a report says: its tables, sentences and pictures in order, and the same as data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...figures import save_figure
from . import pictures
from .pages import Block, Grid, Heading, Items, Picture, Text
from .published import Table, tables_for
from .runs import Run
from .summary import Group, Section, Stat, stat

DASH = "\N{EN DASH}"  # for what is not known


def report(
    sections: Sequence[Section], runs: Sequence[Run], problems: Sequence[str], out: Path
) -> list[Block]:
    """The blocks of a report; writes its pictures to `out`."""
    blocks: list[Block] = [Heading("Runs compared", 1), Text(_opening(runs))]
    unfinished = [run for run in runs if run.finished is False]
    if unfinished:
        blocks += [
            Text("Not finished, and shown as far as they are:"),
            Items([f"`{run.name}`: {run.progress()}" for run in unfinished]),
        ]
    unknown = [run.name for run in runs if run.finished is None]
    if unknown:
        blocks.append(Text(f"Whether these are finished is not known: {', '.join(unknown)}."))
    if problems:
        blocks += [Text("Notes on what was read:"), Items(list(problems))]
    for section in sections:
        blocks += _section(section, out)
    return blocks


def _opening(runs: Sequence[Run]) -> str:
    done = sum(run.finished is True for run in runs)
    count = f"{len(runs)} run{'s' * (len(runs) != 1)}"
    return f"{count}, {done} of {'it' if len(runs) == 1 else 'them'} finished."


def _section(section: Section, out: Path) -> list[Block]:
    blocks: list[Block] = [
        Heading(section.title),
        main_table(section),
        Text(_how_to_read(section)),
    ]
    for table in tables_for(section):
        blocks += [
            Heading(f"Published: {table.title}", 3),
            Text(
                f"Published figures, not run here. Source: {table.source}. {table.about[0].upper()}"
                f"{table.about[1:]}. What differs: {table.differences(section)}."
            ),
            published_table(section, table),
        ]
    blocks.append(Heading("Convergence", 3))
    blocks.append(
        _picture(
            pictures.convergence(section),
            out / f"{section.slug}_convergence.png",
            f"{section.metric_name} over {section.by}s, a line a method",
            f"{section.metric_name.capitalize()} by {section.by}: mean over seeds; bands are one "
            "standard deviation (n - 1), for methods with several seeds. Thin lines go on where "
            "not all seeds have arrived. The legend has the best last value first.",
        )
    )
    if pictures.has_compute(section):
        blocks.append(Heading("Accuracy and compute" if section.percent else "Loss and compute", 3))
        blocks.append(
            _picture(
                pictures.compute(section),
                out / f"{section.slug}_compute.png",
                f"{section.metric_name} against active FLOPs, a point a method",
                f"{section.metric_name.capitalize()} against active FLOPs of a forward pass, "
                "counted from what was executed, both at the last evaluation of the seeds that "
                "have got furthest. Bars: one standard deviation over seeds. Open markers: not "
                "all seeds are finished.",
            )
        )
    loads = load_table(section)
    if loads.rows:
        blocks += [
            Heading("Experts, layer by layer", 3),
            loads,
            Text(
                "At the last evaluation, means over seeds. The shares are of the tokens of the "
                "validation data: those that the expert of the largest load is executed for, and "
                "those of the smallest. A shared expert is one that nearly all tokens take while "
                "the mean expert is taken by few."
            ),
        ]
    moving = [group for group in section.groups if pictures.has_timeline(group)]
    if moving:
        blocks.append(Heading("Experts over time", 3))
    names: set[str] = set()
    for group in moving:
        name = re.sub(r"\W+", "_", group.method.label.lower())
        name = name if name not in names else f"{name}_{len(names)}"
        names.add(name)
        blocks.append(
            _picture(
                pictures.timeline(group, section.by),
                out / f"{section.slug}_experts_{name}.png",
                f"active experts and experts per token over time, {group.label}",
                f"{group.label}: active experts, and experts per token in validation, layer by "
                "layer.",
            )
        )
    return blocks


def _picture(figure: Any, path: Path, alt: str, caption: str) -> Picture:
    save_figure(figure, path)
    return Picture(path, alt, caption)


def main_table(section: Section) -> Grid:
    """A row a group."""
    unit = next((unit for group in section.groups if (unit := group.gflops()[1])), "image")
    short = "accuracy in %" if section.percent else "loss"
    scale, prefix = _flops_scale(section)
    header = [
        "method",
        "seeds",
        *(f"{short}, {section.by} {mark}" for mark in section.marks),
        "active experts",
        "experts per token",
        f"{prefix}FLOPs per {unit}",
        "parameters",
        "wall time",
    ]
    rows = []
    for group in section.groups:
        flops, _ = group.gflops()
        rows.append(
            [
                group.label + (" *" if group.unfinished else ""),
                group.seeds(),
                *(_score(each, group, section) for each in section.scores(group)),
                _layers(group.by_layer("active_experts"), 1),
                _layers(group.by_layer("experts_per_token"), 2),
                _value(flops, lambda x: f"{x * scale:.4g}"),
                _value(group.last("parameters"), _parameters),
                _wall_time(group),
            ]
        )
    return Grid(header, rows)


def _flops_scale(section: Section) -> tuple[float, str]:
    known = [flops.mean for group in section.groups if (flops := group.gflops()[0])]
    return (1000.0, "M") if known and max(known) < 0.5 else (1.0, "G")


def _how_to_read(section: Section) -> str:
    parts = [
        f"{section.metric_name.capitalize()} after so many {section.by}s: mean "
        "± standard deviation over seeds (n - 1); one seed has none.",
        "Experts, FLOPs (forward, counted from what was executed), parameters (without unused "
        "expert slots) and wall time (evaluations included) are means over seeds at the last "
        "evaluation; where MoE layers differ, experts are given layer by layer.",
    ]
    if any(group.unfinished for group in section.groups):
        parts.append(
            "* Not all seeds are finished: a cell says over how many seeds it is where these are "
            "not all, and what is of the last evaluation is over the seeds that have got furthest."
        )
    return " ".join(parts)


def load_table(section: Section) -> Grid:
    """A row for each MoE layer of each group that knows its loads."""
    header = [
        "method",
        "layer",
        "active experts",
        "experts per token",
        "share of tokens, mean expert in %",
        "largest in %",
        "smallest in %",
    ]
    rows = []
    for group in section.groups:
        for layer in group.layers("load_max"):
            shares = [stat(group.shares(layer, load)) for load in ("mean", "load_max", "load_min")]
            experts, per_token = (
                group.last(f"val_routing/{layer}/{key}")
                for key in ("active_experts", "experts_per_token")
            )
            rows.append(
                [
                    group.label,
                    layer,
                    _layers([experts] if experts else [], 1),
                    _value(per_token, lambda x: f"{x:.2f}"),
                    *(_value(each, lambda x: f"{100 * x:.1f}") for each in shares),
                ]
            )
    return Grid(header, rows)


def published_table(section: Section, table: Table) -> Grid:
    """The published rows, beside the last values of the same methods here."""
    header = [
        "method, as published",
        "experts per token, published",
        *(f"published, epoch {epoch}" for epoch in table.epochs),
        "here, last accuracy in %",
        "here, at",
    ]
    rows = []
    for row in table.rows:
        ours = [group for group in section.groups if table.row(group) is row]
        for group in ours or [None]:
            value = group and section.shown(group.last(section.metric))
            rows.append(
                [
                    row["label"] + (f" (here: {group.label})" if len(ours) > 1 else ""),
                    f"{row['k']:g}",
                    *(f"{value:.2f}" for value in row["accuracy"]),
                    _score(value, group, section) if group else DASH,
                    group.furthest[0].progress() if group else DASH,
                ]
            )
    return Grid(header, rows)


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
