"""The figures of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ...figures import COLORS, STYLE, new_figure
from .published import tables_for
from .runs import Run
from .summary import Group, Section

LINES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 3)))
MARKERS = "osD^vPX*<>dph"
BIRTH, DEATH, REFUSAL = ("^", COLORS[2]), ("v", COLORS[3]), ("x", "0.5")
COLUMNS = 3  # of axes in a timeline
LEGEND_COLUMNS = 3


def styles(groups: Sequence[Group]) -> list[dict[str, object]]:
    """Colour by family of methods, line by place in the family, a marker of its own."""
    counts: dict[str, int] = {}
    chosen = []
    for number, group in enumerate(groups):
        family = group.method.family
        place = counts[family] = counts.get(family, -1) + 1
        chosen.append(
            {
                "color": group.method.color,
                "linestyle": LINES[place % len(LINES)],
                "marker": MARKERS[number % len(MARKERS)],
            }
        )
    return chosen


@rc_context(STYLE)
def convergence(section: Section) -> Figure:
    """The metric over epochs or steps, mean and one standard deviation, and its second half."""
    rows = -(-len(section.groups) // LEGEND_COLUMNS)
    figure, axes = new_figure(9.0, 4.2 + 0.2 * rows, 1, 2)
    whole, half = axes[0]
    ends = {}
    for group, style in zip(section.groups, styles(section.groups), strict=True):
        for ax in (whole, half):
            line = _curve(ax, group, section, style)
        ends[line] = section.shown(group.last(section.metric)).mean
    best_first = sorted(ends, key=ends.get, reverse=section.percent)
    best_first += _published(whole, section)
    _published(half, section)
    for ax in (whole, half):
        ax.set_xlabel("epoch" if section.by == "epoch" else "optimizer step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(alpha=0.25)
    whole.set_ylabel(section.metric_name)
    half.set_title("the second half")
    _zoom(half)
    figure.legend(
        handles=best_first, loc="outside lower center", ncols=LEGEND_COLUMNS, handlelength=3.2
    )
    return figure


def _curve(ax: Axes, group: Group, section: Section, style: dict[str, object]) -> Line2D:
    marks, stats = group.curve(section.metric, section.by)
    values = [section.shown(each) for each in stats]
    style = style | {"markersize": 4, "marker": style["marker"] if len(marks) < 25 else ""}
    (line,) = ax.plot(marks, [each.mean for each in values], label=_legend(group), **style)
    spread = [(at, v.mean, v.std) for at, v in zip(marks, values, strict=True) if v.std]
    if spread:
        at, middle, std = map(np.array, zip(*spread, strict=True))
        band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
        ax.fill_between(at, middle - std, middle + std, **band)
    for run in group.runs:  # what some of the seeds have not reached yet
        _tail(ax, run, section, marks[-1] if marks else 0, style["color"])
    return line


def _tail(ax: Axes, run: Run, section: Section, start: int, color: object) -> None:
    at = [
        (mark, row.values[section.metric] * (100.0 if section.percent else 1.0))
        for row in run.rows
        if section.metric in row.values
        and (mark := row.epoch if section.by == "epoch" else row.step) is not None
        and mark >= start
    ]
    if len(at) > 1:
        ax.plot(*zip(*at, strict=True), color=color, linewidth=0.7, alpha=0.6)


def _zoom(ax: Axes) -> None:
    """Limits the axes to the second half of the time, and to what the lines do there."""
    lines = [(np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in ax.lines]
    last = max((x.max() for x, _ in lines if len(x)), default=1.0)
    seen = [y[x >= last / 2] for x, y in lines if len(x)]
    seen = np.concatenate([y for y in seen if len(y)] or [np.array([0.0, 1.0])])
    room = 0.08 * (np.ptp(seen) or 1.0)
    ax.set_xlim(last / 2 - 0.02 * last, last * 1.02)
    ax.set_ylim(seen.min() - room, seen.max() + room)


def _published(ax: Axes, section: Section) -> list[Line2D]:
    """Marks the published values of the methods that are here, for networks of the same size."""
    look = {"linestyle": "none", "marker": "o", "markerfacecolor": "none", "markersize": 7}
    for table in tables_for(section):
        if not table.same_network(section):
            continue
        for group in section.groups:
            row = table.row(group)
            if row:
                ax.plot(table.epochs, row["accuracy"], color=group.method.color, **look)
        return [_handle(ax, "published, in the method's colour", color="0.3", **look)]
    return []


def _legend(group: Group) -> str:
    count = len(group.runs)
    parts = [f"{count} seeds"] * (count > 1)
    left = f"{len(group.unfinished)} " * (count > 1)
    parts += [f"{left}unfinished"] * bool(group.unfinished)
    return f"{group.label} ({', '.join(parts)})" if parts else group.label


@rc_context(STYLE)
def compute(section: Section) -> Figure:
    """The metric at the last evaluation against active FLOPs; bars are standard deviations."""
    figure, axes = new_figure(7.2, 4.8)
    ax = axes[0, 0]
    points, bars, labels, unit = [], [], [], "image"
    for group, style in zip(section.groups, styles(section.groups), strict=True):
        flops, unit_here = group.gflops()
        value = section.shown(group.last(section.metric))
        if flops is None or value is None:
            continue
        unit = unit_here or unit
        unfinished = bool(group.unfinished)
        ax.errorbar(
            flops.mean,
            value.mean,
            xerr=flops.std,
            yerr=value.std,
            fmt=style["marker"],
            color=style["color"],
            markerfacecolor="white" if unfinished else style["color"],
            markersize=7,
            elinewidth=1,
            capsize=2,
        )
        points.append((flops.mean, value.mean))
        bars += [
            (
                (flops.mean - (flops.std or 0), value.mean),
                (flops.mean + (flops.std or 0), value.mean),
            ),
            (
                (flops.mean, value.mean - (value.std or 0)),
                (flops.mean, value.mean + (value.std or 0)),
            ),
        ]
        labels.append(group.label)
    scale = _unit_of_flops(ax)
    ax.set_xlabel(f"active {scale} per {unit}, forward, at the last evaluation")
    ax.set_ylabel(section.metric_name)
    ax.margins(0.12)
    ax.grid(alpha=0.25)
    place_labels(ax, points, labels, bars)
    return figure


def _unit_of_flops(ax: Axes) -> str:
    """GFLOPs, or MFLOPs for small networks, with the ticks to match."""
    if ax.get_xlim()[1] >= 0.5:
        return "GFLOPs"
    ax.xaxis.set_major_formatter(lambda value, _: f"{1000 * value:g}")
    return "MFLOPs"


def place_labels(
    ax: Axes,
    points: Sequence[tuple[float, float]],
    labels: Sequence[str],
    bars: Sequence[tuple[tuple[float, float], tuple[float, float]]] = (),
) -> None:
    """Writes a label at each point, where it covers neither another one, nor a point or a bar.

    Tries places around the point, near ones first; a line leads to a label that is far away.

    Args:
        ax: whose limits are final.
        points: in data units.
        labels: one a point.
        bars: lines to keep clear of, from lower left to upper right.
    """
    figure = ax.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    inside = ax.get_window_extent(renderer)
    pixels = ax.transData.transform(np.array(points).reshape(-1, 2))
    pad, point = 5.0 * figure.dpi / 72, 72 / figure.dpi
    taken = [(x - pad, y - pad, x + pad, y + pad) for x, y in pixels]
    for ends in bars:
        (x0, y0), (x1, y1) = ax.transData.transform(np.array(ends))
        taken.append((x0 - pad / 3, y0 - pad / 3, x1 + pad / 3, y1 + pad / 3))
    for text, xy, (x, y) in zip(labels, points, pixels, strict=True):
        look = {"textcoords": "offset points", "fontsize": 8, "color": "0.15"}
        trial = ax.annotate(text, xy, (0, 0), **look)
        box = trial.get_window_extent(renderer)
        trial.remove()
        choices = []
        for far, dx, dy in _offsets(box.width, box.height, pad):
            corners = (x + dx, y + dy, x + dx + box.width, y + dy + box.height)
            outside = corners[0] < inside.x0 or corners[2] > inside.x1
            outside = outside or corners[1] < inside.y0 or corners[3] > inside.y1
            cost = 10 * outside + sum(_overlap(corners, other) for other in taken)
            choices.append((cost, far, len(choices), dx, dy, corners))
        _, far, _, dx, dy, corners = min(choices)
        arrow = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
        leader = {"arrowprops": arrow} if far > 2.0 else {}
        ax.annotate(text, xy, (dx * point, dy * point), **look, **leader)
        taken.append(corners)


def _offsets(width: float, height: float, pad: float) -> Iterator[tuple[float, float, float]]:
    """How far, and where a label's lower left corner may lie from its point, in pixels."""
    for far in (1.2, 2.0, 3.5, 5.0, 7.0, 9.0, 12.0):
        gap = pad * far
        across = (gap, -gap - width, -width / 2)
        up = (-height / 2, gap, -gap - height)
        for dx, dy in product(across, up):
            if (dx, dy) != (-width / 2, -height / 2):
                yield far, dx, dy


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def has_timeline(group: Group) -> bool:
    """Whether experts come and go in a group."""
    for run in group.runs:
        for layer in run.layers("active_experts"):
            key = f"val_routing/{layer}/active_experts"
            if len({row.values[key] for row in run.rows if key in row.values}) > 1:
                return True
    return any(run.events for run in group.runs)


