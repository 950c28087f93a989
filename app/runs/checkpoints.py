"""Reading checkpoints back, without executing anything in them."""

from __future__ import annotations

import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..errors import ConfigError


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint of `python -m app fit`, mapped from the file where possible.

    Raises:
        ConfigError: for a file that is missing, damaged, or no checkpoint of a training run.
    """
    if not path.is_file():
        raise ConfigError(f"ckpt_path: there is no checkpoint {path}")
    if not is_complete(path):
        raise ConfigError(f"ckpt_path: {path} is damaged or is no checkpoint")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # bytes that are no checkpoint make torch.load raise anything
        raise ConfigError(f"ckpt_path: {path} is damaged or is no checkpoint") from error
    held = content if isinstance(content, dict) else {}
    for key, what in (("state_dict", "weights"), ("config", "config")):
        if held.get(key) is None:
            raise ConfigError(
                f"ckpt_path: {path} is no checkpoint that `python -m app fit` wrote: it holds no "
                f"{what}"
            )
    return content


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of all versions of a run; damaged ones are passed over.

    Args:
        folder: of all versions, RUNS/NAME.
    """
    found = folder.glob("version_*/checkpoints/*.ckpt")
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        if is_complete(path):
            return path
        print(f"passing over {path}: it is not complete")
    return None


def is_complete(path: Path) -> bool:
    """Whether a checkpoint file is what was once written: a zip archive whose checksums hold.

    torch.load does not look at the checksums. A file is read through once: what was found is
    remembered until the file changes.
    """
    try:
        status = path.stat()
    except OSError:
        return False
    return _checksums_hold(path.resolve(), status.st_mtime_ns, status.st_size, status.st_ino)


@cache
def _checksums_hold(path: Path, written_ns: int, size: int, inode: int) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.namelist()) and archive.testzip() is None
    except Exception:  # damage in the directory of an archive makes zipfile raise anything
        return False


def rebuild(path: Path, checkpoint: dict[str, Any], **parts: type) -> dict[str, Any]:
    """Builds parts of a run as its config says, the model with its trained weights, on the CPU.

    Args:
        path: where the checkpoint came from, for messages.
        checkpoint: what `read_checkpoint` gave.
        **parts: keys of the config (`model`, `data`), and the base class that each must have.

    Returns:
        The instances, by key.

    Raises:
        ConfigError: if a part is of another class or can't be built, or the weights do not fit.
    """
    parser = ArgumentParser(exit_on_error=False)
    for key, base in parts.items():
        parser.add_subclass_arguments(base, key)
    try:
        config = OmegaConf.to_container(OmegaConf.create(checkpoint["config"]), resolve=True)
        built = parser.instantiate(parser.parse_object({key: config[key] for key in parts}))
    except (
        ArgumentError, OmegaConfBaseException, yaml.YAMLError, KeyError, TypeError, ValueError,
    ) as error:  # fmt: skip
        reason = str(error).strip().splitlines()[-1].strip()
        names = " or ".join(base.__name__ for base in parts.values())
        raise ConfigError(
            f"ckpt_path: {path} holds no {names} that can be built: {reason}"
        ) from error
    try:
        built.model.load_state_dict(checkpoint["state_dict"])
    except (RuntimeError, KeyError) as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(
            f"ckpt_path: the weights in {path} do not fit its model: {reason}"
        ) from error
    return {key: built[key] for key in parts}
