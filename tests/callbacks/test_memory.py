"""Memory, tensors and files stay flat while experts are born and die."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path

import lightning as L
import torch

from callbacks import (
    AdaptiveExperts,
    Checkpoint,
    NumericalGuards,
    RoutingMonitor,
)
from callbacks.routing import monitor as routing_monitor
from callbacks.routing.history import RoutingHistory
from tests.callbacks.callback_support import Endless, Toy, make_trainer, tokens, toy_block


class Watch(L.Callback):
    """Memory of the process in MiB, tensors that Python knows and open files, by step."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.seen = steps, {}

    def on_train_batch_end(self, trainer, *args) -> None:
        if trainer.global_step in self.steps:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            tensors = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
            memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            self.seen[trainer.global_step] = memory, tensors, len(os.listdir("/proc/self/fd"))


def watched_run(folder: Path, start: int, end: int) -> tuple[Watch, AdaptiveExperts]:
    """Windows of 4 steps show tokens of one kind each: two of three times an expert comes for them
    and one that the tokens before needed goes."""
    torch.manual_seed(0)
    adaptive, watch = AdaptiveExperts("last_removed", window_steps=(0, 4, 4)), Watch(start, end)
    task = Toy(toy_block(num_experts=2, slots=5), optimizer=partial(torch.optim.AdamW, lr=1e-5))
    batches = [tokens(text) for text in ("00000000", "11111111", "33333333") for _ in range(4)]
    trainer = make_trainer(
        folder, adaptive, RoutingMonitor(4), NumericalGuards(), watch,
        Checkpoint(dirpath=folder, save_top_k=0, save_last=True, every_n_train_steps=40),
        max_epochs=-1, max_steps=end,
    )  # fmt: skip
    trainer.fit(task, torch.utils.data.DataLoader(Endless(batches), batch_size=None))
    return watch, adaptive


def test_flat(tmp_path, monkeypatch):
    monkeypatch.setattr(routing_monitor, "RoutingHistory", partial(RoutingHistory, limit=4))
    watch, adaptive = watched_run(tmp_path, 80, 320)
    before, after = watch.seen.values()
    for kind in ("birth", "death"):
        assert sum(event["event"] == kind for event in adaptive.events) > 40
    assert after[1] <= before[1] + 8, "tensors; 2 for each of the 2 to 4 intervals of the history"
    assert after[2] == before[2], "open files"
    assert after[0] - before[0] < 8.0
