"""Stopping and resuming as a user does it: signals, a full disk, damaged files, other settings."""

import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from app.cli.main import main
from app.errors import ConfigError
from app.runs.checkpoints import is_complete, newest_checkpoint, read_checkpoint
from app.tasks import LanguageModeling
from callbacks.run.checkpoint import WholeFiles
from tests.runs.kill_support import ROOT, differences, left_behind
from tests.runs.test_kill_and_resume import QUIET, TEXT, prepare

SHORT = [*TEXT, "--trainer.max_steps=14"]  # validations after steps 4, 8 and 12
RUN = Path("runs", "quickstart_lm", "version_0")
LAST = RUN / "checkpoints" / "last.ckpt"


def fit(*options: str) -> int:
    try:
        return main(["fit", *SHORT, *QUIET, *options])
    except SystemExit as stop:
        return stop.code


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the program itself is given: sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(one_thread, tmp_path_factory):
    """A run that was not interrupted: its folder, and what it left behind."""
    folder = prepare(tmp_path_factory.mktemp("runs") / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert fit() == 0
    return folder / RUN, left_behind(folder / RUN)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the text in it."""
    monkeypatch.chdir(prepare(tmp_path / "here"))


@pytest.fixture
def finished(here, whole):
    """A working directory in which the run has ended."""
    RUN.parent.mkdir(parents=True)
    subprocess.run(["cp", "-r", str(whole[0]), str(RUN)], check=True)


def at(monkeypatch, step: int, action, method: str = "training_step") -> None:
    """Calls `action` once, in the second micro-batch of a step, or in a validation after it."""
    place = 1 if method == "training_step" else 0
    original, done = getattr(LanguageModeling, method), []

    def patched(self, batch, batch_idx):
        if not done and self.trainer.global_step == step and batch_idx % 3 == place:
            done.append(True)
            action()
        return original(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModeling, method, patched)


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """All that a folder holds, and when it was written."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


# ---------------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("number", "method", "step"),
    [
        (signal.SIGTERM, "training_step", 6),
        (signal.SIGINT, "training_step", 0),
        (signal.SIGTERM, "validation_step", 8),
    ],
)
def test_a_signal_saves_and_tells_how_to_go_on(
    here, whole, monkeypatch, capsys, number, method, step
):
    """It finishes the optimizer step and the validation; what it prints continues to the bit."""
    with monkeypatch.context() as patch:
        at(patch, step, lambda: os.kill(os.getpid(), number), method)
        assert fit("--name=quickstart_lm") == 128 + number
    step += method == "training_step"
    said = capsys.readouterr().err
    assert f"{number.name}: stopped at step {step}; saved {LAST}" in said
    assert read_checkpoint(LAST)["global_step"] == step
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (command,) = [line for line in said.splitlines() if line.startswith("go on with: ")]
    words = shlex.split(command.removeprefix("go on with: "))
    assert words[:4] == ["python", "-m", "app", "fit"] and words.count("--ckpt_path") == 1
    assert main(words[3:]) == 0
    assert not differences(left_behind(RUN), whole[1])


def test_the_second_ctrl_c_stops_at_once(here, monkeypatch, capsys):
    def twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    at(monkeypatch, 6, twice)
    assert fit() == 130
    said = capsys.readouterr().err
    assert "interrupted; saved nothing since the last checkpoint" in said
    assert said.rstrip().endswith("--ckpt_path last")
    assert read_checkpoint(LAST)["global_step"] == 4


def test_slurm_takes_the_job_away(here, monkeypatch, capsys, tmp_path):
    """Its signal saves, and has the job put back into the queue."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    scontrol.chmod(0o755)
    slurm = {"NTASKS": "1", "JOB_ID": "77", "JOB_NAME": "moe", "PROCID": "0", "LOCALID": "0"}
    slurm |= {"NODEID": "0", "NTASKS_PER_NODE": "1", "JOB_NUM_NODES": "1"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    at(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    assert fit("--ckpt_path=auto") == 128 + signal.SIGUSR1  # auto: from the start, if need be
    assert (tmp_path / "asked").read_text() == "requeue 77\n"
    assert read_checkpoint(LAST)["global_step"] == 7
    assert not list(Path().glob("hpc_ckpt*"))
    assert fit("--ckpt_path=auto") == 0  # what the same script does next
    assert read_checkpoint(LAST)["global_step"] == 14


def test_the_program_itself(here, whole):
    """`python -m app`: killed, resumed and terminated, resumed."""
    command = [sys.executable, "-m", "app", "fit", *SHORT, *QUIET]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def sitting(number: int, step: int, *options: str) -> subprocess.CompletedProcess:
        process = subprocess.Popen(
            [*command, *options], env=environment, stderr=subprocess.PIPE, text=True
        )
        while process.poll() is None:
            if is_complete(LAST) and torch.load(LAST, weights_only=True)["global_step"] >= step:
                process.send_signal(number)
                break
            time.sleep(0.01)
        said = process.communicate()[1]
        return subprocess.CompletedProcess(command, process.returncode, "", said)

    killed = sitting(signal.SIGKILL, 4)
    assert killed.returncode == -signal.SIGKILL
    stopped = sitting(signal.SIGTERM, 8, "--ckpt_path=last")
    assert stopped.returncode == 143 or "max_steps=14` reached" in stopped.stderr
    assert fit("--ckpt_path=last") == 0
    assert not differences(left_behind(RUN), whole[1])


# ---------------------------------------------------------------------- a disk that is full


def test_a_checkpoint_that_cannot_be_written(here, monkeypatch, capsys):
    """The one before survives, one line says what to do, and the run goes on from there."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        at(monkeypatch, 6, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1])))
        assert fit("--pictures.enabled=false") == 2  # so that event files stay below the limit
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert f"error: cannot write the checkpoint {LAST}: File too large; the one written" in said
    assert "Traceback" not in said
    assert [path.name for path in LAST.parent.iterdir()] == ["last.ckpt"]
    assert read_checkpoint(LAST)["global_step"] == 4
    assert fit("--ckpt_path=last") == 0


