"""A run's folder, runs/NAME/version_N, and its checkpoints."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.cli import SaveConfigCallback

from .checkpoints import read_checkpoint
from .errors import ConfigError


class RunConfig(SaveConfigCallback):
    """Writes config.yaml into the run folder and the same text into every checkpoint."""

    def __init__(self, parser: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(parser, config, **kwargs)
        # Now, while the files and the folder that the config came from are surely there.
        self.text = parser.dump(config, skip_none=False)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Evaluation has no run folder: Lightning would write into the working directory.
        if stage == "fit" and trainer.loggers:
            super().setup(trainer, pl_module, stage)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["config"] = self.text


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


def other_model(path: Path, config: str, error: RuntimeError) -> ConfigError:
    """What to say where the weights of a checkpoint do not fit the configured network."""
    theirs = flat_settings(yaml.safe_load(read_checkpoint(path)["config"])["model"], "model")
    ours = flat_settings(yaml.safe_load(config)["model"], "model")
    keys = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
    differing = "; ".join(f"{k} is {ours.get(k)} here, {theirs.get(k)} there" for k in keys[:4])
    return ConfigError(
        f"ckpt_path: {path} is of another model: {differing or str(error).splitlines()[-1].strip()}"
    )


def flat_settings(value: Any, prefix: str) -> dict[str, Any]:
    """A config's values by their paths, as the command line names them."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        hidden = key in ("init_args", "class_path")
        flat |= flat_settings(inner, prefix if hidden else f"{prefix}.{key}".lstrip("."))
    return flat


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
