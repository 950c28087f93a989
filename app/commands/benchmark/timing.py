"""Times by interleaved repeats: a machine that slows down slows all cases alike."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

SECONDS_PER_MEASUREMENT = {"cpu": 0.0, "cuda": 0.02}
"""Short calls are repeated within one measurement until they fill this time."""

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` is the processor time of all threads of this process: with one thread it tells what `wall`
does, hardly disturbed by other work on the machine."""


def interleave(
    cases: Mapping[str, Callable[[], Any]],
    repeats: int,
    device: torch.device,
    warmup: int = 1,
    done: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Runs every case once in each of `repeats` rounds, in an order drawn anew for each.

    Args:
        cases: what to time, by name.
        repeats: rounds that count.
        device: waited for before and after each measurement.
        warmup: rounds before them that do not count.
        done: called after every measurement (for a progress bar).
        clock: what to measure with, one of CLOCKS.

    Returns:
        Seconds of one call in each round; the same index is the same round for all cases.
    """
    calls = dict.fromkeys(cases, 1)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    order, shuffler = list(cases), random.Random(0)
    for turn in range(-warmup, repeats):
        shuffler.shuffle(order)
        for name in order:
            synchronize(device)
            start = clock()
            for _ in range(calls[name]):
                cases[name]()
            synchronize(device)
            each = (clock() - start) / calls[name]
            if turn >= 0:
                seconds[name].append(each)
            else:
                shortest = SECONDS_PER_MEASUREMENT.get(device.type, 0.0)
                calls[name] = max(1, math.ceil(shortest / each))
            done()
    return seconds


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return low, middle, high


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Quartiles and median of the ratios within each round."""
    return spread([value / other for value, other in zip(values, reference, strict=True)])


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int:
    """Most bytes of tensors that one call holds beyond those that there were before it."""
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with _no_stderr():  # the profiler writes there whatever it is told
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
                call()
            recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return max(_held(events), default=0)


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """Drops what libraries write to standard error past Python."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _held(events: list[dict[str, Any]]) -> Iterator[int]:
    """Bytes held after each allocation, relative to the start."""
    changes = [event for event in events if event.get("name") == "[memory]"]
    held = 0
    for event in sorted(changes, key=lambda event: event["ts"]):
        held += int(event["args"]["Bytes"])
        yield held
