"""Turns jsonargparse's nested error messages into one line that names key and remedy."""

from __future__ import annotations

import difflib
import errno
import importlib
import inspect
import re
from collections.abc import Collection, Sequence
from pathlib import PurePath
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from ..errors import ConfigError, causes


def explain(message: str, options: Sequence[str] = (), subcommands: Collection[str] = ()) -> str:
    """One line for an error message of jsonargparse.

    A wrong key gets the keys that are accepted there, a wrong value what was expected. Messages
    of other shapes are passed on, folded into one line.

    Args:
        message: what jsonargparse says.
        options: the option strings that the parser knows, such as `--trainer.max_epochs`.
        subcommands: those that exist.
    """
    if re.search(r'argument subcommand: invalid|expected "subcommand"', message):
        return _subcommand(message, subcommands)
    absent = re.search(r"the following arguments are required: (.+)", message)
    if absent:
        keys = [key.rpartition(".")[2] for key in absent[1].split(", ")]
        return f"no {' and no '.join(keys)} given; name a config file with --config"
    unknown = re.search(r"unrecognized arguments: (--[^\s=]+)", message)
    if unknown:
        near = difflib.get_close_matches(unknown[1], options, 3)
        return f"unknown option {unknown[1]}; " + (
            f"did you mean {' or '.join(near)}?" if near else "see --help for those that exist"
        )
    keys = ".".join(dict.fromkeys(re.findall(r'Parser key "([^"]+)"', message)))
    option = re.findall(r"Option '([^']+)' is not accepted", message)
    if option:
        return _unknown_key(keys, option[-1], _last_class(message, option[-1]))
    option = re.search(r"Group '([^']+)' does not accept option '([^']+)'", message)
    if option:
        return _unknown_key(option[1], option[2].split(".")[-1], None)
    option = re.search(r"Subcommand '[^']+' does not accept option '([^']+)'", message)
    if option:
        top = option[1].split(".")[0]
        near = difflib.get_close_matches(top, {name[2:].split(".")[0] for name in options}, 1)
        hint = f"did you mean {near[0]}?" if near else "see --help for those that exist"
        return f"unknown key {top}; {hint}"
    missing = re.findall(r"Expected a dot import path string: (\S+)", message)
    if missing and keys:
        name = missing[-1].rstrip(".")
        return f"{keys}: there is no class {name}; give a name such as TopK or a full path"
    choice = re.findall(r"Expected an? (.+?)\. Got value: (.+?)(?:\. Got value|\n|$)", message)
    if choice and keys:
        expected, got = choice[-1]
        return f"{keys}: expected {_type_name(expected)}, got {got}"
    literal = re.findall(r"Expected a (typing\.Literal\[[^\]]+\])", message)
    if literal and keys:
        got = re.search(r"Given value: (.+)", message)
        return f"{keys}: expected {_type_name(literal[0])}" + (f", got {got[1]}" if got else "")
    several = re.search(r"Multiple subclasses with name (\w+)\. .*?: (\S+(?:, \S+)*)\.\s", message)
    if several and keys:
        return f"{keys}: there are several classes {several[1]}; give one of {several[2]}"
    required = re.search(r'Key "([^"]+)" is required', message)
    if required and keys:
        path = re.findall(r"class_path '([\w.]+)'", message)
        return f"{keys}: {path[-1] if path else 'this class'} needs {required[1]}, which is not set"
    union = re.findall(r"Subtypes: \[(.+?)\]\s*Errors:", message)
    got = re.findall(r"Given value: (.+)", message)
    if union and got and keys:
        value = re.sub(r"NestedArg\(key='.*?', val='?(.*?)'?\)$", r"\1", got[0])
        value = value.partition(". Got value")[0]
        return f"{keys}: expected {_type_name(union[-1])}, got {value}"
    return re.sub(r"\s+", " ", message).strip()


def _subcommand(message: str, subcommands: Collection[str]) -> str:
    given = re.search(r"invalid choice: '([^']*)'", message)
    said = f"there is no subcommand {given[1]}" if given else "a subcommand is missing"
    near = difflib.get_close_matches(given[1], subcommands, 1) if given else []
    hint = f"did you mean {near[0]}? T" if near else "t"
    return f"{said}; {hint}here are {', '.join(subcommands)}"


def check_settings(config: Any) -> None:
    """Refuses what Lightning would take, and then fail at or ignore.

    Args:
        config: the settings of a subcommand.

    Raises:
        ConfigError: names the setting.
    """
    name, trainer = config.name, config.trainer
    if not name or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise ConfigError(f"name: {name!r} is no name for a folder in {config.runs}")
    if trainer.accumulate_grad_batches < 1:
        given = trainer.accumulate_grad_batches
        raise ConfigError(f"trainer.accumulate_grad_batches is {given}; it must be 1 or more")
    if (trainer.gradient_clip_val or 0) < 0:
        given = trainer.gradient_clip_val
        raise ConfigError(f"trainer.gradient_clip_val is {given}; it must be 0 or more, or null")


