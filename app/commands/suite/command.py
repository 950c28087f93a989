"""`python -m app suite FILE`: many runs, one command that can be repeated until all are done."""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from ...errors import ConfigError
from ...runs.progress import checkpointed, evaluated, newest_version, read_rows
from ..arguments import Parser, number
from .file import Run, read_suite

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_LINES = 60.0  # of a running run, where the output is no terminal
SECONDS_TO_STOP = 60.0
LOG, LOCK = "fit.log", "suite.lock"  # in a run's folder


def main(argv: Sequence[str]) -> int:
    """Runs what is not finished of a suite.

    Returns:
        0; 1 if a run failed; 130 when stopped by Ctrl-C or SIGTERM.

    Raises:
        ConfigError: for a mistake in the file or the arguments, before anything runs.
    """
    options = _parse(list(argv))
    overrides = [f"--{setting}" for setting in options.set] + options.more
    runs = read_suite(
        options.file,
        options.runs,
        name=options.name,
        configs=options.config,
        overrides=overrides,
    )
    if options.shard:
        index, count = options.shard
        runs = runs[index::count]
    if options.dry_run:
        _show_plan(runs)
        return 0
    return Session(runs, options.jobs).run()


def state(run: Run) -> tuple[str, float]:
    """What a run's folder says: `finished`, `interrupted` or `new`, and how much of it is done.

    A run is finished when its newest checkpoint stands at the end that the suite sets. Where the
    checkpoints have been removed, its metrics.csv tells.
    """
    reached = checkpointed(run.folder)
    if reached is not None:
        word = "finished" if run.end.reached(*reached) else "interrupted"
        return word, run.end.share(*reached)
    version = newest_version(run.folder)
    if version is not None and run.end.reached(*evaluated(read_rows(version / "metrics.csv")[0])):
        return "finished", 1.0
    return "new", 0.0


def command(run: Run) -> list[str]:
    """The command line that runs or resumes a run."""
    quiet = "--trainer.enable_progress_bar=false"
    resume = [] if checkpointed(run.folder) is None else ["--ckpt_path", "last"]
    # In front of the run's own arguments, which may say otherwise, but behind its config files.
    at = max(i for i, part in enumerate(run.arguments) if part == "--config") + 2
    parts = run.arguments[:at], (quiet,), run.arguments[at:], resume
    return [sys.executable, "-m", "app", "fit", *(each for part in parts for each in part)]


def _show_plan(runs: Sequence[Run]) -> None:
    for run in runs:
        word, share = state(run)
        share_text = f" at {share:.0%}" if word == "interrupted" else ""
        print(f"{run.name}: {word}{share_text}; {run.end}")
        for line in _differing(run):
            print(f"  {line}")
        if word != "finished":
            print(f"  {shlex.join(['python', *command(run)[1:]])}")


def _differing(run: Run) -> list[str]:
    version = newest_version(run.folder)
    other = run.other_settings(version) if version else []
    return [f"note: {version} has other settings: {'; '.join(other[:4])}"] if other else []


