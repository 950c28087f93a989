"""The folder that `python -m app export` writes, and how to read it: plain PyTorch, no Lightning.

`model.safetensors` holds the weights of the active experts and of everything else; `config.json`:

    format, version   what this is
    network           class and arguments, as in a training config
    experts           experts of each MoE layer
    images            class_names, image_size, channels, mean, std of an image classifier, or null
    text              tokenizer and block_size of a language model, or null
    trained           epoch and step of the checkpoint, and its name
    weights           SHA-256 of model.safetensors
    checksum          SHA-256 of all of the above

Nothing in the folder is executed or unpickled, and it names only classes of `app.models`, `app.moe`
and those that the caller allows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from .. import models, moe
from ..errors import ConfigError
from .decoder import swiglu_moe

FORMAT, VERSION = "python -m app export", 1
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def _known() -> dict[str, Any]:
    known: dict[str, Any] = {"app.models.decoder.swiglu_moe": swiglu_moe}
    for package in (models, moe):
        for name, value in vars(package).items():
            if isinstance(value, type) and issubclass(value, nn.Module):
                known[f"{package.__name__}.{name}"] = value
                known[f"{value.__module__}.{name}"] = value
    return known


KNOWN = _known()
"""What a `class_path` may name. Nothing is imported by a name that a file gives."""


def allow_classes(*classes: type[nn.Module]) -> None:
    """Lets exports name classes of one's own, as a router, by their module and name."""
    for each in classes:
        KNOWN[f"{each.__module__}.{each.__qualname__}"] = each


def load_model(
    folder: str | Path,
    device: str | torch.device = "cpu",
    classes: Sequence[type[nn.Module]] = (),
) -> nn.Module:
    """The network of an exported folder, in evaluation mode.

    An image classifier maps images (B, C, H, W), normalised with `exported["images"]`, to logits
    (B, classes); a language model token ids (B, S) to logits (B, S, V).

    Args:
        folder: what `python -m app export --out FOLDER` wrote.
        device: where to put it.
        classes: of one's own that the export may name.

    Returns:
        The network, with its config.json as the attribute `exported`.

    Raises:
        ConfigError: a folder that is missing, damaged, or no such export.
    """
    allow_classes(*classes)
    folder = Path(folder)
    config = read_config(folder)
    weights = _read_weights(folder, config)
    with torch.random.fork_rng(devices=[]):  # weights are drawn here and then overwritten
        try:
            network = build_network(config["network"])
            for name, block in moe.moe_blocks(network).items():
                block.keep_slots(range(config["experts"][name]))
            load_weights(network, weights)
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[-1].strip()
            raise ConfigError(
                f"{folder / CONFIG}: its network and the weights do not fit together: {reason}"
            ) from error
    network.exported = config
    return network.eval().to(device)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of an exported folder, checked.

    Raises:
        ConfigError: if it is missing, damaged, or of another program or version.
    """
    path = folder / CONFIG
    for file in (path, folder / WEIGHTS):
        if not file.is_file():
            raise ConfigError(
                f"{folder}: no model exported here ({file.name} is missing); write one with "
                "python -m app export --ckpt_path CHECKPOINT --out FOLDER"
            )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error}); export again") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ConfigError(f"{path}: not written by {FORMAT}; give the folder of an export")
    if config.get("version") != VERSION:
        raise ConfigError(
            f"{path}: format version {config.get('version')}, this program reads {VERSION}; "
            "export the checkpoint again"
        )
    if config.get("checksum") != checksum(config):
        raise ConfigError(f"{path}: damaged or edited, its checksum is wrong; export again")
    return config


def checksum(config: dict[str, Any]) -> str:
    """SHA-256 of a config.json without its checksum, whatever its spacing."""
    rest = {key: value for key, value in config.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_weights(folder: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS
    try:
        if file_sha256(path) != config.get("weights"):
            raise ConfigError(f"{path}: damaged, its checksum is wrong; export again")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not readable ({error}); export again") from error


def build_network(spec: Any) -> nn.Module:
    """A network from its class and arguments, freshly initialised.

    Raises:
        ConfigError: for a class that is not one of `app.models` and `app.moe`.
    """
    network = _build(spec)
    if not isinstance(network, partial):
        raise ConfigError(f"network: expected a class_path and its init_args, got {spec!r}")
    network.keywords.pop("pretrained", None)  # weights come from nowhere else
    return network()


def _build(spec: Any) -> Any:
    """A class with its arguments bound, for every class_path; anything else as it is."""
    if isinstance(spec, dict) and "class_path" in spec:
        bound = {key: _build(value) for key, value in (spec.get("init_args") or {}).items()}
        return partial(_class(spec["class_path"]), **bound)
    return (
        _class(spec)
        if isinstance(spec, str) and (spec in KNOWN or spec.startswith("app."))
        else spec
    )


def _class(path: Any) -> Any:
    if not isinstance(path, str) or path not in KNOWN:
        raise ConfigError(
            f"network: {path} is no class of app.models or app.moe; only those are exported and "
            "loaded, and of your own what export --classes MODULE and load_model(classes=...) name"
        )
    return KNOWN[path]


def load_weights(network: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copies weights into a network, which takes their dtypes.

    Raises:
        ValueError: if a name or a shape differs. One name is enough for tied weights.
    """
    own = network.state_dict(keep_vars=True)
    seen = {id(own[name]) for name in weights if name in own}
    missing = [name for name, value in own.items() if id(value) not in seen]
    foreign = [name for name in weights if name not in own]
    fits = {name: value.shape == own[name].shape for name, value in weights.items() if name in own}
    wrong = [name for name, fit in fits.items() if not fit]
    for what, names in (("lack", missing), ("hold unknown", foreign), ("misshape", wrong)):
        if names:
            raise ValueError(f"the weights {what} {', '.join(names[:3])}")
    for name, value in weights.items():
        own[name].data = value.clone()
