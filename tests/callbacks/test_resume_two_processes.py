"""Two processes with random draws of their own: one is asked to stop, both do, and both go on."""

import os
import signal

import pytest
import torch

from callbacks import Checkpoint, RandomState, Stopped
from tests.callbacks.callback_support import (
    DDP,
    At,
    digits,
    make_trainer,
    on_two_processes,
    same,
    vision_task,
)


def fit(folder, seed, *more, ckpt_path=None):
    rank = int(os.environ["LOCAL_RANK"])
    task = vision_task(drop=0.3)
    saving = Checkpoint(dirpath=folder, save_top_k=0, save_last=True, enable_version_counter=False)
    trainer = make_trainer(folder, saving, RandomState(), *more, limit_train_batches=6, **DDP)
    torch.manual_seed(seed + rank)  # dropout and stochastic depth differ from rank to rank
    trainer.fit(task, digits(), ckpt_path=ckpt_path)
    return dict(task.state_dict())


def stopped_and_resumed(folder):
    rank = int(os.environ["LOCAL_RANK"])
    whole = fit(folder / "whole", 7)
    asked = At({3: lambda task: os.kill(os.getpid(), signal.SIGTERM)} if rank == 1 else {})
    with pytest.raises(Stopped) as stopped:
        fit(folder / "stopped", 7, asked)
    saved = folder / "stopped" / "last.ckpt"
    resumed = fit(folder / "resumed", 99, ckpt_path=saved)
    return stopped.value.step, stopped.value.code, same(resumed, whole)


def test_every_process_gets_its_own_random_state_back(tmp_path, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)  # Lightning would seed all processes alike
    ranks = on_two_processes(stopped_and_resumed, tmp_path)
    assert ranks[0] == ranks[1] and ranks[0][1:] == (143, True)
    assert ranks[0][0] in (3, 4)  # heard before or after the step that had begun
    saved = torch.load(tmp_path / "stopped" / "last.ckpt", weights_only=True)["callbacks"]
    states = saved["RandomState"]["ranks"]
    assert len(states) == 2 and not torch.equal(states[0]["torch"], states[1]["torch"])
