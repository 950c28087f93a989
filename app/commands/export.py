"""`python -m app export`: a trained network as a folder that needs neither Lightning nor us to
unpickle anything. `app.load_model(FOLDER)` reads it; app/models/exported.py says what is in it.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors.torch import save_model
from torch import Tensor, nn

from ..errors import ConfigError
from ..models import Decoder
from ..models.exported import (
    CONFIG,
    FORMAT,
    VERSION,
    WEIGHTS,
    allow_classes,
    build_network,
    checksum,
    file_sha256,
    load_model,
    load_weights,
)
from ..moe import moe_blocks
from ..runs.checkpoints import newest_checkpoint, read_checkpoint
from .arguments import Parser


def main(argv: Sequence[str]) -> int:
    """Writes the folder and says what is in it.

    Returns:
        0; 2 after a mistake of the user's, told in one line on standard error.
    """
    options = _parser().parse_args(list(argv))
    try:
        path = options.ckpt_path
        if str(path) == "last":
            if options.name is None:
                raise ConfigError("ckpt_path: last: of which run? Name it with --name")
            path = newest_checkpoint(options.runs / options.name)
            if path is None:
                raise ConfigError(
                    f"ckpt_path: last: no complete checkpoint below {options.runs / options.name}"
                )
        allow_classes(*(each for name in options.classes for each in _own_classes(name)))
        print(export(path, options.out, options.overwrite))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _own_classes(module: str) -> list[type[nn.Module]]:
    """The networks, routers and experts that a module of the user's own defines."""
    try:
        found = vars(import_module(module)).values()
    except Exception as error:  # whatever the user's own code raises
        raise ConfigError(f"classes: cannot import {module} ({error!r})") from error
    classes = [each for each in found if isinstance(each, type) and issubclass(each, nn.Module)]
    return [each for each in classes if each.__module__ == module]


def export(path: Path, out: Path, overwrite: bool = False) -> str:
    """Exports a checkpoint; the folder appears when it is complete.

    The network is run before and after it lost its unused slots, on random input, and then once
    more as read back.

    Args:
        path: a checkpoint of `python -m app fit`.
        out: the folder to write.
        overwrite: replace an earlier export there.

    Returns:
        A few lines for people: sizes, experts of each layer, largest difference of the outputs.

    Raises:
        ConfigError: no such checkpoint, a network of other classes than ours, or a folder that
            can't be written.
    """
    _check_free(out, overwrite)
    checkpoint = read_checkpoint(path)
    spec = _network_spec(path, checkpoint)
    network = _trained(path, checkpoint, spec)
    slots = {name: block.slots for name, block in moe_blocks(network).items()}
    inputs = _random_input(network)
    with torch.inference_mode():
        before = network(inputs)
        for block in moe_blocks(network).values():
            block.keep_slots()
        difference = _difference(before, network(inputs))
    experts = {name: block.slots for name, block in moe_blocks(network).items()}
    config = {
        "format": FORMAT,
        "version": VERSION,
        "network": spec,
        "experts": experts,
        "images": checkpoint.get("images"),
        "text": _text(checkpoint),
        "trained": {
            "checkpoint": path.name,
            "epoch": checkpoint.get("epoch"),
            "step": checkpoint.get("global_step"),
            "averaged_weights": "averaging_state" in checkpoint,
        },
    }
    try:
        _write(network, config, inputs, out)
    except OSError as error:
        raise ConfigError(f"out: cannot write {out} ({error}); choose another folder") from error
    size = sum(parameter.numel() for parameter in network.parameters())
    layers = [f"{name}: {experts[name]} experts in {slots[name]} slots" for name in experts]
    return "\n".join(
        [
            f"wrote {out}: {type(network).__name__}, {size:,} parameters",
            *layers,
            f"largest relative difference of the outputs: {difference:.1e}",
        ]
    )


