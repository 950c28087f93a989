"""Groups runs that differ in their seed alone, and takes means over the seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .methods import Method
from .runs import Row, Run

FRACTIONS = (0.05, 0.25, 0.5, 0.75, 1.0)  # epochs 10, 50, 100, 150 and 200 of 200


@dataclass(frozen=True)
class Stat:
    """Mean over seeds, and their standard deviation (n - 1; None for one seed)."""

    mean: float
    std: float | None
    n: int


def stat(values: Iterable[float | None]) -> Stat | None:
    """Statistics of the values that are there, None if there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    std = statistics.stdev(known) if len(known) > 1 else None
    return Stat(statistics.fmean(known), std, len(known))


@dataclass
class Group:
    """Runs that differ in their seed alone.

    Attributes:
        runs: one a seed, in the order of the seeds.
        label: what tables and figures call it.
    """

    runs: list[Run]
    label: str

    @property
    def method(self) -> Method:
        return self.runs[0].method

    @property
    def unfinished(self) -> list[Run]:
        """Runs that are not at their end."""
        return [run for run in self.runs if run.finished is False]

    def seeds(self) -> str:
        """The seeds in words."""
        return ", ".join("?" if run.seed is None else str(run.seed) for run in self.runs)

    def at(self, key: str, mark: int, by: str) -> Stat | None:
        """A metric after so many epochs or steps.

        Args:
            key: column of metrics.csv.
            mark: number of epochs or steps.
            by: `epoch` or `step`.
        """
        return stat(_at(run, key, mark, by) for run in self.runs)

    @property
    def furthest(self) -> list[Run]:
        """The runs whose last evaluations compare: the finished ones, or else the most advanced."""
        finished = [run for run in self.runs if run.finished is not False]
        most = max(run.rows[-1].step for run in self.runs)
        return finished or [run for run in self.runs if run.rows[-1].step == most]

    def last(self, key: str) -> Stat | None:
        """A metric at the last evaluation of the `furthest` runs."""
        return stat(run.rows[-1].values.get(key) for run in self.furthest)

    def gflops(self) -> tuple[Stat | None, str]:
        """Forward GFLOPs of the last evaluation, and what they are per: `image` or `token`."""
        for unit in ("image", "token"):
            found = self.last(f"val_compute/gflops_per_{unit}")
            if found:
                return found, unit
        return None, ""

    def layers(self, statistic: str) -> list[str]:
        """MoE layers that have a statistic."""
        return list(dict.fromkeys(layer for run in self.runs for layer in run.layers(statistic)))

    def by_layer(self, statistic: str) -> list[Stat]:
        """A routing statistic of the last evaluation, layer by layer."""
        found = [self.last(f"val_routing/{each}/{statistic}") for each in self.layers(statistic)]
        return [each for each in found if each]

    def over_layers(self, statistic: str) -> Stat | None:
        """As `last`, of a routing statistic: each run's mean over its layers."""
        means = []
        for run in self.furthest:
            last = run.rows[-1].values
            values = [last.get(f"val_routing/{each}/{statistic}") for each in run.layers(statistic)]
            known = [value for value in values if value is not None]
            means.append(statistics.fmean(known) if known else None)
        return stat(means)

    def shares(self, layer: str, load: str) -> list[float | None]:
        """The part of all tokens that take an expert of a layer at the last evaluation, a run each.

        Args:
            layer: name of the MoE layer.
            load: which expert: `load_max`, `load_min` (columns, in fair shares), or `mean`.
        """
        found = []
        for run in self.furthest:
            last = run.rows[-1].values
            keys = ("active_experts", "experts_per_token", load)
            experts, taken, fair = (last.get(f"val_routing/{layer}/{key}") for key in keys)
            fair = 1.0 if load == "mean" else fair
            known = experts and taken is not None and fair is not None
            found.append(fair * taken / experts if known else None)
        return found

    def curve(self, key: str, by: str) -> tuple[list[int], list[Stat]]:
        """A metric at all epochs (or steps) that every run of the group has evaluated."""
        known = [
            {mark for row in run.rows if (mark := _mark(row, by)) and key in row.values}
            for run in self.runs
        ]
        marks = sorted(set.intersection(*known))
        return marks, [self.at(key, mark, by) for mark in marks]


def _mark(row: Row, by: str) -> int | None:
    return row.epoch if by == "epoch" else row.step


def _at(run: Run, key: str, mark: int, by: str) -> float | None:
    rows = [row for row in run.rows if _mark(row, by) == mark and key in row.values]
    return rows[-1].values[key] if rows else None


