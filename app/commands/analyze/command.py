"""What the experts of a trained network do: `python -m app analyze --ckpt_path A [B ...]`.

Router saturation between checkpoints of a run; what each expert contributes to the loss; how far
its outputs are from its default vector; which classes or tokens take it. On validation data.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from data.errors import DataError

from ...errors import ConfigError
from ...moe import moe_blocks
from ...runs.checkpoints import read_checkpoint, rebuild
from ...runs.folder import differing_settings
from ...tasks import LanguageModeling
from ..arguments import Parser, find_device, number, write_json
from .measures import (
    Affinity,
    Batches,
    Contributions,
    Distances,
    contributions,
    default_distances,
    expert_affinity,
    router_saturation,
)
from .pictures import draw
from .sample import check_fits, draw_sample, group_names
from .tables import print_result


@dataclass
class Checkpoint:
    """A checkpoint file and what is in it."""

    path: Path
    content: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps that had been taken."""
        return int(self.content.get("global_step", 0))

    @property
    def network_config(self) -> Any:
        """What the config says of the network."""
        model = yaml.safe_load(self.content["config"])["model"]
        return model.get("init_args", model).get("network")

    def births(self) -> list[dict[str, Any]]:
        """Births of experts so far, where the run had any (the AdaptiveExperts callback)."""
        states = self.content.get("callbacks", {}).values()
        events = [e for s in states if isinstance(s, dict) for e in s.get("events", ())]
        return [event for event in events if event["event"] == "birth"]