def _check_free(out: Path, overwrite: bool) -> None:
    """Refuses a folder that holds anything but, with `overwrite`, an earlier export."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out: {out} is a file; give a folder")
    held = {file.name for file in out.iterdir()} if out.is_dir() else set()
    other = sorted(held - {CONFIG, WEIGHTS})
    if held and not overwrite:
        raise ConfigError(f"out: {out} is not empty; choose another folder or add --overwrite")
    if other:
        raise ConfigError(f"out: {out} holds more than an export ({other[0]}); choose another")


def _network_spec(path: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
    try:
        config = OmegaConf.to_container(OmegaConf.create(checkpoint["config"]), resolve=True)
        spec = copy.deepcopy(config["model"]["init_args"]["network"])
        spec["init_args"].pop("pretrained", None)
    except (
        yaml.YAMLError, OmegaConfBaseException, KeyError, TypeError, AttributeError, ValueError,
    ) as error:  # fmt: skip
        raise ConfigError(f"ckpt_path: the config in {path} has no model.network") from error
    return spec


def _trained(path: Path, checkpoint: dict[str, Any], spec: dict[str, Any]) -> nn.Module:
    """The network with all its slots, in evaluation mode, on the CPU."""
    prefix = "network."
    weights = {
        name.removeprefix(prefix): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith(prefix)
    }
    try:
        network = build_network(spec)
        load_weights(network, weights)
    except ConfigError as error:
        raise ConfigError(f"ckpt_path: {path}: {error}") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"ckpt_path: the weights in {path} do not fit its model: {error}"
        ) from error
    return network.eval()


def _random_input(network: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if isinstance(network, Decoder):
        shape = (2, min(32, network.max_length))
        return torch.randint(network.vocab_size, shape, generator=generator)
    size = (network.patch_embed.proj.in_channels, *network.patch_embed.img_size)
    images = torch.randn(2, *size, generator=generator)
    return images.to(next(network.parameters()).dtype)


def _difference(before: Tensor, after: Tensor) -> float:
    """Largest difference over the largest output.

    Raises:
        RuntimeError: if it is more than rounding.
    """
    scale = before.abs().max().clamp_min(torch.finfo(before.dtype).tiny)
    difference = float((before - after).abs().max() / scale)
    same = torch.equal(before.isfinite(), after.isfinite())
    if not same or difference > torch.finfo(before.dtype).eps ** 0.5:
        raise RuntimeError(f"the outputs changed by {difference:.1e} while exporting: a fault here")
    return difference


def _text(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    if checkpoint.get("tokenizer") is None:
        return None
    return {"tokenizer": checkpoint["tokenizer"], "block_size": checkpoint.get("block_size")}


def _write(network: nn.Module, config: dict[str, Any], inputs: Tensor, out: Path) -> None:
    """Writes a folder beside `out`, reads it back, and moves it into place."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, old = (out.with_name(f".{out.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    try:
        partial.mkdir()
        save_model(network, str(partial / WEIGHTS))
        config["weights"] = file_sha256(partial / WEIGHTS)
        config["checksum"] = checksum(config)
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (partial / CONFIG).write_text(text, encoding="utf-8")
        with torch.inference_mode():
            _difference(network(inputs), load_model(partial)(inputs))
        if out.exists():
            os.replace(out, old)
        try:
            os.replace(partial, out)
        except OSError:
            if old.exists():
                os.replace(old, out)
            raise
    finally:
        for folder in (partial, old):
            shutil.rmtree(folder, ignore_errors=True)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m app export",
        description="Write a trained network, without its unused expert slots, to a folder of "
        "model.safetensors and config.json. app.load_model(FOLDER) reads it without Lightning.",
    )
    add = parser.add_argument
    add(
        "--ckpt_path",
        required=True,
        type=Path,
        help="checkpoint of `python -m app fit`; last for the newest of the run --name",
    )
    add("--out", required=True, type=Path, metavar="DIR", help="folder to write")
    add("--overwrite", action="store_true", help="replace an earlier export in DIR")
    add(
        "--classes",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="modules of your own whose networks, routers and experts may be exported; imported",
    )
    add("--name", help="name of the run, for --ckpt_path last")
    add("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    return parser
