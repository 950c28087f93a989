"""`base:` in a config file: the files that it builds on, read before it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from ..errors import ConfigError


def expand(argv: Sequence[str]) -> list[str]:
    """Puts the base files of every `--config FILE` in front of it, and a default `--name` behind.

    Later files win over earlier ones, and the command line over all of them.

    Raises:
        ConfigError: for a config or base file that is missing, no YAML mapping, or its own base.
    """
    expanded: list[str] = []
    names: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag not in ("--config", "-c"):
            expanded.append(argument)
            continue
        path = value if equals else next(arguments, None)
        if path is None:
            raise ConfigError("--config needs a file")
        if not _read(Path(path)):
            raise ConfigError(f"{path}: this config is empty; start from one in configs/")
        files = _with_bases(Path(path), ())
        expanded += [part for file in files for part in ("--config", str(file))]
        content = _read(Path(path))
        if set(content) != {"trainer"}:  # that says how to run, not what
            names += [Path(path).stem]
        if content.get("name"):
            names = []
    if names:  # in front, so that everything else wins over it
        at = expanded.index("--config")
        expanded[at:at] = ["--name", names[-1]]
    return expanded


def with_run_config(argv: Sequence[str]) -> list[str]:
    """Adds the config.yaml of the run that a `--ckpt_path FILE` belongs to, if none is given."""
    argv = list(argv)
    flags = [argument.partition("=")[0] for argument in argv]
    if "--ckpt_path" not in flags or {"--config", "-c"} & set(flags):
        return argv
    at = flags.index("--ckpt_path")
    path = argv[at].partition("=")[2] or "".join(argv[at + 1 : at + 2])
    if path in ("last", "auto"):  # of a run that only a config can name
        return argv
    config = Path(path).parent.parent / "config.yaml"
    return [argv[0], "--config", str(config), *argv[1:]] if config.is_file() else argv


def _with_bases(path: Path, above: tuple[Path, ...]) -> list[Path]:
    if path.resolve() in above:
        raise ConfigError(f"{path}: builds on itself through `base`")
    bases = _read(path).get("base") or []
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: `base` must be a list of files")
    files: list[Path] = []
    for base in bases:
        if not (path.parent / base).is_file():
            raise ConfigError(f"{path}: its base file {base} does not exist")
        files += _with_bases(path.parent / base, (*above, path.resolve()))
    return [*files, path]


def _read(path: Path) -> dict:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config: there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}"
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: a config is a mapping of keys, this is a {type(content).__name__}"
        )
    return content
