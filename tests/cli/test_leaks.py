"""Fifty command lines in one process leave no file, thread or process behind."""

import gc
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from app.cli.main import main

ROOT = Path(__file__).parents[2]
FD = Path("/proc/self/fd")


def open_files() -> Counter:
    """What the file descriptors of this process point to."""
    found: Counter = Counter()
    for each in FD.iterdir():
        try:
            found[os.readlink(each)] += 1
        except FileNotFoundError:  # that of this very listing
            continue
    return found


def children() -> set[int]:
    task = Path("/proc/self/task")
    return {int(p) for each in task.iterdir() for p in (each / "children").read_text().split()}


@pytest.mark.skipif(not FD.is_dir(), reason="counts open files in /proc")
@pytest.mark.slow
def test_fifty_runs_leave_nothing_open(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    quick = [
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        "--trainer.limit_train_batches=1",
        "--trainer.limit_val_batches=1",
        "--trainer.max_epochs=1",
        f"--runs={tmp_path}",
    ]
    fit = ["fit", "--config=configs/quickstart.yaml", *quick]
    text = [f"--data.cache_dir={tmp_path / 'cache'}", "--model.sample_tokens=2"]
    text = ["fit", "--config=configs/quickstart_lm.yaml", *quick, *text]
    text += ["--trainer.val_check_interval=null", "--trainer.check_val_every_n_epoch=1"]
    assert main(fit) == main(text) == 0
    checkpoint, text_checkpoint = (
        str(next((tmp_path / name).rglob("last.ckpt"))) for name in ("quickstart", "quickstart_lm")
    )
    commands = [
        fit,
        [*fit, "--data.val_fraction=0.0001"],  # a mistake, found when the run folder exists
        ["validate", f"--ckpt_path={checkpoint}", *quick[:3], "--trainer.limit_val_batches=1"],
        ["generate", f"--ckpt_path={text_checkpoint}", "--max_tokens=2", "--device=cpu"],
        ["export", f"--ckpt_path={checkpoint}", f"--out={tmp_path / 'out'}", "--overwrite"],
    ]
    statuses = [0, 2, 0, 0, 0]

    def round_of_runs() -> None:
        assert [main(command) for command in commands] == statuses

    round_of_runs()  # what libraries open once and keep
    gc.collect()
    before, threads, processes = open_files(), threading.active_count(), children()
    for _ in range(9):
        round_of_runs()
    gc.collect()
    assert open_files() - before == Counter()
    assert threading.active_count() <= threads
    assert children() <= processes