@dataclass
class Section:
    """Groups that can stand in one table: the same data, metric and size of network.

    Attributes:
        title: in words.
        slug: the start of its files' names.
        metric: column of metrics.csv.
        by: whether its marks are an `epoch` or a `step`.
        marks: the chosen epochs or steps.
    """

    title: str
    slug: str
    metric: str
    groups: list[Group]
    by: str
    marks: list[int]

    @property
    def percent(self) -> bool:
        """Whether the metric is an accuracy, shown in %."""
        return self.metric.endswith("accuracy")

    @property
    def metric_name(self) -> str:
        """The metric in words, with its unit."""
        return "validation accuracy in %" if self.percent else "validation loss"

    def shown(self, value: Stat | None) -> Stat | None:
        """A value of the metric in the unit in which it is shown."""
        if value is None or not self.percent:
            return value
        std = None if value.std is None else 100 * value.std
        return Stat(100 * value.mean, std, value.n)

    def scores(self, group: Group) -> list[Stat | None]:
        """The metric of a group at the chosen marks, in the unit in which it is shown."""
        return [self.shown(group.at(self.metric, mark, self.by)) for mark in self.marks]


DATA_NAMES = {
    "CIFAR10Data": "CIFAR-10",
    "TinyImageNetData": "Tiny ImageNet",
    "DigitsData": "digits",
    "ImageFolderData": "images in folders",
    "TextData": "text files",
}


def sections(
    runs: Sequence[Run], epochs: Sequence[int] | None = None
) -> tuple[list[Section], list[str]]:
    """Sorts runs into sections and groups.

    Args:
        runs: each with at least one evaluation.
        epochs: at which the metric is read; None chooses five, or steps where epochs are too few.

    Returns:
        The sections, and a line for each run that is left out.
    """
    tables: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        network = run.network
        key = run.data, run.metric, network["class"], network["dim"], network["depth"]
        tables.setdefault(key, []).append(run)
    made: list[Section] = []
    problems: list[str] = []
    slugs: set[str] = set()
    for (data, metric, _, dim, depth), members in tables.items():
        groups, said = _groups(members)
        problems += said
        name = DATA_NAMES.get(data, data)
        size = f", {depth} blocks of width {dim}" if dim and depth else ""
        slug = base = "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
        if slug in slugs:
            slug = f"{base}_{depth}x{dim}_{metric.rpartition('/')[2]}"
        slugs.add(slug)
        by, marks = _marks(members, epochs)
        made.append(Section(f"{name[0].upper()}{name[1:]}{size}", slug, metric, groups, by, marks))
    return made, problems


def _groups(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
    by_settings: dict[str, list[Run]] = {}
    problems: list[str] = []
    for run in runs:
        # Without a config nothing is known to be the same but the name.
        key = json.dumps(run.settings or run.name, sort_keys=True, default=str)
        by_settings.setdefault(key, []).append(run)
    groups = []
    for members in by_settings.values():
        by_seed: dict[int | None, Run] = {}
        for run in members:
            twin = by_seed.get(run.seed)
            if twin is None or run.rows[-1].step > twin.rows[-1].step:
                by_seed[run.seed] = run
        for run in members:
            kept = by_seed[run.seed]
            if kept is not run:
                problems.append(
                    f"{run.name} ({run.folder}): settings and seed of {kept.name}, which got at "
                    "least as far; left out"
                )
        seeds = sorted(by_seed, key=lambda seed: (seed is None, seed or 0))
        first = by_seed[seeds[0]]
        label = first.method.label if first.config else first.title
        groups.append(Group([by_seed[seed] for seed in seeds], label))
    _tell_apart(groups)
    return sorted(groups, key=lambda g: (g.method, g.label)), problems


def _tell_apart(groups: Sequence[Group]) -> None:
    """Adds to labels that are not unique what sets their groups apart."""
    same: dict[str, list[Group]] = {}
    for group in groups:
        same.setdefault(group.label, []).append(group)
    for members in same.values():
        if len(members) < 2:
            continue
        settings = [group.runs[0].settings for group in members]
        keys = dict.fromkeys(key for each in settings for key in each)
        differing = [
            key for key in keys if len({json.dumps(s.get(key), default=str) for s in settings}) > 1
        ]
        plain = [key for key in differing if not isinstance(settings[0].get(key), list)]
        for group, its in zip(members, settings, strict=True):
            marks = [f"{key.rpartition('.')[2]} {its.get(key)}" for key in plain[:2]]
            group.label += f" ({', '.join(marks) or group.runs[0].title})"
    labels = [group.label for group in groups]
    for group in groups:
        if labels.count(group.label) > 1:
            group.label += f" [{group.runs[0].name}]"


def _marks(runs: Sequence[Run], epochs: Sequence[int] | None) -> tuple[str, list[int]]:
    if epochs:
        return "epoch", sorted(set(epochs))
    reached = max((row.epoch or 0 for run in runs for row in run.rows), default=0)
    evaluations = max(len(run.rows) for run in runs)
    planned = max((run.end.epochs or 0 for run in runs), default=0)
    if reached >= min(5, evaluations) and reached:
        last = planned if reached <= planned <= 10_000 else reached
        return "epoch", sorted({max(1, round(part * last)) for part in FRACTIONS})
    steps = [row.step for row in max(runs, key=lambda run: run.rows[-1].step).rows]
    places = {max(0, round(part * len(steps)) - 1) for part in FRACTIONS}
    return "step", [steps[place] for place in sorted(places)]
