"""When one process of a run ends, the others end too, with an error and not a hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

CRASH = """
import os, signal
import lightning as L

class Crash(L.Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer, *args) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 1:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("on purpose")
"""


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(("how", "strategy"), [("raise", "ddp"), ("kill", "fsdp2")])
def test_one_process_ends(tmp_path, how, strategy):
    (tmp_path / "crash.py").write_text(CRASH)
    (tmp_path / "crash.yaml").write_text(
        f"trainer: {{callbacks: [{{class_path: crash.Crash, init_args: {{how: {how}}}}}]}}"
    )
    command = [sys.executable, "-m", "app", "fit", "--config", ROOT / "configs/recipes/digits.yaml"]
    command += ["--config", ROOT / "configs/methods/topany.yaml", "--config", "crash.yaml"]
    command += ["--config", ROOT / f"configs/strategies/{strategy}.yaml", "--trainer.devices=2"]
    command += ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert ("on purpose" in done.stderr) == (how == "raise")
    lost = [line for line in done.stderr.splitlines() if "lost another process" in line]
    if done.returncode == -signal.SIGKILL:  # Lightning watches the others too, every 5 seconds
        assert "Forcefully terminating all other processes" in done.stderr
    else:
        assert done.returncode == 1
        assert len(lost) == 1 and lost[0].startswith("error: process 0"), done.stderr
    assert (tmp_path / "runs" / "topany").is_dir(), "the strategy does not name the run"
