"""The command line of `python -m app benchmark`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from data.errors import DataError

from ...errors import ConfigError
from ..arguments import HelpFormatter, Parser, find_device, number, write_json
from .rows import Row
from .timing import CLOCKS


def main(argv: Sequence[str]) -> int:
    """Runs one benchmark and prints its table.

    Returns:
        0; 2 after a mistake of the user's, told in one line on standard error.
    """
    options = _parser().parse_args(list(argv))
    try:
        rows = options.run(options)
        if options.json:
            write_json(options.json, rows)
    except (ConfigError, DataError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _moe(options: argparse.Namespace) -> list[Row]:
    from . import moe

    experts, k = options.experts, options.k
    if k > experts:
        raise ConfigError(f"--k is {k}, more than the {experts} experts of --experts")
    if options.hidden % moe.FINE:
        raise ConfigError(f"--hidden is {options.hidden}; it must be a multiple of {moe.FINE}")
    sizes = moe.Sizes(options.tokens, options.dim, options.hidden, experts, k)
    return moe.run(sizes, _device(options), options.dtype, options.repeats, options.clock)


def _step(options: argparse.Namespace) -> list[Row]:
    from . import step

    return step.run(
        step.Plan(
            recipe=options.recipe,
            methods=tuple(options.methods),
            against=tuple(options.against),
            batch_size=options.batch_size,
            steps=options.steps,
            repeats=options.repeats,
            dtype=options.dtype,
            compile=options.compile,
            memory=options.memory,
            clock=options.clock,
        ),
        _device(options),
    )


def _data(options: argparse.Namespace) -> list[Row]:
    from . import data

    device, clock = _device(options), options.clock
    return data.run(device, options.batch_size, options.images, options.repeats, clock)


def _device(options: argparse.Namespace) -> torch.device:
    device = find_device(options.device)
    if device.type == "cuda" and options.clock == "cpu":
        raise ConfigError("--clock cpu says nothing of a GPU; leave it at wall")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {options.device}; benchmarks run on cpu and cuda")
    return device


def _parser() -> Parser:
    parser = Parser(
        prog="python -m app benchmark",
        description="Times the MoE block, the training step or the data. Every figure is a median "
        "of repeats in which all cases take turns; a ratio is the median of the ratios within each "
        "turn.",
    )
    kinds = parser.add_subparsers(required=True, metavar="{moe,step,data}")
    form = HelpFormatter

    moe = kinds.add_parser("moe", help="the block against dense layers", formatter_class=form)
    add = moe.add_argument
    add("--tokens", type=number(int, 1), default=4160, help="tokens T")
    add("--dim", type=number(int, 1), default=384, help="model width D")
    add("--hidden", type=number(int, 1), default=1536, help="hidden width F of an expert")
    add("--experts", type=number(int, 2), default=8, help="experts E")
    add("--k", type=number(int, 1), default=2, help="experts K of a token")
    _common(moe, _moe, repeats=20)

    step = kinds.add_parser(
        "step", help="the training step against bare loops", formatter_class=form
    )
    add = step.add_argument
    add("--recipe", default="cifar10_vit_s", help="file of configs/recipes, for an image model")
    add(
        "--methods",
        nargs="+",
        default=["dynmoe"],
        metavar="METHOD",
        help="files of configs/methods; `dynmoe` is dynmoe_weighted_average, `all` the main ones",
    )
    add(
        "--against",
        nargs="*",
        default=["bare", "lightning", "no_monitor"],
        choices=("bare", "lightning", "no_monitor"),
        help="what a method is compared with besides plain timm",
    )
    add("--batch_size", type=number(int, 1), default=16, help="images of a step")
    add("--steps", type=number(int, 1), default=1, help="steps between two changes of the case")
    add(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="compile the dense parts, in all cases",
    )
    add(
        "--memory",
        action="store_true",
        help="also the peak memory of a step, of every case in a process of its own",
    )
    _common(step, _step, repeats=8)

    data = kinds.add_parser(
        "data", help="batched augmentation against the per-sample one", formatter_class=form
    )
    add = data.add_argument
    add("--batch_size", type=number(int, 1), default=128, help="images of a batch")
    add("--images", type=number(int, 1), default=2048, help="images of one measurement")
    _common(data, _data, repeats=10, dtype=False)
    return parser


def _common(parser: argparse.ArgumentParser, run: object, repeats: int, dtype: bool = True) -> None:
    add = parser.add_argument
    add("--device", default="auto", help="cpu, cuda or auto")
    add("--repeats", type=number(int, 1), default=repeats, help="interleaved rounds")
    add(
        "--clock",
        choices=tuple(CLOCKS),
        default="wall",
        help="cpu: processor time, on a busy machine with OMP_NUM_THREADS=1",
    )
    if dtype:
        add("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: mixed precision")
    add("--json", type=Path, metavar="FILE", help="also write all rows to this file")
    parser.set_defaults(run=run)
