"""A suite on a Ray cluster of two nodes, one of which is lost. Needs the extra `cluster`."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from app.cli.main import main

CONFIGS = Path(__file__).parents[2] / "configs"


def write(path: Path) -> Path:
    content = {
        "name": "s",
        "configs": [str(CONFIGS / f"{name}.yaml") for name in ("recipes/digits", "methods/topk2")],
        "set": {
            "trainer.max_epochs": 400,
            "trainer.limit_train_batches": 2,
            "trainer.limit_val_batches": 1,
            "trainer.accelerator": "cpu",
            "model.network.dim": 16,
        },
        "entries": [{"name": "a"}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_without_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["suite", str(write(tmp_path / "s.yaml")), "--engine", "ray"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'moe-lab[cluster]'" in line


def parent_of(process: int) -> int:
    return int(re.search(r"PPid:\s*(\d+)", Path(f"/proc/{process}/status").read_text())[1])


def fits_in(folder: Path) -> list[int]:
    """The processes that train into a folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            parts = file.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "fit" in parts and str(folder) in parts:
            found.append(int(file.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.e2e
def test_a_run_goes_on_elsewhere_when_its_node_is_lost(tmp_path):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    runs = tmp_path / "runs"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        command = [sys.executable, "-m", "app", "suite", str(write(tmp_path / "s.yaml"))]
        suite = subprocess.Popen(
            [*command, "--runs", str(runs), "--engine", "ray", "--set", "trainer.max_epochs=60"],
            env=os.environ | {"RAY_ADDRESS": cluster.address},
            stdout=subprocess.PIPE,
            text=True,
        )
        metrics = runs / "s/a-seed0/version_0/metrics.csv"
        while not metrics.exists() or metrics.read_text().count("\n") < 4:
            assert suite.poll() is None
            time.sleep(0.1)
        (fit,) = fits_in(runs)
        raylet = parent_of(parent_of(fit))
        (lost,) = [
            node
            for node in nodes
            if any(
                each.process.pid == raylet for all_ in node.all_processes.values() for each in all_
            )
        ]
        cluster.remove_node(lost, allow_graceful=False)
        said, _ = suite.communicate(timeout=200)
    finally:
        cluster.shutdown()
    assert suite.returncode == 0
    assert "1 runs: 1 finished" in said
    log = (runs / "s/a-seed0/fit.log").read_text()
    assert [line.endswith("--ckpt_path last") for line in log.splitlines() if line[:1] == "$"] == [
        False,
        True,
    ]
    epochs = [line.partition(",")[0] for line in metrics.read_text().splitlines()]
    assert epochs == ["epoch", *map(str, range(60))]
