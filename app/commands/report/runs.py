"""Reads runs from their folders, and says in one line each what of them could not be read."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...runs.progress import End, checkpointed, evaluated, newest_version, read_rows, settings_of
from .methods import Method, data_of, method_of, network_of

FILES = ("config.yaml", "metrics.csv")


@dataclass
class Row:
    """One evaluation.

    Attributes:
        epoch: whole epochs behind it (metrics.csv counts from 0), or None.
        step: optimizer steps behind it.
        values: everything else, by column.
    """

    epoch: int | None
    step: int
    values: dict[str, float]


@dataclass
class Run:
    """What a run's folder tells.

    Attributes:
        name: the folder's, as `digits/topk2-seed0`.
        folder: of the version that was read.
        config: resolved, {} if there is none.
        rows: evaluations, in order.
        events: rows of expert_events.csv.
        finished: whether it is at its end; None where no config says what that is.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    rows: list[Row]
    events: list[dict[str, str]]
    finished: bool | None
    end: End
    settings: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def seed(self) -> int | None:
        seed = self.config.get("seed_everything")
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else None

    @property
    def title(self) -> str:
        """The last part of its name, without the seed."""
        return re.sub(r"-seed\d+$", "", self.name.rpartition("/")[2])

    @property
    def method(self) -> Method:
        return method_of(self.config)

    @property
    def network(self) -> dict[str, Any]:
        return network_of(self.config)

    @property
    def data(self) -> str:
        return data_of(self.config)

    @property
    def metric(self) -> str:
        """`val/accuracy` where it is there, else `val/loss`."""
        keys = {key for row in self.rows for key in row.values}
        return "val/accuracy" if "val/accuracy" in keys else "val/loss"

    def layers(self, statistic: str) -> list[str]:
        """Names of the MoE layers that have this column."""
        pattern = re.compile(rf"val_routing/(.+)/{statistic}")
        keys = {key: None for row in self.rows for key in row.values}
        return [match[1] for key in keys if (match := pattern.fullmatch(key))]

    def progress(self) -> str:
        """How far it is, in words."""
        if not self.rows:
            return "no evaluation yet"
        last = self.rows[-1]
        at = f"epoch {last.epoch}" if last.epoch is not None else f"step {last.step}"
        if self.end.epochs and last.epoch is not None:
            return f"{at} of {self.end.epochs}"
        return f"step {last.step} of {self.end.steps}" if self.end.steps else at


def find_runs(arguments: Iterable[str], runs: Path) -> tuple[list[Run], list[str]]:
    """Reads what the arguments name.

    Args:
        arguments: run folders, folders of runs, or names of runs below `runs`.
        runs: the folder of all runs.

    Returns:
        The runs that could be read, in the order of their names, and a line for each that could
        not, or only in part.
    """
    found: dict[Path, None] = {}
    problems: list[str] = []
    for argument in arguments:
        path = Path(argument)
        path = path if path.exists() else runs / argument
        if not path.exists():
            problems.append(f"{argument}: there is no such folder, nor {path}")
            continue
        folders = _run_folders(path) if path.is_dir() else []
        if not folders:
            problems.append(f"{argument}: is no run and holds none (no {' or '.join(FILES)})")
        found |= dict.fromkeys(folder.resolve() for folder in folders)
    read = []
    for folder in found:
        run, said = read_run(folder)
        problems += [f"{run.name}: {line}" for line in said]
        if run.rows:
            read.append(run)
    return read, problems


def _run_folders(path: Path, depth: int = 5) -> list[Path]:
    """Folders of runs at or below a path; of several versions of one run, the newest."""
    if any((path / name).is_file() for name in FILES):
        return [path]
    version = newest_version(path)
    if version is not None:
        tables = sorted(path.glob("version_*/metrics.csv"), key=lambda each: each.stat().st_mtime)
        return [tables[-1].parent if tables else version]
    if (path / "fit.log").is_file():
        return [path]  # never got as far as a version
    inner = sorted(each for each in path.iterdir() if each.is_dir() and each.name[0] != ".")
    return [run for each in inner for run in _run_folders(each, depth - 1)] if depth else []


def read_run(folder: Path) -> tuple[Run, list[str]]:
    """Reads one version's folder, or a copy of its small files.

    Returns:
        The run (without rows if nothing could be read), and what is wrong with it.
    """
    whole = folder.parent if folder.name.startswith("version_") else folder
    name = f"{whole.parent.name}/{whole.name}"
    problems: list[str] = []
    if not any((folder / file).is_file() for file in FILES) and folder == whole:
        problems.append(f"has not begun; see {folder / 'fit.log'}")
        return Run(name, folder, {}, [], [], None, End(None, None)), problems
    config = _read_config(folder, problems)
    name = config.get("name") or name
    evaluations = _read_metrics(folder, problems)
    events, wrong = read_rows(folder / "expert_events.csv")
    if wrong and "missing" not in wrong:
        problems.append(f"expert_events.csv {wrong}; the other rows are used")
    trainer = config.get("trainer") if isinstance(config.get("trainer"), dict) else {}
    end = End.of(trainer) if config else End(None, None)
    finished = None
    if config:
        last = evaluations[-1] if evaluations else Row(0, 0, {})
        attested = last.epoch or 0, last.step
        saved = checkpointed(whole) if folder != whole else None
        finished = end.reached(*attested) or bool(saved and end.reached(*saved))
    run = Run(name, folder, config, evaluations, events, finished, end, settings_of(config))
    run.rows = [row for row in evaluations if run.metric in row.values]
    if len(run.rows) < len(evaluations):
        without = len(evaluations) - len(run.rows)
        problems.append(
            f"{without} of {len(evaluations)} evaluations have no finite {run.metric}; left out"
        )
    return run, problems


def _read_config(folder: Path, problems: list[str]) -> dict[str, Any]:
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append("config.yaml is missing; its method and seed are not known")
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        problems.append("config.yaml is damaged; its method and seed are not known")
        return {}
    if not isinstance(config, dict):
        problems.append("config.yaml is damaged: it is no mapping")
        return {}
    return config


def _read_metrics(folder: Path, problems: list[str]) -> list[Row]:
    raw, wrong = read_rows(folder / "metrics.csv")
    whole_epochs = evaluated(raw)[0]
    rows = [row for each in raw if (row := _as_row(each, whole_epochs)) is not None]
    if len(rows) < len(raw):
        wrong = wrong or f"is damaged: {len(raw) - len(rows)} of {len(raw)} rows have no numbers"
    if wrong == "is missing":
        problems.append("has no evaluation yet")
    elif wrong:
        problems.append(f"metrics.csv {wrong}" + "; the other rows are used" * bool(rows))
    return sorted(rows, key=lambda row: row.step)


def _as_row(raw: dict[str, str], whole_epochs: int) -> Row | None:
    values = {}
    for key, text in raw.items():
        if text:
            try:
                value = float(text)
            except ValueError:
                return None
            if math.isfinite(value):
                values[key] = value
            elif key in ("step", "epoch"):
                return None
    if "step" not in values:
        return None
    epoch = values.pop("epoch", None)
    behind = None if epoch is None else int(epoch) + 1
    if behind is not None and behind > whole_epochs:
        behind = None  # an evaluation within an epoch that is not over
    return Row(behind, int(values.pop("step")), values)
