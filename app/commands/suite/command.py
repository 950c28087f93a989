"""`python -m app suite FILE`: many runs, one command that can be repeated until all are done."""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ...errors import ConfigError
from ...runs.progress import evaluated, newest_version, read_rows
from ..arguments import Parser, number
from .execution import LOG, WORDS, Outcome, RayTasks, State, Threads, command, state
from .file import Run, read_suite

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_LINES = 60.0  # of a running run, where the output is no terminal


def main(argv: Sequence[str]) -> int:
    """Runs what is not finished of a suite.

    Returns:
        0; 1 if a run failed; 130 when stopped by Ctrl-C or SIGTERM.

    Raises:
        ConfigError: for a mistake in the file or the arguments, before anything runs.
    """
    options = _parse(list(argv))
    overrides = [f"--{setting}" for setting in options.set] + options.more
    on_ray = options.engine == "ray"
    runs = read_suite(
        options.file,
        options.runs.absolute() if on_ray else options.runs,
        name=options.name,
        configs=[file.absolute() if on_ray else file for file in options.config],
        overrides=overrides,
    )
    if options.shard:
        index, count = options.shard
        runs = runs[index::count]
    if options.dry_run:
        _show_plan(runs)
        return 0
    if on_ray:
        return run_all(runs, lambda _: RayTasks(options.cpus, options.gpus, options.retries))
    return run_all(runs, lambda stops: Threads(options.jobs, stops))


def _show_plan(runs: Sequence[Run]) -> None:
    for run in runs:
        now = state(run)
        share_text = f" at {now.share:.0%}" if now.word == "interrupted" else ""
        print(f"{run.name}: {now.word}{share_text}; {run.end}")
        for line in _differing(run):
            print(f"  {line}")
        if now.word != "finished":
            print(f"  {shlex.join(['python', *command(run, now)[1:]])}")


def _differing(run: Run) -> list[str]:
    version = newest_version(run.folder)
    other = run.other_settings(version) if version else []
    return [f"note: {version} has other settings: {'; '.join(other[:4])}"] if other else []


class Following:
    """A run that the engine has, followed by what it writes.

    Attributes:
        before: where it stood.
        share: the part that is done now.
        running: whether it has begun.
        last: its last evaluation, in words.
    """

    def __init__(self, run: Run, before: State) -> None:
        self.run, self.before, self.share = run, before, before.share
        self.running, self.last = False, ""
        self.told = time.monotonic(), ""
        self._log_size = self._log()

    def _log(self) -> int:
        log = self.run.folder / LOG
        return log.stat().st_size if log.exists() else 0

    def look(self) -> bool:
        """Brings this up to date; whether the run has begun since the last look."""
        was_running, self.running = self.running, self.running or self._log() > self._log_size
        version = newest_version(self.run.folder) if self.running else None
        rows = read_rows(version / "metrics.csv")[0] if version else []
        if rows:
            row = rows[-1]
            self.share = max(self.share, self.run.end.share(*evaluated(rows)))
            key = next((key for key in ("val/accuracy", "val/loss") if row.get(key)), None)
            value = f", {key} {float(row[key]):.4f}" if key else ""
            self.last = f"epoch {row.get('epoch', '?')}, step {row.get('step', '?')}{value}"
        return self.running and not was_running


