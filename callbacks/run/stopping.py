"""Stopping by a signal: SIGTERM, Ctrl-C, and what SLURM sends before it takes a job away."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.plugins.environments import SLURMEnvironment


class Stopped(SystemExit):
    """Training was stopped by a signal, with all of it in a checkpoint.

    Attributes:
        signal: number of the signal.
        step: optimizer steps done.
        checkpoint: path of what was saved, "" if nothing was.
        code: exit status: 128 + signal, the shells' convention.
    """

    def __init__(self, number: int, step: int, checkpoint: str) -> None:
        super().__init__(128 + number)
        self.signal, self.step, self.checkpoint = number, step, checkpoint


class StopSignals:
    """Notes signals, for training to end at a place of its own choice.

    Attributes:
        received: number of the last signal, 0 for none.
    """

    def __init__(self) -> None:
        self.received = 0

    def listen(self, trainer: L.Trainer) -> None:
        """Takes over from Lightning's handlers, which it restores when training is over."""
        if trainer.received_sigterm:  # since it set up its own
            self.received = signal.SIGTERM
            trainer._signal_connector.received_sigterm = False
        numbers = [signal.SIGTERM, signal.SIGINT]
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.requeue_signal is not None:
            numbers.append(environment.requeue_signal)
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == number:
            raise KeyboardInterrupt  # asked twice: at once, without saving
        self.received = number
        again = "; Ctrl-C again to stop at once" if number == signal.SIGINT else ""
        name = signal.Signals(number).name
        # Not print: its buffer may be in use where the signal came in.
        os.write(2, f"\n{name}: finishing the step, then saving{again}\n".encode())


def requeue(trainer: Any, number: int) -> None:
    """Has SLURM start the job again, if `number` is the signal that asks for it."""
    environment = trainer._accelerator_connector.cluster_environment
    if (
        isinstance(environment, SLURMEnvironment)
        and environment.auto_requeue
        and number == environment.requeue_signal
        and trainer.is_global_zero
    ):
        job = os.environ.get("SLURM_JOB_ID", "")
        if "SLURM_ARRAY_JOB_ID" in os.environ:
            job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        subprocess.run(["scontrol", "requeue", job], check=False)