def test_a_full_disk(here, monkeypatch, capsys, tmp_path):
    """The same on a small disk of its own, event files and tables included."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")

    def fill():
        with pytest.raises(OSError, match="No space"), (disk / "other").open("wb") as other:
            while True:
                other.write(bytes(1024))
                other.flush()

    try:
        at(monkeypatch, 6, fill)
        assert fit(f"--runs={disk}") == 2
        said = capsys.readouterr().err
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and "No space left on device" in lines[0], said
        assert "Traceback" not in said and "--ckpt_path last" in said
        last = disk / "quickstart_lm" / "version_0" / "checkpoints" / "last.ckpt"
        assert read_checkpoint(last)["global_step"] == 4
        (disk / "other").unlink()
        assert fit(f"--runs={disk}", "--ckpt_path=last") == 0
        assert read_checkpoint(last)["global_step"] == 14
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ---------------------------------------------------------------------- damaged and foreign files


def test_damage_is_noticed(whole, tmp_path):
    """Cut off anywhere, or any byte changed: it is passed over, or its content is whole."""
    content = (whole[0] / "checkpoints" / "last.ckpt").read_bytes()
    expected = torch.load(whole[0] / "checkpoints" / "last.ckpt", weights_only=True)
    path, noticed = tmp_path / "damaged.ckpt", 0
    for round in range(60):
        place = random.randrange(len(content))
        damaged = content[:place]
        if round % 2:
            damaged += bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :]
        path.write_bytes(damaged)
        try:
            found = read_checkpoint(path)
        except ConfigError as error:
            assert "damaged.ckpt is damaged or is no checkpoint" in str(error)
            noticed += 1
        else:
            assert round % 2 and not differences(found, expected), place
    assert noticed >= 50


def test_last_is_the_newest_whole_one(finished, capsys):
    content = LAST.read_bytes()
    middle = len(content) // 2
    damaged = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for number, bytes_ in enumerate((content, damaged, content[:-9]), 1):
        path = LAST.with_name(f"step={number}.ckpt")
        path.write_bytes(bytes_)
        os.utime(path, (4e9 + number, 4e9 + number))
    assert newest_checkpoint(RUN.parent).name == "step=1.ckpt"
    said = capsys.readouterr().out
    assert "step=2.ckpt: it is not complete" in said and "step=3.ckpt: it is not" in said


def test_no_checkpoint_yet(here, capsys):
    """Killed before the first: said so, and how to start; nothing is written."""
    assert fit("--ckpt_path=last") == 2
    assert "leave --ckpt_path out to start anew" in capsys.readouterr().err
    assert not Path("runs").exists()


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("executed"),))


def test_nothing_in_a_checkpoint_is_executed(finished, capsys):
    torch.save(torch.load(LAST, weights_only=True) | {"more": Evil()}, LAST)
    before = files(RUN)
    assert fit("--ckpt_path=last", "--weights_only=false") == 2
    assert "damaged or is no checkpoint" in capsys.readouterr().err
    assert not Path("executed").exists() and files(RUN) == before


def test_weights_alone_are_refused(finished, capsys):
    held = torch.load(LAST, weights_only=True)
    del held["optimizer_states"]
    torch.save(held, LAST)
    assert fit("--ckpt_path=last") == 2
    assert "holds weights alone" in capsys.readouterr().err


# ---------------------------------------------------------------------- other settings


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--model.network.dim=16", "model.network.dim is 16 here, 32 there"),
        # The same shapes of all weights, and another function:
        ("--model.network.num_heads=2", "model.network.num_heads is 2 here, 4 there"),
        ("--model.network.moe.router.k=1", "model.network.moe.router.k is 1 here, 2 there"),
        ("--model.optimizer=torch.optim.SGD", "model.optimizer is torch.optim.SGD here"),
        ("--trainer.max_epochs=0", "trainer.max_epochs is 0 and"),
    ],
)
def test_another_model_is_refused_before_anything_is_written(finished, capsys, option, says):
    before = files(Path("runs"))
    assert fit("--ckpt_path=last", option) == 2
    assert says in capsys.readouterr().err
    assert files(Path("runs")) == before


def test_the_command_line_wins_over_the_checkpoint(finished, caplog):
    """Learning rate, weight decay, dropout and the length take effect, and are told."""
    options = ["--model.optimizer.lr=1e-3", "--model.optimizer.weight_decay=0.3"]
    options += ["--model.network.dropout=0.0", "--trainer.max_steps=22", "--model.warmup=0.0"]
    with caplog.at_level("INFO"):
        assert fit("--ckpt_path=last", "--model.schedule=constant", *options) == 0
    told = next(text for text in caplog.messages if text.startswith("with other settings"))
    for text in ("lr is 0.001 here, 0.004 there", "max_steps is 22 here, 14 there", "dropout is"):
        assert text in told
    optimizer = read_checkpoint(LAST)["optimizer_states"][0]
    assert [group["lr"] for group in optimizer["param_groups"]] == [1e-3, 1e-3]
    assert [group["weight_decay"] for group in optimizer["param_groups"]] == [0.3, 0.0]
    events = EventAccumulator(str(RUN)).Reload()
    rates = {event.step: event.value for event in events.Scalars("lr/pg1")}
    assert set(rates) == {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21}
    assert all((abs(rate - 1e-3) < 1e-9) == (step > 13) for step, rate in rates.items())
    config = yaml.safe_load((RUN / "config.yaml").read_text())
    assert config["trainer"]["max_steps"] == 22 and config["ckpt_path"] is None


def test_a_longer_schedule_is_followed_from_the_first_step(finished):
    """The learning rate of the next step is that of the new schedule, as in a run that had it."""
    assert fit("--ckpt_path=last", "--trainer.max_steps=16") == 0
    resumed = read_checkpoint(LAST)["lr_schedulers"][0]["_last_lr"]
    assert resumed == pytest.approx([4e-3 * 0.01] * 2)  # the end of the cosine


# --------------------------------------------------------------------- when checkpoints are written


def test_checkpoints_lie_between_optimizer_steps(here, monkeypatch):
    """Always late: one before every step, none within; they stand at what comes next."""
    written = []
    save = WholeFiles.save_checkpoint

    def note(self, checkpoint, path, storage_options=None):
        counters = checkpoint["loops"]["fit_loop"]
        batch = counters["epoch_loop.batch_progress"]["current"]
        assert len(set(batch.values())) == 1, batch  # so many are done, none is begun
        epoch = counters["epoch_progress"]["current"]["processed"]
        written.append((checkpoint["global_step"], epoch, batch["ready"]))
        save(self, checkpoint, path, storage_options)

    monkeypatch.setattr(WholeFiles, "save_checkpoint", note)
    assert fit("--checkpoint.every_minutes=1e-9") == 0
    steps = [step for step, _, _ in written]
    assert steps == list(range(15))
    per_epoch = max(batch for _, _, batch in written) // 3 + 1
    for step, epoch, batch in written:
        assert (epoch, batch) == (step // per_epoch, step % per_epoch * 3), (step, epoch, batch)


def test_a_stop_waits_for_the_end_of_a_step(here, whole, monkeypatch):
    """What ends training within an accumulation (a time limit, say) ends it after that."""
    original, asked = LanguageModeling.on_train_batch_end, []

    def stop(self, outputs, batch, batch_idx):
        if self.trainer.global_step == 5 and batch_idx % 3 == 0 and not asked:
            asked.append(True)
            self.trainer.should_stop = True
        original(self, outputs, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModeling, "on_train_batch_end", stop)
        assert fit() == 0
    assert read_checkpoint(LAST)["global_step"] == 6
    assert fit("--ckpt_path=last") == 0
    expected = whole[1]["checkpoint"]["state_dict"]
    assert not differences(read_checkpoint(LAST)["state_dict"], expected)


def test_a_checkpoint_knows_the_length_of_the_event_files(finished):
    """As long as they are but for the pictures that the end of training adds."""
    sizes = read_checkpoint(LAST)["event_files"]
    files = {path.name: path for path in RUN.glob("events*")}
    assert sizes and sizes.keys() == files.keys()
    for name, size in sizes.items():
        content = files[name].read_bytes()
        assert len(content) >= size
        files[name].write_bytes(content[size:])
        events = list(EventFileLoader(str(files[name])).Load())
        assert all(v.tag.startswith("pictures/") for each in events for v in each.summary.value)
