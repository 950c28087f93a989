"""`python -m app suite`: what runs, in which order, and what becomes of it."""

import csv
import fcntl
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from app.cli.main import main
from app.commands.suite import command as suite
from app.commands.suite import execution
from app.commands.suite import file as suite_file
from app.commands.suite.file import read_suite
from app.errors import ConfigError
from app.runs.progress import End, checkpointed, evaluated, read_rows

CONFIGS = Path(__file__).parents[2] / "configs"
DIGITS, TOPK2 = CONFIGS / "recipes/digits.yaml", CONFIGS / "methods/topk2.yaml"


@pytest.fixture
def unchecked(monkeypatch):
    """Leaves the configs unparsed: for tests of the file alone."""
    check = lambda self, arguments, where: (End(2, None), {})  # noqa: E731
    monkeypatch.setattr(suite_file._Check, "__call__", check)


def write(path: Path, **content) -> Path:
    content = {"name": "s", "configs": [str(DIGITS)], "entries": [{"name": "a"}]} | content
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


# ---- the file


def test_runs_are_entries_by_seeds_first_seeds_first(tmp_path, unchecked):
    entries = [
        {"name": "a", "configs": [str(TOPK2)], "set": {"x.y": 3, "z": [1]}},
        {"name": "b", "seeds": [7]},
    ]
    file = write(tmp_path / "s.yaml", seeds=[0, 1], set={"x.y": 1, "flag": True}, entries=entries)
    runs = read_suite(file, Path("R"), overrides=["--late=1"])
    assert [run.name for run in runs] == ["s/a-seed0", "s/b-seed7", "s/a-seed1"]
    assert runs[0].folder == Path("R/s/a-seed0")
    assert list(runs[0].arguments) == [
        *("--config", str(DIGITS), "--config", str(TOPK2)),
        *("--x.y=1", "--flag=true", "--x.y=3", "--z=[1]", "--late=1"),
        *("--seed_everything", "0", "--runs", "R", "--name", "s/a-seed0"),
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"entrys": []}, "unknown key entrys (did you mean entries?)"),
        ({"entries": []}, "entries must be a list"),
        ({"entries": [{"name": "a", "sed": {}}]}, "entry 1: unknown key sed (did you mean seeds?)"),
        ({"entries": [{"name": "a/b"}]}, "entry 1: name must be a word"),
        ({"entries": [{"name": "a"}, {"name": "a"}]}, "entry a: two entries have this name"),
        ({"entries": [{"name": "a", "seeds": [0, 0]}]}, "entry a: seeds must be a list of diff"),
        ({"seeds": 3}, "seeds must be a list"),
        ({"configs": ["none.yaml"]}, "configs: there is no file none.yaml"),
        ({"configs": []}, "entry a: configs: give at least one config file"),
        ({"set": ["x=1"]}, "set must map settings to values"),
        ({"name": None}, "name must be a word"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path, unchecked, content, says):
    file = write(tmp_path / "s.yaml", **content)
    with pytest.raises(ConfigError) as caught:
        read_suite(file, tmp_path)
    assert says in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_that_is_missing_or_no_yaml(tmp_path, capsys):
    assert main(["suite", str(tmp_path / "none.yaml")]) == 2
    (tmp_path / "bad.yaml").write_text("name: s\nentries: [")
    assert main(["suite", str(tmp_path / "bad.yaml")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "there is no suite file" in first
    assert "bad.yaml line 2" in second or "bad.yaml line 3" in second


def test_a_broken_override_of_a_later_entry_stops_before_the_first(tmp_path, capsys):
    for setting, says in (
        (
            {"model.network.dpth": 3},
            "entry b: unknown key model.network.dpth (did you mean depth?)",
        ),
        ({"model.network.moe.router.k": 9}, "entry b:"),
        ({"model.network.pretrained": "none.pt"}, "entry b: model.network.pretrained: there is"),
    ):
        entries = [{"name": "a"}, {"name": "b", "configs": [str(TOPK2)], "set": setting}]
        file = write(tmp_path / "s.yaml", entries=entries)
        assert main(["suite", str(file), "--runs", str(tmp_path / "runs")]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("file", sorted((CONFIGS / "suites").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_suite_passes_a_dry_run(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weights = Path("weights/vit_small_patch16_224.safetensors")
    weights.parent.mkdir()
    weights.touch()  # it must exist; it is not read
    assert main(["suite", str(file), "--dry-run", "--set", "trainer.accelerator=cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    entries = yaml.safe_load(file.read_text())["entries"]
    runs = [line for line in lines if not line.startswith(" ")]
    assert len({line.partition("-seed")[0] for line in runs}) == len(entries)
    assert all(": new; " in line for line in runs)
    assert list(tmp_path.iterdir()) == [tmp_path / "weights"]


def test_the_two_cifar_tables_have_the_same_rows():
    full, micro = (
        yaml.safe_load((CONFIGS / f"suites/{name}.yaml").read_text())["entries"]
        for name in ("cifar10_table", "cifar10_table_micro")
    )
    rows = [
        sorted((e["name"], str(e["configs"]), str(e.get("set"))) for e in entries)
        for entries in (full, micro)
    ]
    assert rows[0] == rows[1]
    assert {e["name"]: e["seeds"] for e in micro if "seeds" in e} == {
        "topk2": [0, 1, 2],
        "dynmoe_weighted_average": [0, 1, 2],
    }


# ---- where a run stands


def test_the_end_of_a_run():
    assert End.of({"max_epochs": 3, "max_steps": -1}) == End(3, None)
    assert End.of({"max_epochs": None, "max_steps": -1}) == End(1000, None)
    assert End.of({"max_epochs": -1, "max_steps": 50}) == End(None, 50)
    end = End(4, 100)
    assert end.reached(4, 10) and end.reached(1, 100) and not end.reached(3, 99)
    assert end.share(1, 50) == 0.5


def test_evaluations_within_an_epoch_do_not_make_it_whole():
    rows = [{"epoch": str(e), "step": str(s)} for e, s in ((0, 5), (0, 10), (1, 15))]
    assert evaluated(rows) == (1, 15)
    assert evaluated([*rows, {"epoch": "1", "step": "20"}]) == (2, 20)
    assert evaluated([]) == (0, 0)


def test_damaged_rows_are_passed_over(tmp_path):
    (tmp_path / "m.csv").write_text("epoch,step\n0,5\n1\n2,15\n")
    rows, wrong = read_rows(tmp_path / "m.csv")
    assert [row["step"] for row in rows] == ["5", "15"]
    assert "1 of 3 rows" in wrong
    assert read_rows(tmp_path / "none.csv") == ([], "is missing")


# ---- running


def fake_runs(tmp_path, scripts):
    """Runs whose `fit` is a small script; `done` in a folder stands for a finished run."""
    runs = []
    for name, script in scripts.items():
        folder = tmp_path / "s" / name
        runs.append(suite_file.Run(f"s/{name}", folder, (script,), End(2, None), {}))
    return runs


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(suite, "SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setattr(
        execution,
        "command",
        lambda run, now: [sys.executable, "-c", run.arguments[0], str(run.folder)],
    )

    def state(run):
        return execution.State(
            *(("finished", 1.0) if (run.folder / "done").exists() else ("new", 0.0))
        )

    for module in (suite, execution):
        monkeypatch.setattr(module, "state", state)


def run_here(runs, jobs=1) -> int:
    return suite.run_all(runs, lambda stops: execution.Threads(jobs, stops))


DONE = "import sys, pathlib; pathlib.Path(sys.argv[1], 'done').touch()"
ONCE = "import sys, pathlib; pathlib.Path(sys.argv[1], 'done').touch(exist_ok=False)"


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_failed_run_is_told_and_the_suite_goes_on(tmp_path, scripted, capsys, jobs):
    fails = "raise ValueError('no luck')"
    runs = fake_runs(tmp_path, {"a": DONE, "b": fails, "c": "import os; os.kill(os.getpid(), 9)",
                                "d": DONE, "e": "pass"})  # fmt: skip
    assert run_here(runs, jobs) == 1
    said = capsys.readouterr()
    (line,) = [line for line in said.out.splitlines() if line.startswith("5 runs: ")]
    assert {"2 finished", "1 ended early", "2 FAILED"} == set(line[8:].split(", "))
    first, second = sorted(said.err.splitlines())
    log = tmp_path / "s" / "b" / "fit.log"
    assert re.fullmatch(rf"error: s/b: after 0:00:0\d: ValueError: no luck; log: {log}", first)
    assert "s/c: after" in second and "killed by SIGKILL" in second
    assert "Traceback" in log.read_text()


def test_what_is_finished_is_not_run_again(tmp_path, scripted, capsys):
    runs = fake_runs(tmp_path, {"a": ONCE, "b": ONCE})
    assert run_here(runs[:1]) == 0
    assert run_here(runs) == 0
    assert "2 runs: 1 finished, 1 finished before" in capsys.readouterr().out


def test_a_run_that_another_suite_holds_is_left_alone(tmp_path, scripted, capsys):
    runs = fake_runs(tmp_path, {"a": DONE, "b": DONE})
    runs[0].folder.mkdir(parents=True)
    with (runs[0].folder / execution.LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_here(runs) == 0
    assert not (runs[0].folder / "done").exists()
    assert (runs[1].folder / "done").exists()
    assert "a: left alone" in capsys.readouterr().out


def test_sigterm_stops_the_run_and_says_how_to_go_on(tmp_path, scripted, capsys):
    waits = (
        "import os, sys, pathlib, time; "
        "pathlib.Path(sys.argv[1], 'on').write_text(str(os.getpid())); time.sleep(60)"
    )
    runs = fake_runs(tmp_path, {"a": waits, "b": DONE})
    stop_when(lambda: (runs[0].folder / "on").exists() and (runs[0].folder / "on").read_text())
    assert run_here(runs) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int((runs[0].folder / "on").read_text()), 0)
    assert "give the same command again" in capsys.readouterr().out
    assert not (runs[1].folder / "done").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def stop_when(happened) -> None:
    """Sends SIGTERM to this process, as soon as something has happened."""

    def wait() -> None:
        end = time.monotonic() + 120
        while not happened() and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def test_shards_share_the_runs_out(tmp_path, unchecked, capsys):
    file = write(tmp_path / "s.yaml", seeds=list(range(5)))
    names = []
    for shard in ("0/2", "1/2"):
        assert main(["suite", str(file), "--dry-run", "--shard", shard]) == 0
        names += [x.partition(":")[0] for x in capsys.readouterr().out.splitlines() if x[0] != " "]
    assert sorted(names) == [f"s/a-seed{seed}" for seed in range(5)]
    for wrong, says in (("2/2", "counted from 0, here 0/2 to 1/2"), ("1", "must be i/n")):
        with pytest.raises(SystemExit) as stop:
            main(["suite", str(file), "--shard", wrong])
        assert stop.value.code == 2
        assert says in capsys.readouterr().err


def test_killed_and_resumed_with_a_run_of_plain_fit_taken_over(tmp_path, capsys):
    """Two real runs: one made by `fit` itself, one stopped after its first epoch."""
    small = {
        "trainer.max_epochs": 1000,
        "trainer.limit_train_batches": 4,
        "trainer.limit_val_batches": 1,
        "trainer.accelerator": "cpu",
        "trainer.enable_model_summary": False,
        "model.network.dim": 16,
    }
    file = write(tmp_path / "s.yaml", set=small, seeds=[0, 1], entries=[
        {"name": "a", "configs": [str(TOPK2)]}
    ])  # fmt: skip
    runs = tmp_path / "runs"
    by_hand = [
        *("fit", "--config", str(DIGITS), "--config", str(TOPK2), "--seed_everything", "1"),
        *(f"--{key}={str(value).lower()}" for key, value in small.items()),
        *("--runs", str(runs), "--name", "s/a-seed1", "--trainer.enable_progress_bar=false"),
        "--trainer.max_epochs=60",
    ]
    assert main(by_hand) == 0
    last = runs / "s/a-seed0/version_0/checkpoints/last.ckpt"
    stop_when(last.is_file)
    assert main(["suite", str(file), "--runs", str(runs)]) == 130
    epochs, _ = checkpointed(runs / "s/a-seed0")
    assert 1 <= epochs < 60
    capsys.readouterr()
    short = ["--set", f"trainer.max_epochs={epochs + 2}"]  # enough has been seen
    assert main(["suite", str(file), "--runs", str(runs), "--jobs", "2", *short]) == 0
    said = capsys.readouterr().out
    assert "a-seed1: finished before" in said
    assert f"trainer.max_epochs is 60 there, {epochs + 2} here" in said
    assert "a-seed0: resumed at" in said
    assert "2 runs: 1 finished, 1 finished before" in said
    (version,) = (runs / "s/a-seed0").glob("version_*")
    rows = list(csv.DictReader((version / "metrics.csv").open()))
    assert [int(row["epoch"]) for row in rows] == list(range(epochs + 2))
    # Without its checkpoints a run is still known to be finished.
    shutil.rmtree(version / "checkpoints")
    (run,) = [r for r in read_suite(file, runs, overrides=[f"--{short[1]}"]) if "seed0" in r.name]
    assert execution.state(run) == ("finished", 1.0)