REFUSALS = (
    (
        r"No supported gpu backend found|accelerator is not available|Device=.* not available",
        "trainer.accelerator: there is no such device here; set it to auto or cpu",
    ),
    (
        r"requested gpu: \[.*\]\s+But your machine only has: \[(.*)\]",
        r"trainer.devices: there are fewer GPUs here, only [\1]; ask for no more than that",
    ),
    (
        r"Trainer\(devices=.*is not a valid input|`devices` selected with|device_string",
        "trainer.devices must be a number from 1, or auto",
    ),
    (
        r"`val_check_interval` \((\S+)\) must be less than or equal to the number of the training "
        r"batches \((\S+)\)",
        r"trainer.val_check_interval is \1 and an epoch has \2 batches; set it to \2 or less, or "
        "trainer.check_val_every_n_epoch to null",
    ),
    (
        r"(-?\d+) is not in bounds, numpy accepts from 0 to (\d+)",
        r"seed_everything is \1; it must lie between 0 and \2",
    ),
    (
        r"more than one stateful callback of type `(\w+)`",
        r"trainer.callbacks: \1 is listed twice; remove one of them",
    ),
)
"""What Lightning says of a setting without naming it, or at length: pattern, what we say."""


def reword(message: str) -> str | None:
    """What to say in place of one of Lightning's messages of `REFUSALS`, None for others."""
    for pattern, line in REFUSALS:
        found = re.search(pattern, message)
        if found:
            return found.expand(line)
    return None


def refusal(error: BaseException) -> str | None:
    """One line for an exception that the user can mend and that isn't marked as such, else None."""
    message = str(error)
    if isinstance(error, OmegaConfBaseException):
        first, *rest = message.splitlines()
        key = re.search(r"full_key: (\S+)", " ".join(rest))
        return f"{key[1]}: {first}" if key else first
    if "EADDRINUSE" in message or "address already in use" in message:
        port = re.search(r"port: (\d+)", message)
        return (
            f"MASTER_PORT: port {port[1] if port else ''} is in use by another program; set the "
            "environment variable to another port, or leave it out"
        )
    if isinstance(error, OSError) and error.filename and error.errno in UNUSABLE:
        return f"cannot use {error.filename}: {error.strerror}; check the path"
    return reword(message) if isinstance(error, ValueError | RuntimeError | TypeError) else None


UNUSABLE = (errno.EISDIR, errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""What the system says of paths that can't be, beside what `callbacks.common.disk_error` knows."""


def root_cause(error: BaseException) -> BaseException:
    """The exception at the start of a chain: jsonargparse wraps what a constructor raises."""
    return list(causes(error))[-1]


def _unknown_key(keys: str, option: str, owner: type | None) -> str:
    line = f"unknown key {keys}.{option}" if keys else f"unknown key {option}"
    if owner is None:
        return f"{line}; see --help for those that exist"
    accepted = _accepted(owner)
    near = difflib.get_close_matches(option.split(".")[-1], accepted, 1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{line}{hint}; {owner.__name__} accepts: {', '.join(accepted)}"


def _accepted(owner: type) -> list[str]:
    """Names of a class's settings, those that it passes on to its base classes included."""
    names: dict[str, None] = {}
    for base in owner.__mro__:
        parameters = inspect.signature(base.__init__).parameters.values()
        names |= {
            p.name: None for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        }
        if all(p.kind != p.VAR_KEYWORD for p in parameters):
            break
    given = {"self"}  # and what a model passes to its blocks, a block to its router
    if owner.__module__.startswith("app.moe"):
        given |= {"dim", "hidden", "slots"}
    return [name for name in names if name not in given]


def _last_class(message: str, option: str) -> type | None:
    """The class that refused an option: the last class path named around it."""
    paths = re.findall(r"class_path[= ]'([\w.]+)'", message)
    tail = message.split(f"Option '{option}'", 1)[-1]
    named = re.findall(r"class_path='([\w.]+)'", tail) or paths[-1:]
    if not named:
        return None
    module, _, name = named[0].rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None


def _type_name(text: str) -> str:
    text = re.sub(r"<class '(?:[\w]+\.)*(\w+)'>", r"\1", text)
    text = re.sub(r", (?![^\[]*\])", " or ", text).replace("NoneType", "null")
    literal = re.fullmatch(r"typing\.Literal\[(.+)\]", text)
    return f"one of {literal[1]}" if literal else text