def run_all(runs: Sequence[Run], engine_of: Callable[[Sequence[int]], Threads | RayTasks]) -> int:
    """Runs what is not finished, and tells how it goes.

    Args:
        runs: the suite's, or a shard's.
        engine_of: makes the engine, given the list in which stop signals arrive.

    Returns:
        The exit status.
    """
    outcomes: list[tuple[Run, Outcome]] = []
    waiting: list[Following] = []
    with Screen(len(runs)) as screen, _stop_signals() as stops:
        for run in runs:
            before = state(run)
            if before.word == "finished":
                outcomes.append((run, Outcome("finished before")))
                screen.say(f"{run.title}: finished before", *_differing(run))
            else:
                waiting.append(Following(run, before))
        engine = engine_of(stops) if waiting else None
        left = {engine.submit(each.run): each for each in waiting} if engine else {}
        heard = 0
        while engine and left:
            wait(left, SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
            for each in left.values():
                if each.look():
                    again = f"resumed at {each.share:.0%}" if each.before.share else "started"
                    log = each.run.folder / LOG
                    screen.say(f"{each.run.title}: {again}; log in {log}", *_differing(each.run))
            for future in [future for future in left if future.done()]:
                each = left.pop(future)
                outcomes.append((each.run, _outcome(future, bool(stops))))
                screen.tell(each, outcomes[-1][1])
            if len(stops) > heard:
                names = ", ".join(each.run.title for each in left.values() if each.running)
                screen.say(f"stopping {names or 'the suite'} (again Ctrl-C: at once)")
                heard = len(stops)
                engine.stop(at_once=heard > 1)
            screen.show(waiting, list(left.values()), len(outcomes))
        if stops:
            screen.say(
                "stopped; to go on, give the same command again: finished runs are skipped, "
                "interrupted ones resumed from their last checkpoint"
            )
            return 130
    counts = Counter(outcome.word for _, outcome in outcomes)
    parts = [f"{counts[word]} {word}" for word in WORDS if counts[word]]
    print(f"{len(runs)} runs: {', '.join(parts)}")
    for run, outcome in outcomes:
        if outcome.word == "FAILED":
            print(f"error: {run.name}: {outcome.text}; log: {run.folder / LOG}", file=sys.stderr)
    return 1 if counts["FAILED"] else 0


def _outcome(future: Future[Outcome], stopping: bool) -> Outcome:
    try:
        return future.result()
    except CancelledError:
        return Outcome("stopped")
    except Exception as error:  # the engine's: a lost worker, a full disk
        first = str(error).strip().partition("\n")[0]
        return Outcome("stopped") if stopping else Outcome("FAILED", first or repr(error))


class Screen:
    """An overall bar with the time left and a line for each running run; plain lines without a
    terminal.

    Args:
        total: number of runs.
    """

    def __init__(self, total: int) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.total, self.started = total, time.monotonic()
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}")
        self.bars = Progress(*columns, console=self.console, transient=True)
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.bars.stop()

    def say(self, *lines: str) -> None:
        for line in lines:
            if self.console.is_terminal:
                self.console.print(line, markup=False)
            else:
                print(line, flush=True)

    def tell(self, each: Following, outcome: Outcome) -> None:
        """Says how a run ended."""
        each.look()
        each.share = 1.0 if outcome.word.startswith("finished") else each.share
        if outcome.word != "stopped":
            last = f"; {each.last}" if each.last else ""
            self.say(f"{each.run.title}: {' '.join(filter(None, outcome))}{last}")

    def show(self, waiting: Sequence[Following], left: Sequence[Following], over: int) -> None:
        """Brings the bars up to date.

        Args:
            waiting: all runs that this sitting had to do.
            left: those that are not over.
            over: number of runs that are.
        """
        gained = sum(each.share - each.before.share for each in waiting)
        missing = sum(1.0 - each.share for each in left)
        seconds = (time.monotonic() - self.started) * missing / gained if gained > 0.0 else None
        time_left = f"{timedelta(seconds=round(seconds))} left" if seconds else "time left ?"
        part = 1.0 - missing / max(self.total, 1)
        overall = f"{over} of {self.total} runs, {part:.0%}, {time_left}"
        running = [each for each in left if each.running]
        if not self.console.is_terminal:
            now = time.monotonic()
            for each in running:
                at, told = each.told
                if each.last and each.last != told and now - at >= SECONDS_BETWEEN_LINES:
                    each.told = now, each.last
                    print(f"{each.run.title}: {each.last}; {overall}", flush=True)
            return
        lines = {"all": ("all runs", part, overall)}
        lines |= {e.run.title: (e.run.title, e.share, e.last) for e in running}
        for name in [name for name in self.tasks if name not in lines]:
            self.bars.remove_task(self.tasks.pop(name))
        for name, (title, share, note) in lines.items():
            if name not in self.tasks:
                self.tasks[name] = self.bars.add_task(title, total=1.0, note=note)
            self.bars.update(self.tasks[name], completed=share, note=note)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The numbers of the stop signals that arrive, as they arrive; none of them interrupts."""
    received: list[int] = []
    signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = {
        each: signal.signal(each, lambda number, _: received.append(number)) for each in signals
    }
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def shard(text: str) -> tuple[int, int]:
    """An argparse type: `i/n` with i from 0 to n - 1."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not match or not count:
        raise argparse.ArgumentTypeError(f"must be i/n, as in 0/4, got {text}")
    if index >= count:
        raise argparse.ArgumentTypeError(
            f"{text} is out of range: shards are counted from 0, here 0/{count} to "
            f"{count - 1}/{count}"
        )
    return index, count


def _setting(text: str) -> str:
    if not re.match(r"[\w.+]+=", text):
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, as trainer.max_epochs=10, got {text}")
    return text


def _parse(argv: list[str]) -> argparse.Namespace:
    at = argv.index("--") if "--" in argv else len(argv)
    argv, more = argv[:at], argv[at + 1 :]
    parser = Parser(
        prog="python -m app suite",
        usage="%(prog)s FILE [options] [-- ARGUMENTS OF FIT ...]",
        description="Run a list of configs x seeds. What is finished is skipped, what was "
        "interrupted is resumed, a run that fails does not stop the others (exit status 1 then). "
        "A run lives in RUNS/SUITE/ENTRY-seedN/, its log in fit.log there.",
        epilog="Arguments of `fit` after `--` are given to every run: -- --data.root FOLDER. "
        "In a SLURM array: --array=0-3 and --shard $SLURM_ARRAY_TASK_ID/4.",
        formatter_class=argparse.HelpFormatter,
    )
    add = parser.add_argument
    add("file", type=Path, metavar="FILE", help="YAML: name, entries, and what all entries share")
    add("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of all runs (runs)")
    add("--shard", type=shard, metavar="I/N", help="every N-th run, from run I on, I from 0")
    add("--dry-run", action="store_true", help="check everything, show what would run, run nothing")
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="local: on this machine; ray: on the cluster of $RAY_ADDRESS, a task for each run",
    )
    add("--jobs", type=number(int, 1), default=1, metavar="N", help="local: runs at a time (1)")
    add("--cpus", type=number(float, 0), default=1.0, metavar="N", help="ray: CPUs of a run (1)")
    add("--gpus", type=number(float, 0), default=0.0, metavar="N", help="ray: GPUs of a run (0)")
    add("--retries", type=number(int, 0), default=3, metavar="N",
        help="ray: how often a run goes on elsewhere when its node is lost (3)")  # fmt: skip
    add("--set", action="append", default=[], type=_setting, metavar="KEY=VALUE",
        help="a setting for all runs; may be repeated")  # fmt: skip
    add("--config", action="append", default=[], type=Path, metavar="FILE",
        help="a config for all runs, read behind their own; may be repeated")  # fmt: skip
    add("--name", metavar="NAME", help="of the suite, instead of the file's")
    options = parser.parse_args(argv)
    options.more = more
    for file in options.config:
        if not file.is_file():
            raise ConfigError(f"--config: there is no file {file}")
    return options