class Watch:
    """How far a running run is, read from the files that it writes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows: list[dict[str, str]] = []
        self._file: Path | None = None
        self._events: EventFileLoader | None = None
        self._step = 0

    def share(self) -> float:
        """The part of the run that is done, from 0 to 1."""
        version = newest_version(self.run.folder)
        if version is None:
            return 0.0
        self.rows, _ = read_rows(version / "metrics.csv")
        epochs, steps = evaluated(self.rows)
        step = max(steps, self._logged_step(version))
        if epochs:
            return self.run.end.share(epochs + (step - steps) * epochs / max(steps, 1), step)
        return self.run.end.share(0, step)

    def _logged_step(self, version: Path) -> int:
        """The last step in the newest event file; reads what was added since the last call."""
        found = sorted(version.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
        if not found:
            return 0
        if found[-1] != self._file:
            self._file, self._events = found[-1], EventFileLoader(str(found[-1]))
        try:
            for event in self._events.Load():
                self._step = max(self._step, event.step)
        except Exception:  # a file that is just being written: the next look reads on
            pass
        return self._step

    def last(self) -> str:
        """The last evaluation, in words."""
        if not self.rows:
            return ""
        row = self.rows[-1]
        key = next((key for key in ("val/accuracy", "val/loss") if row.get(key)), None)
        value = f", {key} {float(row[key]):.4f}" if key else ""
        return f"epoch {row.get('epoch', '?')}, step {row.get('step', '?')}{value}"


@dataclass
class Active:
    """A run that is running.

    Attributes:
        begun: the part of it that was done before.
        share: the part that is done now.
    """

    run: Run
    process: subprocess.Popen
    lock: IO[str]
    log_start: int
    begun: float
    watch: Watch
    started: float = field(default_factory=time.monotonic)
    share: float = 0.0
    told: tuple[float, str] = field(default_factory=lambda: (time.monotonic(), ""))


class Session:
    """Runs what is not finished, one after the other or several at a time.

    Args:
        runs: the suite's, or a shard's.
        jobs: runs at a time.
    """

    def __init__(self, runs: Sequence[Run], jobs: int = 1) -> None:
        self.runs, self.jobs = runs, jobs
        self.queue: deque[Run] = deque()
        self.active: list[Active] = []
        self.failed: list[tuple[Run, str]] = []
        self.counts = {"finished": 0, "finished before": 0, "ended early": 0, "taken": 0}
        self.gained, self.started = 0.0, time.monotonic()  # runs done in this session, in parts
        self.screen = Screen(len(runs))

    def run(self) -> int:
        """Runs all; returns the exit status."""
        waiting = []
        for run in self.runs:
            if state(run)[0] == "finished":
                self.counts["finished before"] += 1
                notes = _differing(run)
                self.screen.say(f"{run.title}: finished before", *notes)
            else:
                waiting.append(run)
        self.queue = deque(waiting)
        self.shares = {run.name: state(run)[1] for run in waiting}
        with self.screen, _stop_signals() as received:
            while self.queue or self.active:
                while self.queue and len(self.active) < self.jobs and not received:
                    self._start(self.queue.popleft())
                if received:
                    self._stop(received)
                    return 130
                time.sleep(SECONDS_BETWEEN_LOOKS if self.active else 0.0)
                for each in list(self.active):
                    self._look(each)
                self._show()
        return self._conclude()

    def _start(self, run: Run) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        lock = (run.folder / LOCK).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            self.counts["taken"] += 1
            self.screen.say(f"{run.title}: left alone, another suite is running it")
            return
        word, share = state(run)  # another suite may have finished it since
        if word == "finished":
            lock.close()
            self.counts["finished before"] += 1
            self.screen.say(f"{run.title}: finished by another suite")
            return
        arguments = command(run)
        with (run.folder / LOG).open("a") as log:
            log.write(f"$ {shlex.join(arguments)}\n")
            log.flush()
            start = log.tell()
            # The child holds the lock too: a suite that is killed leaves its run locked as long
            # as that goes on. A session of its own: Ctrl-C reaches it through us alone.
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
                pass_fds=(lock.fileno(),),
            )
        self.active.append(Active(run, process, lock, start, share, Watch(run), share=share))
        again = f"resumed at {share:.0%}" if word == "interrupted" else "started"
        self.screen.say(f"{run.title}: {again}; log in {run.folder / LOG}", *_differing(run))

    def _environment(self) -> dict[str, str]:
        """This process's, so that the child finds this very app, and shares the cores."""
        root = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self.jobs))}
        return (threads if self.jobs > 1 else {}) | os.environ | {"PYTHONPATH": path}

    def _look(self, each: Active) -> None:
        status = each.process.poll()
        each.share = max(each.share, each.watch.share())
        if status is None:
            return
        self.active.remove(each)
        each.lock.close()
        took = timedelta(seconds=round(time.monotonic() - each.started))
        title, last = each.run.title, each.watch.last()
        if status != 0:
            error = error_line(each.run.folder / LOG, each.log_start, status)
            self.failed.append((each.run, error))
            self.screen.say(f"{title}: FAILED after {took}: {error}")
        elif state(each.run)[0] == "finished":
            self.gained += 1.0 - each.begun
            self.counts["finished"] += 1
            self.screen.say(f"{title}: finished in {took}; {last}")
        else:
            self.gained += each.share - each.begun
            self.counts["ended early"] += 1
            self.screen.say(
                f"{title}: ended before {each.run.end} (max_time, early stopping?) after {took}; "
                f"{last}"
            )

    def _show(self) -> None:
        done = len(self.runs) - len(self.queue) - len(self.active)
        gained = self.gained + sum(each.share - each.begun for each in self.active)
        left = sum(1.0 - each.share for each in self.active)
        left += sum(1.0 - self.shares[run.name] for run in self.queue)
        seconds = (time.monotonic() - self.started) * left / gained if gained > 0.0 else None
        part = done + sum(each.share for each in self.active)
        part += sum(self.shares[run.name] for run in self.queue)
        self.screen.show(self.active, done, part, seconds)

    def _stop(self, received: list[int]) -> None:
        """Stops the running runs; what they have saved stays."""
        names = ", ".join(each.run.title for each in self.active)
        self.screen.say(f"stopping {names or 'the suite'} (again Ctrl-C: at once)")
        for each in self.active:
            each.process.terminate()
        first, end = len(received), time.monotonic() + SECONDS_TO_STOP
        while any(each.process.poll() is None for each in self.active):
            if len(received) > first or time.monotonic() > end:
                for each in self.active:
                    os.killpg(each.process.pid, signal.SIGKILL)  # with the processes it started
                    each.process.wait()
            time.sleep(0.1)
        for each in self.active:
            each.lock.close()
        self.screen.say(
            "stopped; to go on, give the same command again: finished runs are skipped, "
            "interrupted ones resumed from their last checkpoint"
        )

    def _conclude(self) -> int:
        parts = [f"{count} {word}" for word, count in self.counts.items() if count]
        if self.failed:
            parts.append(f"{len(self.failed)} FAILED")
        print(f"{len(self.runs)} runs: {', '.join(parts)}")
        for run, error in self.failed:
            print(f"error: {run.name}: {error}; log: {run.folder / LOG}", file=sys.stderr)
        return 1 if self.failed else 0


