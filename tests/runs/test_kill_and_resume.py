"""A run killed at any moment and resumed ends like the run that was not, bit for bit.

`MOE_KILLS=200 python -m pytest tests/runs/test_kill_and_resume.py` kills more often;
`MOE_KILL_SEED=N` repeats a drawing of kill points.
"""

import itertools
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from tests.runs.kill_support import PLACES, ROOT, Server, differences, left_behind

KILLS = int(os.environ.get("MOE_KILLS", "20"))  # of each of the two runs

QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]
DIGITS = [  # the quickstart, shorter: windows, births, an evaluation and 5 checkpoints an epoch
    "--config",
    str(ROOT / "configs" / "quickstart.yaml"),
    "--trainer.max_epochs=2",
    "--checkpoint.every_n_train_steps=5",
]
TEXT = [  # 32 steps of 3 micro-batches, the last of an epoch of 31 shorter
    "--config",
    str(ROOT / "configs" / "quickstart_lm.yaml"),
    "--data.files=book.txt",
    "--data.cache_dir=cache",
    "--data.block_size=16",
    "--data.batch_size=8",
    "--model.network.dim=32",
    "--model.network.depth=2",
    "--model.network.moe_blocks=[1]",
    "--model.network.dropout=0.1",
    "--model.balance_over=step",
    "--model.sample_tokens=0",
    "--trainer.max_steps=32",
    "--trainer.val_check_interval=12",
    "--trainer.accumulate_grad_batches=3",
    "--trainer.log_every_n_steps=2",
    "--monitor.every_n_steps=4",
    "--checkpoint.every_n_train_steps=4",
]
BOOK = "".join(f"{i} bottles of beer on the wall, {i * i % 97} of them green. " for i in range(80))

DIGITS_PLACES = ("in a recording window", "after a birth")
TEXT_PLACES = ("within an accumulation",)


@pytest.fixture(scope="module")
def server():
    with Server() as server:
        yield server


def prepare(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "book.txt").write_text(BOOK)
    return folder


def kill_plans(draw: random.Random, places: list[str], seconds: float):
    """Endless: by turns a place where it could hurt, and a time drawn uniformly."""
    for round in itertools.count():
        for place in draw.sample(places, len(places)):
            yield {"place": place, "count": draw.randrange(1 + 2 * (round + 1))}
            yield {"after": draw.uniform(0, seconds / 3)}


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "options"), [("quickstart", DIGITS), ("quickstart_lm", TEXT)])
def test_killed_at_any_moment(server, tmp_path, name, options):
    """Killed and resumed over and over until it ends, and again from the start."""
    argv = ["fit", *options, *QUIET]
    ended = server.run(prepare(tmp_path / "whole"), argv)
    assert ended["status"] == 0, (tmp_path / "whole" / "out.txt").read_text()
    expected = left_behind(tmp_path / "whole" / "runs" / name / "version_0")
    others = DIGITS_PLACES if name == "quickstart_lm" else TEXT_PLACES
    places = [place for place in PLACES if place not in others]

    seed = int(os.environ.get("MOE_KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"MOE_KILL_SEED={seed}")  # shown if the test fails
    plans = kill_plans(random.Random(seed), places, ended["seconds"])
    killed, chains = 0, itertools.count()
    while killed < KILLS:
        folder, status = prepare(tmp_path / f"chain_{next(chains)}"), None
        while status != 0:
            plan = next(plans) if killed < KILLS else {}
            saved = any(folder.glob("runs/*/*/checkpoints/last.ckpt"))
            if not saved:
                shutil.rmtree(folder / "runs", ignore_errors=True)
            status = server.run(folder, argv + saved * ["--ckpt_path=last"], **plan)["status"]
            print(status, plan, "resumed" if saved else "from the start")
            assert status in (0, -signal.SIGKILL), (folder / "out.txt").read_text()
            killed += status != 0
            files = {path.name for path in folder.glob("runs/*/*/checkpoints/*")}
            assert files <= {"last.ckpt", "last.ckpt.tmp"}
        assert not differences(left_behind(folder / "runs" / name / "version_0"), expected)
