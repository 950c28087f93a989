"""The look of every figure, and how one is written (no window system, no global state)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import get_data_path, rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageFont

from .files import write_whole

# Okabe and Ito's eight colours, apart for colour-blind readers too; the pale yellow comes last.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#F0E442")
SEQUENTIAL = "cividis"  # for amounts: dark is little
DIVERGING = "PuOr"  # for what has a middle: similarities, utilisation around a fair share

STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
}


def house_style() -> AbstractContextManager[None]:
    """The style, as a context or a decorator: matplotlib reads sizes whenever a text is made."""
    return rc_context(STYLE)


def new_figure(
    width: float = 6.4, height: float = 3.6, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, np.ndarray]:
    """An empty figure in the house style.

    Args:
        width: in inches.
        height: in inches.
        rows: of axes.
        columns: of axes.
        **options: more of matplotlib's `Figure.subplots`, as `sharex`.

    Returns:
        The figure, and its axes as an array (rows, columns).
    """
    with house_style():
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, axes


def save_figure(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Writes a PNG. Makes the folder."""
    with house_style():
        write_whole(path, lambda file: figure.savefig(file, format="png", dpi=dpi))


def as_image(figure: Figure, dpi: int = 100) -> np.ndarray:
    """The figure as pixels (height, width, 3), uint8: what TensorBoard's add_image takes (HWC)."""
    with house_style():
        figure.set_dpi(dpi)
        figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3].copy()


def save_image(pixels: np.ndarray, path: Path) -> None:
    """Writes what `as_image` returned as a PNG, so that a figure is drawn only once."""
    write_whole(path, lambda file: Image.fromarray(pixels).save(file, format="png"))


def font(size: int, face: str = "DejaVuSans") -> ImageFont.FreeTypeFont:
    """The font of the figures, for pictures that are drawn as pixels.

    Args:
        size: in pixels.
        face: DejaVuSans, DejaVuSans-Bold or DejaVuSansMono.
    """
    return ImageFont.truetype(Path(get_data_path()) / "fonts" / "ttf" / f"{face}.ttf", size)