class Screen:
    """An overall bar with the time left, and a line a running run; plain lines without a terminal.

    Args:
        total: number of runs.
    """

    def __init__(self, total: int) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.total = total
        self.bars: Progress | None = None
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self.bars = Progress(*columns, console=self.console, transient=True)
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bars:
            self.bars.stop()
            self.bars = None

    def say(self, *lines: str) -> None:
        for line in lines:
            if self.console.is_terminal:
                self.console.print(line, markup=False)
            else:
                print(line, flush=True)

    def show(self, active: Sequence[Active], done: int, part: float, seconds: float | None) -> None:
        """Brings the bars up to date.

        Args:
            active: the running runs.
            done: runs that are over.
            part: runs that are over or in part so, as a sum.
            seconds: estimate of the time left, if there is one.
        """
        left = f"{timedelta(seconds=round(seconds))} left" if seconds is not None else "time left ?"
        overall = f"{done} of {self.total} runs, {part / max(self.total, 1):.0%}, {left}"
        if not self.bars:
            now = time.monotonic()
            for each in active:
                words = each.watch.last()
                at, told = each.told
                if words and words != told and now - at >= SECONDS_BETWEEN_LINES:
                    each.told = now, words
                    print(f"{each.run.title}: {words}; {overall}", flush=True)
            return
        lines = {"all": ("all runs", part / max(self.total, 1), overall)}
        lines |= {e.run.title: (e.run.title, e.share, e.watch.last()) for e in active}
        for name in [name for name in self.tasks if name not in lines]:
            self.bars.remove_task(self.tasks.pop(name))
        for name, (title, share, note) in lines.items():
            if name not in self.tasks:
                self.tasks[name] = self.bars.add_task(title, total=1.0, note=note)
            self.bars.update(self.tasks[name], completed=share, note=note)


def error_line(log: Path, start: int, status: int) -> str:
    """The line of a log that says why a run failed.

    Args:
        log: of the run.
        start: position in it from which this attempt wrote.
        status: exit status; negative for a signal.
    """
    if status < 0:
        name = signal.Signals(-status).name
        return f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - 100_000))
        lines = file.read().decode("utf-8", errors="replace").splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    for pattern in (r"error: .*", r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b.*"):
        found = [line for line in lines if re.fullmatch(pattern, line)]
        if found:
            return found[-1].removeprefix("error: ")
    return f"exit status {status}" + (f": {lines[-1]}" if lines else "")


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
    add("--jobs", type=number(int, 1), default=1, metavar="N", help="runs at a time (1)")
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
