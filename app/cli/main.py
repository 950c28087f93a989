"""The command line: Lightning's subcommands over configs, and our own beside them."""

from __future__ import annotations

import importlib
import logging
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch.distributed as dist
from jsonargparse import Namespace
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import callbacks
import data
from callbacks.common import disk_error
from callbacks.run.event_files import rewind
from data.errors import DataError

from .. import models, moe, tasks
from ..errors import ConfigError, DivergedError
from ..runs.checkpoints import newest_checkpoint, read_checkpoint
from ..runs.folder import (
    RunConfig,
    check_same_model,
    differing_settings,
    discarding_unstarted,
    find_run_version,
    of_the_run,
    run_settings,
)
from .config_files import expand, with_run_config
from .messages import check_settings, explain, refusal, reword, root_cause

# Importing these packages lets a config name their classes without the full path.
PLUGINS = (models, moe, tasks, callbacks, data)

OWN_COMMANDS: dict[str, tuple[str, str]] = {
    "analyze": ("analyze.command", "show what the experts of a checkpoint do"),
    "generate": ("generate", "continue a text with a trained language model"),
    "router_gradients": (
        "analyze.router_gradients",
        "compare router gradients with the dense mixture",
    ),
    "weights": ("weights", "save the weights of a timm model to a file"),
    "suite": ("suite.command", "run a list of configs and seeds, resumable and in shards"),
    "benchmark": ("benchmark.command", "time the MoE block, the training step or the data"),
    "report": ("report.command", "tables and pictures of runs, from their folders"),
    "export": ("export", "write a trained network to a folder that needs no Lightning"),
    "evaluate": ("evaluate", "run tasks of the lm-evaluation-harness on a checkpoint"),
}
"""Our own subcommands: name -> (module of app.commands with `main(argv) -> int`, what it does)."""


SUBCOMMANDS = ("fit", "validate", "test", "predict", *OWN_COMMANDS)


