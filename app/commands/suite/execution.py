"""One run of a suite in a process of its own, on this machine or as a task on a cluster."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple

from ...errors import ConfigError
from ...runs.progress import checkpointed, evaluated, newest_version, read_rows
from .file import Run

SECONDS_TO_STOP = 60.0
SECONDS_FOR_THE_LOCK = 120.0  # on a cluster: until the lock of a lost node is given free
LOG, LOCK = "fit.log", "suite.lock"  # in a run's folder


WORDS = ("finished", "finished before", "ended early", "left alone", "stopped", "FAILED")


class State(NamedTuple):
    """Where a run stands.

    Attributes:
        word: `finished`, `interrupted` or `new`.
        share: the part of it that is done, from 0 to 1.
    """

    word: str
    share: float


class Outcome(NamedTuple):
    """How an attempt at a run ended.

    Attributes:
        word: one of WORDS.
        text: more about it, for a person.
    """

    word: str
    text: str = ""


def state(run: Run) -> State:
    """What a run's folder says about it.

    A run is finished when its newest checkpoint stands at the end that the suite sets. Where the
    checkpoints have been removed, its metrics.csv tells.
    """
    reached = checkpointed(run.folder)
    if reached is not None:
        word = "finished" if run.end.reached(*reached) else "interrupted"
        return State(word, run.end.share(*reached))
    version = newest_version(run.folder)
    if version is not None and run.end.reached(*evaluated(read_rows(version / "metrics.csv")[0])):
        return State("finished", 1.0)
    return State("new", 0.0)


def command(run: Run, now: State) -> list[str]:
    """The command line that starts a run, or goes on with it."""
    quiet = "--trainer.enable_progress_bar=false"
    resume = ["--ckpt_path", "last"] if now.word == "interrupted" else []
    # In front of the run's own arguments, which may say otherwise, but behind its config files.
    at = max(i for i, part in enumerate(run.arguments) if part == "--config") + 2
    parts = run.arguments[:at], (quiet,), run.arguments[at:], resume
    return [sys.executable, "-m", "app", "fit", *(each for part in parts for each in part)]


def run_once(
    run: Run, threads: int | None = None, patience: float = 0.0, stops: Sequence[int] = ()
) -> Outcome:
    """Starts a run, or goes on with it, and waits for its end.

    Args:
        run: of a suite.
        threads: of OpenMP; the user's OMP_NUM_THREADS comes first.
        patience: seconds to wait for a run that another process holds.
        stops: the stop signals that have arrived: one asks the run to save and end, two end it.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / LOCK).open("w") as lock:
        if not _locked(lock, patience):
            return Outcome("left alone", "another suite is running it")
        before = state(run)  # another suite may have finished it since
        if before.word == "finished":
            return Outcome("finished before", "by another suite")
        started, log = time.monotonic(), run.folder / LOG
        with log.open("a") as output:
            arguments = command(run, before)
            output.write(f"$ {shlex.join(arguments)}\n")
            output.flush()
            start = output.tell()
            # A session of its own: Ctrl-C reaches it through us alone. It holds the lock too.
            child = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(threads),
                start_new_session=True,
                pass_fds=(lock.fileno(),),
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        if not _wait(child, stops):
            return Outcome("stopped")
    took = f"after {timedelta(seconds=round(time.monotonic() - started))}"
    if child.returncode != 0:
        return Outcome("FAILED", f"{took}: {error_line(log, start, child.returncode)}")
    if state(run).word == "finished":
        return Outcome("finished", took)
    return Outcome("ended early", f"{took}, before {run.end} (max_time, early stopping?)")


def _locked(lock: IO[str], patience: float) -> bool:
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() >= end:
                return False
        time.sleep(0.5)


def _end_with_parent() -> None:
    """Asks Linux for a SIGKILL when the process that started this one is gone (prctl 1).

    So a task that goes on elsewhere, as its worker was lost, finds the run free.
    """
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _environment(threads: int | None) -> dict[str, str]:
    """This process's, so that the child finds this very app, with a share of the cores."""
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    share = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return share | os.environ | {"PYTHONPATH": path}


def _wait(child: subprocess.Popen, stops: Sequence[int]) -> bool:
    """Waits until a run has ended; False if it was told to."""
    try:
        while not stops:
            _wait_for(child, 0.2)
            if child.returncode is not None:
                return True
    except BaseException:  # how a cluster's engine cancels a task
        _end(child, ())
        raise
    _end(child, stops)
    return False


def _wait_for(child: subprocess.Popen, seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        child.wait(seconds)


def _end(child: subprocess.Popen, stops: Sequence[int]) -> None:
    child.terminate()
    end = time.monotonic() + SECONDS_TO_STOP
    while child.poll() is None:
        if len(stops) > 1 or time.monotonic() > end:
            os.killpg(child.pid, signal.SIGKILL)  # with the processes that it started
        _wait_for(child, 0.2)


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


class Threads:
    """Runs on this machine.

    Args:
        jobs: runs at a time.
        stops: see `run_once`; grows while runs are going on.
    """

    def __init__(self, jobs: int, stops: Sequence[int]) -> None:
        self.pool, self.stops = ThreadPoolExecutor(jobs), stops
        self.threads = max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 else None

    def submit(self, run: Run) -> Future[Outcome]:
        return self.pool.submit(run_once, run, self.threads, 0.0, self.stops)

    def stop(self, at_once: bool) -> None:
        """Takes what hasn't begun off the list; what runs sees the signal itself."""
        self.pool.shutdown(wait=False, cancel_futures=True)


class RayTasks:
    """Runs as tasks of a Ray cluster, as many at a time as its nodes have room for.

    A run whose worker or node is lost goes on elsewhere from its last checkpoint, so the folder
    of the runs must be one that all nodes share. The cluster is that of RAY_ADDRESS, else the one
    that runs on this machine, else a new one of this machine alone.

    Args:
        cpus, gpus: of a run.
        retries: of a run whose worker or node is lost.

    Raises:
        ConfigError: without ray, or where no node has room for a run.
    """

    def __init__(self, cpus: float, gpus: float, retries: int) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError(
                "--engine ray: ray is missing: pip install 'moe-lab[cluster]'"
            ) from None
        try:
            ray.init(log_to_driver=False, logging_level="error", include_dashboard=False)
        except Exception as error:
            first = str(error).strip().splitlines()[:1]
            raise ConfigError(f"--engine ray: no cluster: {' '.join(first)}") from error
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(n.get("CPU", 0) >= cpus and n.get("GPU", 0) >= gpus for n in nodes):
            ray.shutdown()
            have = "; ".join(f"{n.get('CPU', 0):g} and {n.get('GPU', 0):g}" for n in nodes)
            raise ConfigError(
                f"--cpus, --gpus: no node has {cpus:g} CPUs and {gpus:g} GPUs; they have {have}"
            )
        self.ray, self.tasks = ray, []
        self.threads = max(1, int(cpus))
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": retries}
        self.remote: Any = ray.remote(**options)(run_once)

    def submit(self, run: Run) -> Future[Outcome]:
        task = self.remote.remote(run, self.threads, SECONDS_FOR_THE_LOCK)
        self.tasks.append(task)
        return task.future()

    def stop(self, at_once: bool) -> None:
        for task in self.tasks:
            self.ray.cancel(task, force=at_once)
