"""Pictures of what `measures.py` found."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import MaxNLocator

from ...figures import COLORS, DIVERGING, SEQUENTIAL, new_figure, save_figure

ROWS = 32  # of a heat map, at most


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Draws everything in the result of `python -m app analyze`.

    Args:
        result: what `--json` writes.
        folder: where the PNGs go; files of the same name are replaced, each at once.

    Returns:
        The files.
    """
    figures = {}
    if result["saturation"]:
        figures["saturation"] = draw_saturation(result)
    for layer, experts in result["experts"].items():
        figures[f"experts_{layer}"] = draw_experts(layer, experts)
        figures[f"affinity_{layer}"] = draw_affinity(layer, result["affinity"])
    paths = {folder / f"{name}.png": figure for name, figure in figures.items()}
    for path, figure in paths.items():
        save_figure(figure, path)
    return list(paths)


def draw_saturation(result: dict[str, Any]) -> Figure:
    """Saturation of each layer over the steps of the checkpoints; at random, dashed."""
    layers = list(result["experts"])
    steps = [each["step"] for each in result["saturation"]]
    last = result["step"]
    figure, axes = new_figure(6.4, 3.8)
    axis = axes[0, 0]
    for index, layer in enumerate(layers):
        found = [each["layers"][layer] for each in result["saturation"]]
        color = _color(index, len(layers))
        style = {"color": color, "marker": "osD^v"[index % 5], "markersize": 4}
        axis.plot([*steps, last], [*_column(found, "saturation"), 1.0], label=layer, **style)
        axis.plot(steps, _column(found, "random_loads"), linestyle="--", **style)
    axis.plot([], [], "k--", label="expected from\nthe loads alone")
    axis.set_xticks(sorted({*steps, last}) if len(steps) < 8 else axis.get_xticks()[1:-1])
    axis.set_ylim(0, 1.03)
    axis.set(
        xlabel="training step of the checkpoint",
        ylabel=f"share of a token's experts at step {last}\nthat it takes at the earlier step",
    )
    axis.set_title("Router saturation", fontsize=10)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def draw_experts(layer: str, experts: list[dict[str, Any]]) -> Figure:
    """Loss change when masked, load, and distance to the default vector, expert by expert."""
    has_vectors = "distance_own" in experts[0]
    columns = 3 if has_vectors else 2
    height = 1.2 + 0.24 * len(experts)
    figure, axes = new_figure(2.4 * columns + 1.2, height, columns=columns, sharey=True)
    place = np.arange(len(experts))
    change, load, *rest = axes[0]
    change.barh(place, _column(experts, "contribution"), color=COLORS[0], height=0.7)
    error = _column(experts, "contribution_error")
    change.errorbar(
        _column(experts, "contribution"), place, xerr=error, fmt="none", ecolor="black", capsize=2
    )
    change.axvline(0, color="black", linewidth=0.8)
    change.set(xlabel="loss change when masked\n(lines: one standard error)", ylabel="expert")
    change.locator_params(axis="x", nbins=4)
    load.barh(place, _column(experts, "load"), color=COLORS[1], height=0.7)
    load.set(xlabel="load\n(share of tokens that take it)")
    for axis in rest:
        axis.plot(_column(experts, "distance_own"), place, "o", color=COLORS[0], label="own tokens")
        others = _column(experts, "distance_others")
        axis.plot(others, place, "D", color=COLORS[3], markersize=5, label="other tokens")
        axis.set_xlim(left=0)
        axis.grid(axis="y", color="0.9", linewidth=0.6)
        axis.set_xlabel("distance to default vector\n(relative to its length)")
        axis.legend(
            loc="lower center",
            bbox_to_anchor=(0.5, 1.0),
            ncols=2,
            handletextpad=0.1,
            frameon=False,
            fontsize=8,
        )
    change.set_yticks(place, [str(each["expert"]) for each in experts])
    change.set_ylim(len(experts) - 0.4, -0.6)  # the first on top
    load.set_xlim(left=0)
    figure.suptitle(f"Experts of {layer}", fontsize=10)
    return figure


def draw_affinity(layer: str, affinity: dict[str, Any]) -> Figure:
    """Which experts the tokens of each class, or each token, take; and how that departs from the
    load. At most `ROWS` rows, the first ones."""
    names = [_short(name) for name in affinity["names"][:ROWS]]
    found = affinity["layers"][layer]
    share = np.array(found["share"][:ROWS], dtype=float)
    load = np.array(found["load"])
    columns = len(load)
    width = min(16.0, 3.2 + 2 * max(1.6, 0.22 * columns))
    figure, axes = new_figure(width, 1.5 + 0.19 * (len(names) + 1), columns=2, sharey=True)
    left, right = axes[0]
    is_class = affinity["of"] == "class"
    what = "class's tokens\n" if is_class else "token's\noccurrences "
    whole = np.vstack([load, share])
    _heat(figure, left, whole, SEQUENTIAL, (0.0, 1.0), f"share of the {what}that take the expert")
    rest = share - load
    most = max(float(np.nanmax(np.abs(rest))), 1e-3)
    rest = np.vstack([np.full(columns, math.nan), rest])
    _heat(figure, right, rest, DIVERGING, (-most, most), "departure from the share\nof all tokens")
    left.set_yticks(range(len(names) + 1), ["all tokens", *names])
    left.axhline(0.5, color="white", linewidth=2)
    every = math.ceil(columns / 24)
    for axis in (left, right):
        axis.set_xticks(range(0, columns, every), [str(e) for e in found["experts"][::every]])
        axis.set_xlabel("expert")
    kind = "classes" if is_class else "tokens"
    count = len(affinity["names"])
    most_often = "" if is_class else "most frequent "
    chosen = "" if count <= ROWS else f" ({ROWS} {most_often}of {count})"
    figure.suptitle(f"Experts of {layer} by {kind}{chosen}", fontsize=10)
    return figure


def _heat(
    figure: Figure,
    axis: Axes,
    values: np.ndarray,
    colors: str,
    limits: tuple[float, float],
    label: str,
) -> None:
    image = axis.imshow(values, cmap=colors, vmin=limits[0], vmax=limits[1], aspect="auto")
    for side in axis.spines.values():
        side.set_visible(False)
    axis.tick_params(length=0)
    inch = 1.0 / figure.get_figheight()
    options = {"location": "top", "aspect": 16, "shrink": 0.9}
    bar = figure.colorbar(image, ax=axis, fraction=0.2 * inch, pad=0.1 * inch, **options)
    bar.locator = MaxNLocator(5)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)


def _column(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [math.nan if row[key] is None else row[key] for row in rows]


def _color(index: int, count: int) -> Any:
    """Colours apart for few layers; by depth, dark to light, for many."""
    if count <= 7:
        return COLORS[index]
    return colormaps[SEQUENTIAL](index / (count - 1))


def _short(name: str) -> str:
    """A name as matplotlib can write it: no formula, no character that its font lacks."""
    name = name if len(name) <= 24 else name[:23] + "…"
    font = get_font(findfont(FontProperties()))
    known = (c if font.get_char_index(ord(c)) else ascii(c)[1:-1] for c in name)
    return "".join(known).replace("$", r"\$")
