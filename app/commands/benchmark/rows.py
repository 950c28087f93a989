"""Results: one flat row for each case and phase, and the table that a person reads."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from .timing import paired_ratio, spread

Row = dict[str, Any]
WIDTH = 120


def setting(benchmark: str, device: torch.device, dtype: str, **sizes: Any) -> Row:
    """What every row of a run has in common: benchmark, hardware, versions and sizes."""
    return {
        "benchmark": benchmark,
        "device": device.type,
        "hardware": hardware(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "dtype": dtype,
        **sizes,
    }


def hardware(device: torch.device) -> str:
    """The name of the processor or card, as "AMD EPYC, 2 cores"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def timed(case: str, phase: str, seconds: Sequence[float]) -> Row:
    """The part of a row that every case has."""
    low, median, high = spread(seconds)
    return {
        "case": case,
        "phase": phase,
        "median_s": median,
        "quartiles_s": [low, high],
        "spread": (high - low) / median,
        "repeats": len(seconds),
    }


def ratio_to(name: str, seconds: Sequence[float], reference: Sequence[float]) -> Row:
    """`ratio_to_<name>`: the median of the ratios of the same round, and their quartiles."""
    low, median, high = paired_ratio(seconds, reference)
    return {f"ratio_to_{name}": median, f"ratio_to_{name}_quartiles": [low, high]}


def show(title: str, rows: Sequence[Row], columns: dict[str, str], note: str = "") -> None:
    """Prints a table.

    Args:
        title: above the table.
        rows: one line each.
        columns: keys of the rows, and their headings; a heading in ms, % or MiB converts.
        note: below the table.
    """
    table = Table(
        title=title, title_justify="left", caption=note or None, caption_justify="left", box=SIMPLE
    )
    for key, heading in columns.items():
        words = key in ("case", "phase")
        table.add_column(heading, justify="left" if words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row.get(key), heading) for key, heading in columns.items()))
    console = Console()
    if not console.is_terminal:  # a file has no width
        console = Console(width=WIDTH)
    console.print(table)


def _cell(value: Any, heading: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if heading.endswith("ms"):
        return f"{value * 1e3:.2f}"
    if heading.endswith("%"):
        return f"{value * 100:.1f}"
    if heading.endswith("MiB"):
        return f"{value / 2**20:.1f}"
    if isinstance(value, int) or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3f}"


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silences what Lightning says of every trainer."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    loggers.append(logging.getLogger("lightning.pytorch.utilities.rank_zero"))
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
