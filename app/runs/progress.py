"""How far a run is, from its folder alone."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .checkpoints import newest_checkpoint, read_checkpoint
from .folder import flat_settings

# What may differ between two sessions of one run: where it runs; and its seed.
PLACE = re.compile(
    r"(name|runs|base|ckpt_path|weights_only|seed_everything|checkpoint|monitor)\b.*"
    r"|data\.(root|device|download|files)"
    r"|trainer\.(accelerator|devices|strategy|num_nodes|enable_\w+|logger|profiler|max_time"
    r"|default_root_dir|log_every_n_steps)"
)


@dataclass(frozen=True)
class End:
    """Where a run ends: after so many epochs or optimizer steps, whichever comes first.

    Attributes:
        epochs: None where only the steps count.
        steps: None where only the epochs count.
    """

    epochs: int | None
    steps: int | None

    @classmethod
    def of(cls, trainer: dict[str, Any]) -> End:
        """The end that the trainer section of a config sets."""
        epochs, steps = trainer.get("max_epochs"), trainer.get("max_steps")
        steps = steps if steps and steps > 0 else None
        if epochs is None and steps is None and not trainer.get("max_time"):
            epochs = 1000  # what Lightning takes
        return cls(epochs if epochs and epochs > 0 else None, steps)

    def reached(self, epochs: int, steps: int) -> bool:
        """Whether a run of so many whole epochs and steps is at its end."""
        return bool((self.epochs and epochs >= self.epochs) or (self.steps and steps >= self.steps))

    def share(self, epochs: float, steps: int) -> float:
        """What part of the whole run so many epochs and steps are, from 0 to 1."""
        by_epochs = epochs / self.epochs if self.epochs else 0.0
        by_steps = steps / self.steps if self.steps else 0.0
        return min(1.0, max(by_epochs, by_steps))

    def __str__(self) -> str:
        parts = (
            (f"{self.epochs} epochs" if self.epochs else ""),
            (f"{self.steps} steps" if self.steps else ""),
        )
        return " or ".join(filter(None, parts)) or "no set end"


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """What makes a run what it is, by path: its config without its seed, its name, and where and
    how it is executed and watched."""
    flat = flat_settings(config, "")
    return {key: value for key, value in flat.items() if not PLACE.fullmatch(key)}


def read_rows(path: Path) -> tuple[list[dict[str, str]], str]:
    """The sound rows of a CSV file, and what is wrong with the others ("" if nothing is).

    A row is sound if it has as many cells as the header. Missing files have no rows.
    """
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return [], "is missing"
    except OSError as error:
        return [], f"cannot be read ({error.strerror})"
    if not text.strip():
        return [], "is empty"
    if "\0" in text or "�" in text:
        return [], "is damaged: it is no text"
    try:
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        return [], f"is damaged: {error}"
    header, cells = lines[0], [line for line in lines[1:] if line]
    rows = [dict(zip(header, line, strict=True)) for line in cells if len(line) == len(header)]
    bad = len(cells) - len(rows)
    return rows, f"is damaged: {bad} of {len(cells)} rows have too few or too many cells" * bool(
        bad
    )


def evaluated(rows: list[dict[str, str]]) -> tuple[int, int]:
    """Whole epochs and optimizer steps that the rows of metrics.csv attest."""
    try:
        epochs = [int(row["epoch"]) for row in rows]
        steps = max((int(row["step"]) for row in rows), default=0)
    except (KeyError, ValueError):
        return 0, 0
    if not epochs:
        return 0, 0
    count = Counter(epochs)  # with several evaluations an epoch, the last epoch may not be whole
    whole = count[epochs[-1]] >= count[epochs[0]]
    return epochs[-1] + whole, steps


def checkpointed(folder: Path) -> tuple[int, int] | None:
    """Whole epochs and optimizer steps of a run's newest complete checkpoint; None without one.

    Args:
        folder: of all versions of the run, RUNS/NAME.
    """
    path = newest_checkpoint(folder)
    if path is None:
        return None
    try:
        content = read_checkpoint(path)
        progress = content["loops"]["fit_loop"]["epoch_progress"]["current"]
        return progress["completed"], content["global_step"]
    except (ConfigError, KeyError):
        return None


def newest_version(folder: Path) -> Path | None:
    """The version of a run that was written to last, None if there is none."""
    versions = [path for path in folder.glob("version_*") if path.is_dir()]
    return max(versions, key=_written, default=None)


def _written(version: Path) -> float:
    files = [version / "metrics.csv", version / "config.yaml", version]
    return max(path.stat().st_mtime for path in files if path.exists())
