"""A run's folder, runs/NAME/version_N, and its checkpoints."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.cli import SaveConfigCallback

from .errors import ConfigError


class RunConfig(SaveConfigCallback):
    """Writes config.yaml into the run folder and the same text into every checkpoint."""

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["config"] = self.parser.dump(self.config, skip_none=False)


def newest_checkpoint(folder: Path) -> Path:
    """The newest complete checkpoint of all versions of a run; damaged ones are passed over.

    Raises:
        ConfigError: if the run has none.
    """
    found = sorted(
        folder.glob("version_*/checkpoints/*.ckpt"), key=lambda path: path.stat().st_mtime_ns
    )
    for path in reversed(found):
        if is_complete(path):
            return path
        print(f"passing over {path}: it is not complete")
    raise ConfigError(f"ckpt_path: last: there is no complete checkpoint below {folder}")


def is_complete(path: Path) -> bool:
    """Whether a checkpoint file was written to its end (a zip archive with a sound directory)."""
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.namelist())
    except (zipfile.BadZipFile, OSError):
        return False


def find_run_version(folder: Path, ckpt_path: str) -> int | None:
    """The version number whose folder holds a checkpoint, None if it is not of this run."""
    parent = Path(ckpt_path).resolve().parent.parent
    match = re.fullmatch(r"version_(\d+)", parent.name)
    return int(match[1]) if match and parent.parent == folder.resolve() else None
