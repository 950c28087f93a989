"""Figures of the routing: load over time, experts per token, similarity of routing vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from app.figures import COLORS, DIVERGING, house_style, new_figure

from .history import RoutingHistory
from .statistics import utilisation

UNUSED = "#d9d9d9"  # a slot that holds no expert
TAIL = 8  # from here on, numbers of experts per token are one bar
COLUMNS = 80  # characters of a line of text


# ---------------------------------------------------------------------- load over time


@house_style()
def load_figure(layer: str, history: RoutingHistory, events: Sequence[dict[str, Any]]) -> Figure:
    """Heat map of the load, experts by time, with births and deaths.

    Args:
        layer: its name, for the title.
        history: of at least one interval.
        events: births and deaths of this layer, as AdaptiveExperts keeps them.
    """
    active_PE = torch.stack(history.active)
    use_PE = torch.stack(
        [utilisation(load, on) for load, on in zip(history.loads, active_PE, strict=True)]
    )
    shown = {event["slot"] for event in events} | set(active_PE.any(0).nonzero().flatten().tolist())
    slots = sorted(shown)
    use = use_PE[:, slots].numpy().T
    top = max(2.0, float(np.nanpercentile(use, 99)))
    norm = TwoSlopeNorm(1.0, 0.0, top)

    figure, ((axes,),) = new_figure(7.2, min(7.0, 1.7 + 0.17 * len(slots)))
    axes.set_facecolor(UNUSED)
    edges = np.array([0, *history.steps])
    mesh = axes.pcolormesh(
        edges, np.arange(len(slots) + 1) - 0.5, use, cmap=DIVERGING, norm=norm, rasterized=True
    )
    over = "max" if np.nanmax(use) > top else "neither"
    bar = figure.colorbar(mesh, ax=axes, extend=over, pad=0.02)
    bar.set_label("load / fair share")
    bar.set_ticks([0, 0.5, 1, (1 + top) / 2, top], labels=_numbers(0, 0.5, 1, (1 + top) / 2, top))
    marks = [Patch(facecolor=UNUSED, label="no expert")] if not active_PE[:, slots].all() else []
    for kind, marker in (("birth", "^"), ("death", "X")):
        mine = [event for event in events if event["event"] == kind]
        if mine:
            marks += axes.plot(
                [event["step"] for event in mine],
                [slots.index(event["slot"]) for event in mine],
                marker,
                color="white",
                markeredgecolor="black",
                markersize=7 if len(slots) <= 32 else 5.5,
                markeredgewidth=0.8,
                linestyle="none",
                label=kind,
                clip_on=False,
                zorder=3,
            )
    if marks:
        axes.legend(
            handles=marks, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, borderaxespad=0.2
        )
    every = -(-len(slots) // 20)
    axes.set_yticks(range(0, len(slots), every), labels=[str(slot) for slot in slots[::every]])
    axes.set_xlim(edges[0], edges[-1])
    axes.set(xlabel="optimizer step", ylabel="expert (slot)")
    axes.set_title(f"{layer}: load of each expert", loc="left")
    return figure


def _numbers(*values: float) -> list[str]:
    return [f"{value:.2g}" for value in values]


# ---------------------------------------------------------------------- experts per token


@house_style()
def taking_figure(shares: dict[str, dict[str, Tensor]], layers: Sequence[str], note: str) -> Figure:
    """Bars: how many tokens take 0, 1, 2 ... experts, in training and validation.

    Args:
        shares: by split (as "training") and layer, the share of tokens that take so many experts.
        layers: to be drawn, one axes each.
        note: added to the title.
    """
    longest = max(_last(shares[split][layer]) for split in shares for layer in layers) + 1
    bins = min(max(longest, 3), TAIL + 1)
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    figure, axes = new_figure(
        max(4.4, 2.6 * columns + 0.8), 1.0 + 1.9 * rows, rows, columns, sharey=True, sharex=True
    )
    labels = [str(k) for k in range(bins)]
    if longest > bins:
        labels[-1] += "+"
    width = 0.8 / len(shares)
    for place, own in zip(axes.flat, layers, strict=False):
        for i, (split, color) in enumerate(zip(shares, COLORS, strict=False)):
            share_K = shares[split][own].double()
            pooled = torch.cat([share_K[: bins - 1], share_K[bins - 1 :].sum()[None]])
            pooled = torch.nn.functional.pad(pooled, (0, bins - len(pooled)))
            at = np.arange(bins) + (i - (len(shares) - 1) / 2) * width
            place.bar(at, 100 * pooled.numpy(), width, color=color, label=split)
        place.set_title(own)
        place.set_xticks(range(bins), labels=labels)
    highest = max(place.get_ylim()[1] for place in axes.flat[: len(layers)])  # shared by all
    axes.flat[0].set_ylim(0, min(100, 10 * -(-highest // 10)))
    for place in axes.flat[len(layers) :]:
        place.set_visible(False)
    figure.supxlabel("experts per token", fontsize=9)
    figure.supylabel("tokens (%)", fontsize=9)
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    figure.suptitle(f"How many experts a token takes{note}", fontsize=10, x=0.02, ha="left")
    return figure


def _last(share_K: Tensor) -> int:
    """The largest number of experts that a token took."""
    taken = share_K.nonzero().flatten()
    return int(taken[-1]) if len(taken) else 0


# ---------------------------------------------------------------------- routing vectors


@house_style()
def similarity_figure(layer: str, similarity_RR: Tensor, active_E: Tensor) -> Figure:
    """Cosines between the routing vectors of the active experts, without those with themselves.

    A ternary router has a group of vectors for each level of its experts, and one for its nulls.
    """
    slots, outputs = len(active_E), len(similarity_RR)
    levels = outputs // slots
    if levels == 1:
        kept = active_E.nonzero().flatten().tolist()
        names, what = [str(slot) for slot in kept], "expert (slot)"
    else:
        kept = list(range(outputs))
        names = [str(i % slots) for i in range(levels * slots)]
        names += [f"n{i}" for i in range(outputs - levels * slots)]
        what = "expert (slot), level by level; n: nulls"
    cosine = similarity_RR[kept][:, kept].numpy().copy()
    np.fill_diagonal(cosine, np.nan)
    top = max(0.1, float(np.nanmax(np.abs(cosine), initial=0.0)))
    size = min(6.0, 2.4 + 0.14 * len(kept))
    figure, ((axes,),) = new_figure(size + 1.2, size)
    axes.set_facecolor(UNUSED)
    image = axes.imshow(cosine, cmap=DIVERGING, vmin=-top, vmax=top)
    figure.colorbar(image, ax=axes, shrink=0.85, pad=0.03).set_label("cosine")
    every = -(-len(kept) // 20)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(range(0, len(kept), every), labels=names[::every])
    for start in range(slots, outputs if levels > 1 else 0, slots):
        axes.axhline(start - 0.5, color="black", linewidth=0.8)
        axes.axvline(start - 0.5, color="black", linewidth=0.8)
    if len(kept) <= 10:
        for (row, column), value in np.ndenumerate(cosine):
            ink = "white" if abs(value) > 0.7 * top else "black"
            if row != column:
                text = f"{value:.2f}".replace("-0.00", "0.00")
                axes.text(column, row, text, ha="center", va="center", size=6, color=ink)
    axes.set(xlabel=what, ylabel=what)
    axes.set_title(f"{layer}: similarity of routing vectors", loc="left")
    return figure