@rc_context(STYLE)
def timeline(group: Group, by: str) -> Figure:
    """Active experts and experts per token over time, layer by layer, with births and deaths."""
    layers = group.layers("active_experts") or sorted(
        {event["layer"] for run in group.runs for event in run.events}
    )
    columns = min(COLUMNS, len(layers))
    rows = -(-len(layers) // columns)
    figure, axes = new_figure(
        max(5.0, 3.4 * columns), 2.6 * rows + 0.7, rows, columns, sharex=True, sharey=True
    )
    for ax in axes.flat[len(layers) :]:
        ax.set_visible(False)
    for ax, layer in zip(axes.flat, layers, strict=False):
        for place, run in enumerate(group.runs):
            _timeline_of(ax, run, layer, by, LINES[place % len(LINES)])
        ax.set_title(layer)
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(alpha=0.25)
    axes[0, 0].set_ylim(0, 1.06 * axes[0, 0].get_ylim()[1])  # shared by all
    for ax in axes[-1]:
        ax.set_xlabel("epoch" if by == "epoch" else "optimizer step")
    for ax in axes[:, 0]:
        ax.set_ylabel("experts")
    handles = [
        _handle(axes[0, 0], "active experts", color=COLORS[0]),
        _handle(axes[0, 0], "experts per token", color=COLORS[1]),
    ]
    seeds = [run.seed for run in group.runs]
    if len(seeds) > 1:
        handles += [
            _handle(axes[0, 0], f"seed {seed}", color="0.3", linestyle=LINES[i % len(LINES)])
            for i, seed in enumerate(seeds)
        ]
    seen = {event["event"] for run in group.runs for event in run.events}
    for kind, (marker, color) in (("birth", BIRTH), ("death", DEATH), ("refusal", REFUSAL)):
        if kind in seen:
            look = {"color": color, "marker": marker, "linestyle": "none", "markersize": 5}
            handles.append(_handle(axes[0, 0], kind, **look))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    return figure


def _handle(ax: Axes, label: str, **look: object) -> Line2D:
    return ax.plot([], [], label=label, **look)[0]


def _timeline_of(ax: Axes, run: Run, layer: str, by: str, line: object) -> None:
    per_epoch = next((row.step / row.epoch for row in reversed(run.rows) if row.epoch), 1.0)
    unit = per_epoch if by == "epoch" else 1.0
    events = [event for event in run.events if event.get("layer") == layer]
    counted = [
        (row.step, row.values[key])
        for row in run.rows
        if (key := f"val_routing/{layer}/active_experts") in row.values
    ]
    changes = [
        (int(event["step"]), float(event["active_experts"]), event["event"])
        for event in events
        if event["step"].isdigit() and event["active_experts"].isdigit()
    ]
    active = sorted([*counted, *((step, count) for step, count, _ in changes)])
    if changes:  # before the first change; a birth is counted in its own row
        step, count, kind = changes[0]
        active.insert(0, (0, count - (kind == "birth") + (kind == "death")))
    elif counted:
        active.insert(0, (0, counted[0][1]))
    if active:
        x, y = zip(*active, strict=True)
        steps = np.array(x) / unit
        ax.step(steps, y, where="post", color=COLORS[0], linestyle=line)
    for step, count, kind in changes:
        marker, color = {"birth": BIRTH, "death": DEATH}.get(kind, REFUSAL)
        ax.plot(step / unit, count, marker=marker, color=color, markersize=5, linestyle="none")
    taken = [
        (row.step / unit, row.values[key])
        for row in run.rows
        if (key := f"val_routing/{layer}/experts_per_token") in row.values
    ]
    if taken:
        x, y = zip(*taken, strict=True)
        ax.plot(x, y, color=COLORS[1], linestyle=line)
