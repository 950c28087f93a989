"""Runs of the command line that are killed, and what they leave behind.

A server process imports the app once and forks a child for every command line: a sitting then
costs no start of Python. The child kills itself at a place that is aimed at, or the server kills
it at a time after training has begun.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Server:
    """The process that forks; use as a context manager."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.stdin.close()
        self.process.wait(60)

    def run(self, folder: Path, argv: list[str], **plan: Any) -> dict[str, Any]:
        """One command line in a working directory.

        Args:
            folder: the working directory; `out.txt` in it takes what is printed.
            argv: arguments of `app.cli.main`.
            **plan: nothing to let it end; `after`, seconds of training until SIGKILL (or `signal`);
                or `place` (a key of PLACES) and `count`, how often that is passed before.

        Returns:
            `status` as of subprocess, `seconds` of training.
        """
        folder.mkdir(parents=True, exist_ok=True)
        order = {"folder": str(folder), "argv": argv, "plan": plan}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def serve() -> None:
    """Forks a child for every order, one after the other."""
    import sklearn.datasets  # noqa: F401
    import torch
    import torch.utils.tensorboard

    import app.cli.main  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _sitting(order, writer)
        os.close(writer)
        print(json.dumps(_watch(child, reader, order["plan"])), flush=True)
        os.close(reader)


def _watch(child: int, began: int, plan: dict[str, Any]) -> dict[str, Any]:
    select.select([began], [], [], 120)  # training begins, or the child ends
    start = time.monotonic()
    ended = 0
    if "after" in plan:
        # The pipe says the second time that the child has ended.
        os.read(began, 1)
        if not select.select([began], [], [], plan["after"])[0]:
            os.kill(child, plan.get("signal", signal.SIGKILL))
    _, ended = os.waitpid(child, 0)
    seconds = time.monotonic() - start
    return {"status": os.waitstatus_to_exitcode(ended), "seconds": seconds}


def _sitting(order: dict[str, Any], began: int) -> None:
    import callbacks
    from app.cli.main import main

    os.chdir(order["folder"])
    out = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(out, number)
    start = callbacks.Checkpoint.on_train_start

    def on_train_start(self: Any, *arguments: Any) -> None:
        start(self, *arguments)
        os.write(began, b"x")

    callbacks.Checkpoint.on_train_start = on_train_start
    plan = order["plan"]
    if "place" in plan:
        PLACES[plan["place"]](plan["count"])
    try:
        status = main(order["argv"])
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# ---------------------------------------------------------------------- places to be killed at


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _wrap(
    owner: Any,
    name: str,
    count: int,
    when: Callable[..., bool] = lambda *_: True,
    before: bool = True,
    instead: Callable[..., None] = _die,
) -> None:
    """Has the call number `count` (from 0) of those that `when` accepts be the last."""
    original, left = getattr(owner, name), [count]

    def wrapped(*arguments: Any, **options: Any) -> Any:
        last = False
        if when(*arguments):
            last, left[0] = left[0] == 0, left[0] - 1
        if last and before:
            instead(*arguments)
        result = original(*arguments, **options)
        if last:
            instead(*arguments)
        return result

    setattr(owner, name, wrapped)


def _is_checkpoint(source: Any, target: Any = "") -> bool:
    return str(target).endswith(".ckpt")


def _half_a_file(checkpoint: Any, file: Any) -> None:
    """What is on the disk of a file that was being written."""
    file.write(b"PK\x03\x04" + os.urandom(5000))
    file.flush()
    _die()


def _task() -> Any:
    from app.tasks import ImageClassification, LanguageModeling

    return ImageClassification, LanguageModeling


def _in_training(within: bool) -> Callable[[int], None]:
    def place(count: int) -> None:
        for task in _task():
            _wrap(
                task,
                "training_step",
                count,
                lambda self, batch, index: (
                    not within or bool(index % self.trainer.accumulate_grad_batches)
                ),
            )

    return place


def _in_validation(count: int) -> None:
    for task in _task():
        _wrap(task, "validation_step", count)


def _of(module: str, owner: str | None, name: str, **options: Any) -> Callable[[int], None]:
    def place(count: int) -> None:
        found = __import__(module, fromlist=["_"])
        _wrap(getattr(found, owner) if owner else found, name, count, **options)

    return place


def _while_saving(count: int) -> None:
    import torch

    _wrap(torch, "save", count, instead=_half_a_file)


PLACES: dict[str, Callable[[int], None]] = {
    "while a checkpoint is written": _while_saving,
    "before a checkpoint is on the disk": _of("os", None, "fsync"),
    "before a checkpoint has its name": _of("os", None, "replace", when=_is_checkpoint),
    "after a checkpoint has its name": _of(
        "os", None, "replace", when=_is_checkpoint, before=False
    ),
    "before a table has its name": _of(
        "os", None, "replace", when=lambda _, target: str(target).endswith(".csv")
    ),
    "in a step": _in_training(within=False),
    "within an accumulation": _in_training(within=True),
    "in a validation": _in_validation,
    "in a recording window": _of(
        "callbacks.methods.adaptive_experts", "AdaptiveExperts", "_record", before=False
    ),
    "after a birth": _of(
        "callbacks.methods.expert_events",
        "ExpertEvents",
        "publish",
        before=False,
    ),
    "before an epoch's end is logged": _of(
        "callbacks.run.tables", "MetricsTable", "on_train_epoch_end", before=False
    ),
    "while event files are cut back": _of("os", None, "truncate", before=False),
    "when all is saved": _of(
        "callbacks.run.checkpoint", "Checkpoint", "on_train_end", before=False
    ),
}


# ---------------------------------------------------------------------- what a run leaves behind


def left_behind(run: Path) -> dict[str, Any]:
    """Everything in a run's folder that should not depend on how often it was killed."""
    import csv

    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    checkpoint.pop("event_files")  # more files, of the same content
    table = checkpoint["callbacks"]["MetricsTable"]
    table.pop("seconds")
    for row in table["rows"]:
        assert row.pop("seconds") > 0
    tables = {}
    for name in ("metrics.csv", "expert_events.csv"):
        if (run / name).exists():
            with (run / name).open(newline="", encoding="utf-8") as file:
                tables[name] = list(csv.DictReader(file))
    times = [float(row.pop("seconds")) for row in tables["metrics.csv"]]
    assert times == sorted(times) and times[0] > 0
    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    scalars = {
        tag: sorted((each.step, each.value) for each in events.Scalars(tag))
        for tag in tags["scalars"]
        if tag != "tokens_per_second"  # at times that the clock sets
    }
    texts = {
        tag: sorted((e.step, e.tensor_proto.string_val[0]) for e in events.Tensors(tag))
        for tag in tags["tensors"]
    }
    return {"checkpoint": checkpoint} | tables | {"scalars": scalars, "texts": texts}


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Paths at which two nests of tensors and plain values are not equal, bit for bit."""
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if torch.equal(one, other) else [path]
    if isinstance(one, dict) and isinstance(other, dict):
        found = [f"{path}/{key} on one side" for key in one.keys() ^ other.keys()]
        both = [key for key in one if key in other]
        return found + [
            d for key in both for d in differences(one[key], other[key], f"{path}/{key}")
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} entries"]
        pairs = enumerate(zip(one, other, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, f"{path}/{i}")]
    return [] if one == other else [f"{path}: {one!r} and {other!r}"]


if __name__ == "__main__":
    serve()
