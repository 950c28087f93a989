"""A suite's file: which runs it stands for, all checked before the first one starts."""

from __future__ import annotations

import difflib
import io
import json
import os
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from jsonargparse import Namespace

from ...cli.config_files import expand
from ...cli.main import App
from ...cli.messages import root_cause
from ...errors import ConfigError
from ...runs.folder import of_the_run
from ...runs.progress import End, settings_of

KEYS = ("name", "configs", "set", "seeds", "entries")
ENTRY_KEYS = ("name", "configs", "set", "seeds")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class Run:
    """One run of a suite.

    Attributes:
        name: `<suite>/<entry>-seed<seed>`, the run's `--name`.
        folder: RUNS/<name>.
        arguments: of `python -m app fit`.
        end: where it ends.
        settings: see `settings_of`.
    """

    name: str
    folder: Path
    arguments: tuple[str, ...]
    end: End
    settings: dict[str, Any] = field(repr=False)

    @property
    def title(self) -> str:
        """The name without the suite's."""
        return self.folder.name

    def other_settings(self, version: Path) -> list[str]:
        """What the config of a run folder says otherwise than this run's, in words."""
        try:
            theirs = yaml.safe_load((version / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return []
        theirs = settings_of(theirs) if isinstance(theirs, dict) else {}
        return [
            f"{key} is {theirs.get(key)} there, {self.settings.get(key)} here"
            for key in self.settings | theirs
            if self.settings.get(key) != theirs.get(key)
        ]


def read_suite(
    path: Path,
    runs: Path,
    *,
    name: str | None = None,
    configs: Sequence[Path] = (),
    overrides: Sequence[str] = (),
) -> list[Run]:
    """The runs of a suite's file, in the order in which they are run: first seeds first.

    Args:
        path: of the file.
        runs: folder of all runs.
        name: of the suite, instead of the file's.
        configs: more config files, read behind each entry's own.
        overrides: more arguments of `fit` for all runs; they win over everything else.

    Raises:
        ConfigError: for a key or value of the file, or a config of an entry, that can't be.
    """
    suite = _mapping(_read_yaml(path), KEYS, str(path))
    suite_name = name or suite.get("name")
    _check_name(suite_name, f"{path}: name")
    entries = suite.get("entries")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: entries must be a list of runs, each with a name and configs")
    check, named = _Check(), set()
    waves: dict[int, list[Run]] = {}
    for number, raw in enumerate(entries, 1):
        where = f"{path}: entry {number}"
        entry = _mapping(raw, ENTRY_KEYS, where)
        _check_name(entry.get("name"), f"{where}: name")
        where = f"{path}: entry {entry['name']}"
        if entry["name"] in named:
            raise ConfigError(f"{where}: two entries have this name; give each its own")
        named.add(entry["name"])
        arguments = [
            *_config_arguments(path, suite, f"{path}: configs"),
            *_config_arguments(path, entry, f"{where}: configs"),
            *(part for file in configs for part in ("--config", str(file))),
            *_set_arguments(suite, f"{path}: set"),
            *_set_arguments(entry, f"{where}: set"),
            *overrides,
        ]
        if "--config" not in arguments:
            raise ConfigError(f"{where}: configs: give at least one config file")
        end, settings = check(arguments, where)
        seeds = _seeds(entry, where) or _seeds(suite, str(path)) or [0]
        for wave, seed in enumerate(seeds):
            full = f"{suite_name}/{entry['name']}-seed{seed}"
            own = ("--seed_everything", str(seed), "--runs", str(runs), "--name", full)
            run = Run(full, runs / full, (*arguments, *own), end, settings)
            waves.setdefault(wave, []).append(run)
    return [run for wave in sorted(waves) for run in waves[wave]]


class _Check(App):
    """Parses the arguments of `fit` and builds model, data module and callbacks; reads no data.

    The parser is built once for all entries.
    """

    def __init__(self) -> None:
        self.built = False

    def __call__(self, arguments: Sequence[str], where: str) -> tuple[End, dict[str, Any]]:
        """Where a run with these arguments ends, and its settings.

        Raises:
            ConfigError: whatever is wrong with them, told with `where`.
        """
        argv, said = expand(["fit", *arguments]), io.StringIO()
        try:
            with redirect_stderr(said):
                if self.built:
                    self.parse_arguments(self.parser, argv)
                else:
                    App.__init__(self, argv)
                    self.built = True
                self._build(self.config["fit"])
        except SystemExit:
            lines = said.getvalue().strip().splitlines() or ["error: it can't be parsed"]
            raise ConfigError(f"{where}: {lines[-1].removeprefix('error: ')}") from None
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        text = self._parser("fit").dump(of_the_run(self.config["fit"]), skip_none=False)
        config = yaml.safe_load(text)
        return End.of(config["trainer"]), settings_of(config)

    def _build(self, config: Namespace) -> None:
        config = config.clone()
        network = config.model.init_args.get("network")
        pretrained = network and network.get("init_args", Namespace()).get("pretrained")
        if pretrained:
            if not Path(pretrained).exists() and not timm.is_model(pretrained.split(".")[0]):
                raise ConfigError(
                    f"model.network.pretrained: there is neither a file nor a timm model "
                    f"{pretrained}"
                )
            network.init_args.pretrained = None  # not read now
        build = self._parser("fit").instantiate
        try:
            with torch.device("meta"):
                build(config)
        except Exception:  # refused, or not to be had without memory (mixup): now the true reason
            try:
                build(config)
            except Exception as error:
                raise ConfigError(" ".join(str(root_cause(error)).split())) from error

    def _set_seed(self) -> None:
        pass

    def before_instantiate_classes(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no suite file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the suite file {path}: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", error)
        raise ConfigError(f"{path}{where}: not valid YAML: {problem}") from None


def _mapping(value: Any, keys: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be a mapping with the keys {', '.join(keys)}")
    for key in value:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(f"{where}: unknown key {key}{hint}; accepted: {', '.join(keys)}")
    return value


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{where} must be a word of letters, digits, `_`, `-` and `.`, as it becomes a folder, "
            f"got {name!r}"
        )


def _config_arguments(path: Path, section: dict[str, Any], where: str) -> list[str]:
    files = section.get("configs") or []
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ConfigError(f"{where} must be a list of config files, relative to {path.parent}")
    arguments: list[str] = []
    for file in files:
        if not (path.parent / file).is_file():
            raise ConfigError(
                f"{where}: there is no file {file} (paths are relative to {path.parent})"
            )
        arguments += ["--config", os.path.normpath(path.parent / file)]
    return arguments


def _set_arguments(section: dict[str, Any], where: str) -> list[str]:
    settings = section.get("set") or {}
    if not isinstance(settings, dict) or not all(isinstance(key, str) for key in settings):
        raise ConfigError(
            f"{where} must map settings to values, as in {{trainer.max_epochs: 10}}, "
            f"got {settings!r}"
        )
    return [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
    ]


def _seeds(section: dict[str, Any], where: str) -> list[int]:
    seeds = section.get("seeds")
    if seeds is None:
        return []
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(
            f"{where}: seeds must be a list of different whole numbers, as in [0, 1, 2], "
            f"got {seeds!r}"
        )
    return seeds
