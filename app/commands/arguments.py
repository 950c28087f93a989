"""What our own subcommands share: kinds of arguments, devices, output files."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..errors import ConfigError
from ..files import write_text


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not that there is none."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False:
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """The parser of a subcommand of ours: mistakes cost one line, and --help shows defaults."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", HelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(**kwargs)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown:
            name = unknown[1].partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, 1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            message = f"unknown argument {name}; {hint}"
        message = re.sub(r"^argument (\S+): ", r"\1: ", message)
        message = re.sub(r"^the following arguments are required: ", "missing: ", message)
        sys.stderr.write(f"error: {' '.join(message.split())}\n")
        raise SystemExit(2)


def number(kind: type, low: float, high: float = float("inf")) -> Callable[[str], float]:
    """An argparse type: a number of this kind from `low` to `high`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            limit = f"at least {low}" if high == float("inf") else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"must be {limit}, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number
    return parse


def find_device(name: str) -> torch.device:
    """The device of a name; `auto` is a GPU where there is one.

    Raises:
        ConfigError: for a device that this machine doesn't have.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ConfigError(f"device: {name!r} is not available here; try auto or cpu") from error


def write_json(path: Path, content: dict[str, Any] | list[Any]) -> None:
    """Writes what `--json FILE` asks for, with the folders above it; never half of it.

    Raises:
        ConfigError: if the file can't be written.
    """
    try:
        write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(f"json: cannot write {path} ({error})") from error