class Parser(LightningArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        options = [option for action in parser._actions for option in action.option_strings]
        sys.stderr.write(f"error: {explain(message, options, SUBCOMMANDS)}\n")
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
        parser.add_lightning_class_args(callbacks.RoutingPictures, "pictures")
        parser.add_lightning_class_args(callbacks.NumericalGuards, "guards")

    def _parse_ckpt_path(self) -> None:
        # Lightning would look for hyperparameters in the checkpoint here; ours holds the config.
        pass

    def before_instantiate_classes(self) -> None:
        """Resolves `--ckpt_path last` and the folder in which a resumed run goes on."""
        config = self.config[self.subcommand]
        config.base = None  # its files have been read
        check_settings(config)
        folder = Path(config.runs) / config.name
        asked = config.get("ckpt_path")
        if asked in ("last", "auto"):
            found = newest_checkpoint(folder)
            if found is None and (asked == "last" or self.subcommand != "fit"):
                raise ConfigError(
                    f"ckpt_path: {asked}: there is no complete checkpoint below {folder}; leave "
                    "--ckpt_path out to start anew"
                )
            config.ckpt_path = found and str(found)
        path = config.get("ckpt_path")
        self.checkpoint = read_checkpoint(Path(path)) if path else None
        self.version = find_run_version(folder, path) if path and self.subcommand == "fit" else None

    def instantiate_classes(self) -> None:
        """Instantiates trainer, data and model; what they refuse is the user's to mend."""
        try:
            super().instantiate_classes()
        except (ValueError, TypeError, RuntimeError, MisconfigurationException) as error:
            message = " ".join(str(root_cause(error)).split())
            raise ConfigError(reword(message) or message) from error

    def _run_subcommand(self, subcommand: str) -> None:
        if self.checkpoint is not None:
            self._check_checkpoint(Path(self.config[subcommand].ckpt_path), subcommand == "fit")
            self.checkpoint = None  # Lightning reads it again, where the strategy wants it
        elif subcommand != "fit":
            rank_zero_info(
                f"note: {subcommand} without --ckpt_path uses the weights that training would "
                "start from; --ckpt_path last takes those of the newest run"
            )
        try:
            with (
                _signal_handlers_kept(),
                discarding_unstarted(self.trainer) if self.new_folder else nullcontext(),
            ):
                super()._run_subcommand(subcommand)
        except SystemExit as error:  # Lightning's answer to the second Ctrl-C
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            raise

    def _check_checkpoint(self, path: Path, fit: bool) -> None:
        """Refuses a checkpoint of another model; says what a resumed run does otherwise."""
        checkpoint, trainer = self.checkpoint, self.trainer
        differing = differing_settings(path, checkpoint, self.config_text())
        check_same_model(path, checkpoint, self.model, differing, fit)
        if not fit:
            return
        if not {"loops", "optimizer_states", "callbacks"} <= checkpoint.keys():
            raise ConfigError(
                f"ckpt_path: {path} holds weights alone: training can't go on from it"
            )
        epoch, limit = checkpoint["epoch"], trainer.max_epochs
        if limit is not None and 0 <= limit < epoch:
            raise ConfigError(
                f"trainer.max_epochs is {limit} and {path} is of epoch {epoch}: set a larger one"
            )
        rank_zero_info(f"going on from {path}, step {checkpoint['global_step']}")
        told = [text for key, text in differing.items() if key not in ("name", "runs")]
        if told:
            rank_zero_info(f"with other settings than before: {'; '.join(told)}")
        goes_on = self.version is not None and isinstance(trainer.logger, TensorBoardLogger)
        if goes_on and trainer.is_global_zero and "event_files" in checkpoint:
            rewind(Path(trainer.logger.log_dir), checkpoint["event_files"])

    def config_text(self) -> str:
        """The resolved config of the run, as YAML."""
        config = of_the_run(self.config[self.subcommand])
        return self._parser(self.subcommand).dump(config, skip_none=False)

    def _purge(self) -> dict[str, int]:
        """Has a TensorBoard that is open forget the steps that a resumed run takes again."""
        if self.version is None:
            return {}
        return {"purge_step": self.checkpoint.get("global_step", 0) + 1}

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """A trainer that logs to the run folder."""
        config: Namespace = self.config[self.subcommand]
        self.new_folder = self.version is None and config.trainer.logger in (None, True)
        if config.trainer.logger in (None, True):
            logging_to_runs = self.subcommand == "fit" and not config.trainer.fast_dev_run
            kwargs["logger"] = (
                TensorBoardLogger(
                    config.runs,
                    config.name,
                    self.version,
                    default_hp_metric=False,
                    **self._purge(),
                )
                if logging_to_runs
                else False
            )
        trainer = super().instantiate_trainer(**kwargs)
        extra: list[L.Callback] = [callbacks.RandomState(), callbacks.EventFiles()]
        if trainer.logger:
            text = self.config_text()
            extra += [
                callbacks.MetricsTable(),
                LearningRateMonitor("step"),
                callbacks.Dashboard(text, run_settings(text)),
            ]
        if self.subcommand == "predict":
            extra += [callbacks.PredictionTable(Path(config.runs) / config.name)]
        if config.trainer.enable_progress_bar is not False:
            extra += [callbacks.ProgressBar()]
        return _with_callbacks(trainer, extra)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Puts the handlers of stop signals back, also after what Lightning doesn't tidy up after."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def _with_callbacks(trainer: L.Trainer, extra: list[L.Callback]) -> L.Trainer:
    """Adds callbacks behind our checkpointing, which wants to be first, and before Lightning's."""
    first = [c for c in trainer.callbacks if isinstance(c, callbacks.Checkpoint)]
    others = [c for c in trainer.callbacks if not isinstance(c, ModelCheckpoint)]
    last = [c for c in trainer.callbacks if c not in first and c not in others]
    if any(isinstance(c, callbacks.ProgressBar) for c in extra):
        bars = L.pytorch.callbacks.ProgressBar
        others = [c for c in others if not isinstance(c, bars)]
    trainer.callbacks = first + others + extra + last
    return trainer


DESCRIPTION = (
    "Train Mixture-of-Experts models: DynMoE, TC-MoE, Default MoE and their baselines. "
    "Start with: python -m app fit --config configs/quickstart.yaml. Beside the subcommands below "
    "there are: " + "; ".join(f"{name}: {what}" for name, (_, what) in OWN_COMMANDS.items()) + "."
)


def main(argv: Sequence[str]) -> int:
    """Runs one command line; returns the exit status.

    0; 2 for what the user can mend, told in one line; 1 where training diverged or another process
    of the run ended; 128 + n after signal n, as shells say it.
    """
    quiet_libraries()
    argv = list(argv)
    try:
        if argv and argv[0] in OWN_COMMANDS:
            return importlib.import_module(f"app.commands.{OWN_COMMANDS[argv[0]][0]}").main(
                argv[1:]
            )
        App(expand(with_run_config(argv)))
    except (ConfigError, DataError, MisconfigurationException) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except callbacks.Stopped as stopped:
        name = signal.Signals(stopped.signal).name
        _say_how_to_go_on(argv, f"{name}: stopped at step {stopped.step}", stopped.checkpoint)
        # A launcher kills all processes as soon as one of the others has failed.
        return stopped.code if rank_zero_only.rank == 0 else 0
    except KeyboardInterrupt:
        _say_how_to_go_on(argv, "interrupted", "")
        return 128 + signal.SIGINT
    except DivergedError as error:
        if rank_zero_only.rank:  # all processes stop with the same words; see above
            return 0
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if isinstance(error, BrokenPipeError) and argv[0] in OWN_COMMANDS:
            raise  # whoever read the tables has gone; in a training it is another pipe that broke
        if _lost_process(error):
            print(
                f"error: process {rank_zero_only.rank} lost another process of this run, which has "
                f"ended; the cause is in that one's messages ({str(error).splitlines()[0]})",
                file=sys.stderr,
            )
            return 1
        refused, line = disk_error(error), refusal(error)
        if refused is not None:
            where = refused.filename or "a file of the run"
            then = "; mend that, then go on with --ckpt_path last" if argv[:1] == ["fit"] else ""
            line = f"{where}: {refused.strerror}{then}"
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2
    return 0


@rank_zero_only
def _say_how_to_go_on(argv: Sequence[str], what: str, checkpoint: str) -> None:
    fit = argv[:1] == ["fit"]
    if fit:
        saved = checkpoint or "nothing since the last checkpoint"
        what = f"{what}; saved {saved}"
    print(what, file=sys.stderr)
    if fit:
        words = ["python", "-m", "app", *_without_checkpoint(argv)]
        command = shlex.join([*words, "--ckpt_path", checkpoint or "last"])
        print(f"go on with: {command}", file=sys.stderr)


def _without_checkpoint(argv: Sequence[str]) -> list[str]:
    kept: list[str] = []
    for argument in argv:
        if kept and kept[-1] == "--ckpt_path":
            kept.pop()
        elif not argument.startswith("--ckpt_path="):
            kept.append(argument)
    return kept


def _lost_process(error: Exception) -> bool:
    """Whether a collective failed because another process is gone."""
    text = str(error)
    broken = (
        "closed by peer",
        "reset by peer",
        "Broken pipe",
        "Timed out",
        "remote process exited",
    )
    known = isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text
    return known and any(each in text for each in broken)


def quiet_libraries() -> None:
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
