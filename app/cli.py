"""The command line: Lightning's subcommands over configs, and our own beside them."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import callbacks
import data
from data.errors import DataError

from . import models, moe, tasks
from .checkpoints import read_checkpoint
from .config_errors import explain, root_cause
from .config_files import expand, with_run_config
from .errors import ConfigError
from .run_folder import (
    RunConfig,
    find_run_version,
    newest_checkpoint,
    other_model,
)

# Importing these packages lets a config name their classes without the full path.
PLUGINS = (models, moe, tasks, callbacks, data)

OWN_COMMANDS: dict[str, tuple[str, str]] = {
    "analyze": ("app.analyze", "show what the experts of a checkpoint do"),
    "generate": ("app.generate", "continue a text with a trained language model"),
    "router_gradients": ("app.router_gradients", "compare router gradients with the dense mixture"),
    "weights": ("app.weights", "save the weights of a timm model to a file"),
    "suite": ("app.suite", "run a list of configs and seeds, resumable and in shards"),
    "evaluate": ("app.lm_eval_adapter", "run tasks of the lm-evaluation-harness on a checkpoint"),
}
"""Our own subcommands: name -> (module with `main(argv) -> int`, what it does)."""


class Parser(LightningArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [option for action in parser._actions for option in action.option_strings]
        sys.stderr.write(f"error: {explain(message, options)}\n")
        raise SystemExit(2)


class App(LightningCLI):
    """fit, validate, test and predict, with the run folder that all of them share."""

    def __init__(self, args: Sequence[str]) -> None:
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=list(args),
            parser_class=Parser,
            parser_kwargs={
                "parser_mode": "omegaconf",
                "prog": "python -m app",
                "description": DESCRIPTION,
                "allow_abbrev": False,
            },
            save_config_callback=RunConfig,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            trainer_defaults={"log_every_n_steps": 10},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds the run folder and the callbacks that every run has."""
        parser.add_argument("--name", type=str, default="run", help="Name of the run.")
        parser.add_argument(
            "--runs", type=str, default="runs", help="Folder of all runs: RUNS/NAME/version_N."
        )
        parser.add_argument(
            "--base",
            type=list[str] | None,
            default=None,
            help="Config files that a config file builds on, relative to it.",
        )
        parser.add_lightning_class_args(callbacks.Checkpoint, "checkpoint")
        parser.set_defaults(
            {
                "checkpoint.save_top_k": 0,
                "checkpoint.save_last": True,
                "checkpoint.save_on_train_epoch_end": True,
                "checkpoint.enable_version_counter": False,
            }
        )
        parser.add_lightning_class_args(callbacks.RoutingMonitor, "monitor")

    def _parse_ckpt_path(self) -> None:
        # Lightning would look for hyperparameters in the checkpoint here; ours holds the config.
        pass

    def before_instantiate_classes(self) -> None:
        """Resolves `--ckpt_path last` and the folder in which a resumed run goes on."""
        config = self.config[self.subcommand]
        config.base = None  # its files have been read
        folder = Path(config.runs) / config.name
        if config.get("ckpt_path") == "last":
            config.ckpt_path = str(newest_checkpoint(folder))
        path = config.get("ckpt_path")
        if path:
            read_checkpoint(Path(path))
        self.version = find_run_version(folder, path) if path and self.subcommand == "fit" else None

    def instantiate_classes(self) -> None:
        """Instantiates trainer, data and model; what they refuse is the user's to mend."""
        try:
            super().instantiate_classes()
        except (ValueError, MisconfigurationException) as error:
            raise ConfigError(" ".join(str(root_cause(error)).split())) from error

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except RuntimeError as error:
            config = self.config[subcommand]
            if "loading state_dict" not in str(error) or not config.get("ckpt_path"):
                raise
            raise other_model(Path(config.ckpt_path), self.config_text(), error) from error

    def config_text(self) -> str:
        """The resolved config, as YAML."""
        parser = self._parser(self.subcommand)
        return parser.dump(self.config[self.subcommand], skip_none=False)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """A trainer that logs to the run folder."""
        config: Namespace = self.config[self.subcommand]
        if config.trainer.logger in (None, True):
            logging_to_runs = self.subcommand == "fit" and not config.trainer.fast_dev_run
            kwargs["logger"] = (
                TensorBoardLogger(config.runs, name=config.name, version=self.version)
                if logging_to_runs
                else False
            )
        trainer = super().instantiate_trainer(**kwargs)
        extra: list[L.Callback] = [callbacks.RandomState()]
        if trainer.logger:
            extra += [callbacks.MetricsTable(), LearningRateMonitor("step")]
        if self.subcommand == "predict":
            extra += [callbacks.PredictionTable(Path(config.runs) / config.name)]
        if config.trainer.enable_progress_bar is not False:
            extra += [callbacks.ProgressBar()]
        return _with_callbacks(trainer, extra)


def _with_callbacks(trainer: L.Trainer, extra: list[L.Callback]) -> L.Trainer:
    """Adds callbacks in front of the checkpointing ones, which Lightning wants last."""
    last = [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)]
    others = [c for c in trainer.callbacks if not isinstance(c, ModelCheckpoint)]
    if any(isinstance(c, callbacks.ProgressBar) for c in extra):
        bars = L.pytorch.callbacks.ProgressBar
        others = [c for c in others if not isinstance(c, bars)]
    trainer.callbacks = others + extra + last
    return trainer


DESCRIPTION = (
    "Train Mixture-of-Experts models: DynMoE, TC-MoE, Default MoE and their baselines. "
    "Start with: python -m app fit --config configs/quickstart.yaml. Beside the subcommands below "
    "there are: " + "; ".join(f"{name}: {what}" for name, (_, what) in OWN_COMMANDS.items()) + "."
)


def main(argv: Sequence[str]) -> int:
    """Runs one command line; returns the exit status (0, or 2 for a mistake of the user's)."""
    _quiet_libraries()
    argv = list(argv)
    try:
        if argv and argv[0] in OWN_COMMANDS:
            return importlib.import_module(OWN_COMMANDS[argv[0]][0]).main(argv[1:])
        App(expand(with_run_config(argv)))
    except (ConfigError, DataError, MisconfigurationException) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _quiet_libraries() -> None:
    """Silences hints that a user of this program can do nothing about."""
    for message in (
        ".*does not have many workers.*",
        ".*LightningCLI.s args parameter is intended.*",
        ".*treespec, LeafSpec.*",
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*The `srun` command is available.*",
        ".*Found .* module.* in eval mode.*",
    ):
        warnings.filterwarnings("ignore", message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch"):
        logging.getLogger(name).addFilter(lambda record: "litlogger" not in record.getMessage())
