"""Turns jsonargparse's nested error messages into one line that names key and remedy."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Sequence


def explain(message: str, options: Sequence[str] = ()) -> str:
    """One line for an error message of jsonargparse.

    A wrong key gets the keys that are accepted there, a wrong value what was expected. Messages
    of other shapes are passed on, folded into one line.

    Args:
        message: what jsonargparse says.
        options: the option strings that the parser knows, such as `--trainer.max_epochs`.
    """
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
    return re.sub(r"\s+", " ", message).strip()


def root_cause(error: BaseException) -> BaseException:
    """The exception at the start of a chain: jsonargparse wraps what a constructor raises."""
    while error.__cause__ or (error.__context__ and not error.__suppress_context__):
        error = error.__cause__ or error.__context__
    return error


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
    literal = re.fullmatch(r"typing\.Literal\[(.+)\]", text)
    return f"one of {literal[1]}" if literal else text