def main(argv: Sequence[str]) -> int:
    """Prints tables, and writes pictures, of what the experts of a checkpoint do.

    Returns:
        0; 2 after a mistake of the user's, told in one line on standard error; 130 when stopped by
        Ctrl-C: no file is then half written.
    """
    parser = _parser()
    options, rest = parser.parse_known_args(list(argv))
    changes = _data_changes(parser, rest)
    try:
        checkpoints = read_checkpoints(options.ckpt_path)
        folder = options.out or _run_folder(checkpoints[-1].path) / "analysis"
        _make_folder(folder)
        result = analyze(checkpoints, options, changes)
        print_result(result, Console(highlight=False, markup=False, emoji=False))
        if options.json:
            write_json(options.json, result)
        _draw(result, folder)
        print(f"pictures: {folder}")
    except (ConfigError, DataError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def read_checkpoints(paths: Sequence[Path]) -> list[Checkpoint]:
    """Checkpoints of one run, by their steps.

    Raises:
        ConfigError: a file that can't be read, or checkpoints of two models.
    """
    found = sorted(
        (Checkpoint(path, read_checkpoint(path)) for path in paths), key=lambda each: each.step
    )
    last = found[-1]
    for each in found[:-1]:
        if each.network_config != last.network_config:
            told = differing_settings(each.path, each.content, last.content["config"])
            differing = [text for key, text in told.items() if key.startswith("model.network")]
            raise ConfigError(
                f"ckpt_path: {each.path} is of another model: {'; '.join(differing[:4])} (here is "
                f"{last.path})"
            )
    seeds = {yaml.safe_load(each.content["config"]).get("seed_everything") for each in found}
    if len(seeds) > 1:
        print(
            f"note: the checkpoints are of runs with the seeds {sorted(map(str, seeds))}; experts "
            "of different runs have nothing in common but their number",
            file=sys.stderr,
        )
    return found


def analyze(
    checkpoints: list[Checkpoint], options: argparse.Namespace, changes: dict[str, Any]
) -> dict[str, Any]:
    """Measures everything.

    Args:
        checkpoints: as `read_checkpoints` gives them; the last one is analysed, the others are
            compared with it.
        options: of the command line.
        changes: settings of the data to change, by name.

    Returns:
        What `--json` writes.

    Raises:
        ConfigError: a model without MoE layers, or data that does not fit it.
        DataError: data that is missing or damaged.
    """
    last = checkpoints[-1]
    device = find_device(options.device)
    task, data = _load(last, changes)
    network = task.network.to(device)
    sample = draw_sample(data.val_dataloader(), options.samples)
    batches: Batches = lambda: sample.batches(options.batch_size, device)  # noqa: E731

    affinity = expert_affinity(network, sample, batches)
    saturation = []
    for each in checkpoints[:-1]:
        earlier = rebuild(each.path, each.content, model=L.LightningModule)["model"].eval()
        born = _born_between(each, last)
        found = router_saturation(earlier.network.to(device), network, batches, born)
        layers = {layer: asdict(values) for layer, values in found.items()}
        saturation.append({"ckpt_path": str(each.path), "step": each.step, "layers": layers})
    distances = default_distances(network, batches)
    experts = sum(len(slots) for slots in affinity.active.values())
    with _progress() as progress:
        total = experts * math.ceil(len(sample) / options.batch_size)
        bar = progress.add_task("masking experts", total=total)
        masking = contributions(network, batches, lambda: progress.advance(bar))
    return {
        "ckpt_path": str(last.path),
        "step": last.step,
        "samples": len(sample),
        "loss": masking.loss,
        "saturation": saturation,
        "experts": _expert_rows(affinity, masking, distances),
        "affinity": {
            "of": "token" if sample.is_text else "class",
            "names": group_names(data, affinity.group_G, sample.is_text),
            "layers": _affinity_layers(affinity),
        },
    }


def _load(
    checkpoint: Checkpoint, changes: dict[str, Any]
) -> tuple[L.LightningModule, L.LightningDataModule]:
    """Task, in evaluation mode, and its data, set up for validation."""
    path, content = checkpoint.path, dict(checkpoint.content)
    content["config"] = _changed(content["config"], changes)
    run = rebuild(path, content, model=L.LightningModule, data=L.LightningDataModule)
    task, data = run["model"].eval(), run["data"]
    if not moe_blocks(task):
        raise ConfigError(f"ckpt_path: the model of {path} has no MoE layer to analyze")
    data.prepare_data()
    data.setup("validate")
    check_fits(task, data)
    if isinstance(task, LanguageModeling):
        task.tokenizer = data.tokenizer
        task.on_load_checkpoint(content)  # refuses another tokenizer than the one trained with
    return task, data


def _expert_rows(
    affinity: Affinity, masking: Contributions, distances: dict[str, Distances]
) -> dict[str, list[dict[str, Any]]]:
    """By layer, a row of figures for each active expert."""
    rows = {}
    for layer, slots in affinity.active.items():
        columns = {
            "load": affinity.load[layer],
            "contribution": masking.change[layer],
            "contribution_error": masking.error[layer],
        }
        if layer in distances:
            columns["distance_own"] = distances[layer].own_E
            columns["distance_others"] = distances[layer].others_E
        rows[layer] = [
            {"expert": slot} | {name: _plain(column_E[slot]) for name, column_E in columns.items()}
            for slot in slots
        ]
    return rows


def _affinity_layers(affinity: Affinity) -> dict[str, Any]:
    """By layer, a row of shares for each group, with a column for each active expert."""
    return {
        layer: {
            "experts": slots,
            "load": affinity.load[layer][slots].tolist(),
            "tokens": affinity.tokens[layer].long().tolist(),
            "share": affinity.share[layer][:, slots].tolist(),
        }
        for layer, slots in affinity.active.items()
    }


def _born_between(earlier: Checkpoint, later: Checkpoint) -> dict[str, set[int]]:
    """Slots, by layer, in which an expert was born after the earlier checkpoint."""
    known = earlier.births()
    born: dict[str, set[int]] = {}
    for event in later.births():
        if event not in known:
            born.setdefault(event["layer"], set()).add(int(event["slot"]))
    return born


def _plain(value: Tensor) -> float | None:
    return float(value) if value.isfinite() else None


# ---- the command line


def _parser() -> Parser:
    parser = Parser(
        prog="python -m app analyze",
        description="What the experts of a trained network do, on validation data of its run.",
        epilog="Settings of the data can be changed, as --data.root FOLDER where it has moved.",
    )
    add = parser.add_argument
    add(
        "--ckpt_path",
        required=True,
        type=Path,
        nargs="+",
        metavar="FILE",
        help="checkpoints of one run; the one of the most steps is analysed, the routing of the "
        "others is compared with it",
    )
    samples = "validation images or sequences at most, drawn at random"
    add("--samples", type=number(int, 1), default=256, help=samples)
    add("--batch_size", type=number(int, 1), default=64, help="samples in one forward pass")
    add("--device", default="auto", help="cpu, cuda, or auto for a GPU where there is one")
    add("--out", type=Path, metavar="DIR", help="for the pictures; by default RUN/analysis")
    add("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    return parser


def _data_changes(parser: argparse.ArgumentParser, rest: list[str]) -> dict[str, Any]:
    """Reads `--data.NAME VALUE` and `--data.NAME=VALUE`; anything else is unknown."""
    changes: dict[str, Any] = {}
    rest = list(rest)
    while rest:
        name, given, value = rest.pop(0).partition("=")
        if not name.startswith("--data."):
            parser.error(f"unrecognized argument: {name}")
        if not given:
            if not rest:
                parser.error(f"argument {name}: expected a value")
            value = rest.pop(0)
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError:
            parser.error(f"argument {name}: not a YAML value: {value}")
        changes[name.removeprefix("--data.").removeprefix("init_args.")] = read
    return changes


def _changed(config: str, changes: dict[str, Any]) -> str:
    """A config with other settings of its data."""
    if not changes:
        return config
    whole = OmegaConf.create(config)
    settings = whole.data.init_args
    for name, value in changes.items():
        if name not in settings:
            raise ConfigError(
                f"--data.{name}: {whole.data.class_path} has no such setting; it has "
                f"{', '.join(map(str, settings))}"
            )
        settings[name] = value
    return OmegaConf.to_yaml(whole)


def _run_folder(path: Path) -> Path:
    folder = path.resolve().parent
    return folder.parent if folder.name == "checkpoints" else folder


def _make_folder(folder: Path) -> None:
    """Before the work, so that a folder that can't be written costs no time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: cannot write to {folder} ({error})") from error


def _draw(result: dict[str, Any], folder: Path) -> None:
    try:
        draw(result, folder)
    except OSError as error:
        raise ConfigError(f"out: cannot write to {folder} ({error})") from error


def _progress() -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
