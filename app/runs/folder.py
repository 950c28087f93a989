"""A run's folder, runs/NAME/version_N, and its checkpoints."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.cli import SaveConfigCallback
from torch import nn

from ..errors import ConfigError
from ..files import write_text


class RunConfig(SaveConfigCallback):
    """Writes config.yaml into the run folder and the same text into every checkpoint."""

    def __init__(self, parser: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(parser, config, **kwargs)
        # Now, while the files and the folder that the config came from are surely there.
        self.text = parser.dump(of_the_run(config), skip_none=False)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Evaluation has no run folder: Lightning would write into the working directory.
        if stage == "fit" and trainer.loggers:
            folder = trainer.log_dir  # a broadcast: all processes have to ask
            if trainer.is_global_zero:
                write_text(Path(folder) / "config.yaml", self.text)

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["config"] = self.text


def of_the_run(config: Any) -> Any:
    """A config without the checkpoint that this sitting goes on from."""
    config = config.clone()
    config.ckpt_path = None
    return config


@contextmanager
def discarding_unstarted(trainer: L.Trainer) -> Iterator[None]:
    """Removes the new folder of a run that fails before its first step: it holds nothing of worth.

    Only what this process wrote is removed, and nothing if there is more in the folder than that.
    """
    try:
        yield
    except Exception:
        if trainer.logger and trainer.is_global_zero and trainer.global_step == 0:
            _discard(Path(trainer.logger.log_dir))
        raise


def _discard(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    own = {"config.yaml", "hparams.yaml"}
    if all(path.name in own or f".{os.getpid()}." in path.name for path in files):
        shutil.rmtree(folder, ignore_errors=True)
    for parent in folder.parents[:2]:  # RUNS/NAME and RUNS, where they hold nothing else
        with suppress(OSError):
            parent.rmdir()


def differing_settings(path: Path, checkpoint: dict[str, Any], config: str) -> dict[str, str]:
    """What a config and that of a checkpoint have both and set to different values.

    Args:
        path: where the checkpoint came from, for messages.
        checkpoint: what `read_checkpoint` gave.
        config: the config now, as YAML.

    Returns:
        Sentences such as "model.network.dim is 32 here, 64 there", by key.

    Raises:
        ConfigError: if the checkpoint's config can't be read.
    """
    try:
        theirs = flat_settings(yaml.safe_load(checkpoint["config"]), "")
    except (yaml.YAMLError, AttributeError) as error:
        raise ConfigError(f"ckpt_path: the config in {path} cannot be read") from error
    ours = flat_settings(yaml.safe_load(config), "")
    return {
        key: f"{key} is {_short(ours[key])} here, {_short(theirs[key])} there"
        for key in ours
        if key in theirs and ours[key] != theirs[key]
    }


def _short(value: Any) -> str:
    return textwrap.shorten(str(value), 60, placeholder=" ...")


def check_same_model(
    path: Path, checkpoint: dict[str, Any], model: nn.Module, differing: dict[str, str], fit: bool
) -> None:
    """Checks that a checkpoint is of the configured model, before a run folder is touched.

    Weights that fit are not enough for training to go on: another number of heads, say, has the
    same shapes. So the settings of the network must be equal, but for those of training alone.

    Raises:
        ConfigError: if it is of another model; names the settings that differ, or the first weight.
    """
    theirs = {name: getattr(each, "shape", None) for name, each in checkpoint["state_dict"].items()}
    ours = {name: each.shape for name, each in model.state_dict().items()}
    changed = [
        said
        for key, said in differing.items()
        if key in ("model", "model.optimizer")
        or (key.startswith("model.network") and key.rpartition(".")[2] not in OF_TRAINING)
    ]
    if theirs == ours and not (fit and changed):
        return
    names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
    reason = "; ".join(changed[:4]) or (
        f"{names[0]} has shape {_shape(ours, names[0])} here, {_shape(theirs, names[0])} there"
    )
    raise ConfigError(f"ckpt_path: {path} is of another model: {reason}")


OF_TRAINING = ("pretrained", "drop_rate", "drop_path", "dropout", "jitter", "noise")
"""Settings of a network that may change on the way: its function in evaluation is the same."""


def _shape(shapes: dict[str, Any], name: str) -> str:
    shape = shapes.get(name)
    return "none" if shape is None else str(tuple(shape))


SETTINGS = {
    "name": "name",
    "seed": "seed_everything",
    "epochs": "trainer.max_epochs",
    "steps": "trainer.max_steps",
    "precision": "trainer.precision",
    "lr": "model.optimizer.lr",
    "weight_decay": "model.optimizer.weight_decay",
    "batch_size": "data.batch_size",
}
"""Settings that tell runs apart in TensorBoard's HPARAMS tab: short name -> key in the config."""


def run_settings(config: str) -> dict[str, bool | int | float | str]:
    """The settings of a resolved config (YAML) that are of interest when runs are compared."""
    tree = yaml.safe_load(config)
    flat = flat_settings(tree, "")
    chosen = {short: flat.get(key) for short, key in SETTINGS.items()}
    for key, value in flat.items():
        if key.startswith("model.losses."):
            chosen[f"loss_{key.removeprefix('model.losses.')}"] = value
    chosen["data"] = (tree.get("data") or {}).get("class_path", "").rpartition(".")[2]
    for callback in tree["trainer"].get("callbacks") or []:
        if callback["class_path"].endswith("AdaptiveExperts"):
            chosen["new_experts"] = callback.get("init_args", {}).get("initialization")
    return {key: value for key, value in chosen.items() if value not in (None, "", -1)}


def flat_settings(value: Any, prefix: str) -> dict[str, Any]:
    """Values by path; a class stands at the path of its object."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        hidden = key in ("init_args", "class_path")
        flat |= flat_settings(inner, prefix if hidden else f"{prefix}.{key}".lstrip("."))
    return flat


def find_run_version(folder: Path, ckpt_path: str) -> int | None:
    """The version number whose folder holds a checkpoint, None if it is not of this run."""
    parent = Path(ckpt_path).resolve().parent.parent
    match = re.fullmatch(r"version_(\d+)", parent.name)
    return int(match[1]) if match and parent.parent == folder.resolve() else None
