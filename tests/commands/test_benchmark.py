"""`python -m app benchmark`: every case runs and is accounted for. No time is asserted."""

import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from app.cli.config_files import expand
from app.cli.main import main
from app.commands.benchmark import moe, peers, step
from app.commands.benchmark.data import AUGMENTATIONS
from app.commands.benchmark.images import RandomImages
from app.commands.benchmark.rows import quiet_lightning
from app.commands.benchmark.timing import interleave, paired_ratio, peak_bytes, spread
from app.moe import MoEBlock, TopAny, TopK
from callbacks import CompileBlocks
from callbacks.run.compile_blocks import compile_blocks

CPU = torch.device("cpu")
SIZES = moe.Sizes(tokens=96, dim=16, hidden=32, experts=8, k=2)
HEADER = {"benchmark", "device", "hardware", "torch", "threads", "dtype"}
TIMED = {"case", "phase", "median_s", "quartiles_s", "repeats", "ratio_to_dense"}


def rows(tmp_path, *arguments: str) -> list[dict]:
    path = tmp_path / "folder" / "rows.json"
    assert main(["benchmark", *arguments, "--device=cpu", "--repeats=2", f"--json={path}"]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def cases() -> dict[str, moe.Case]:
    torch.manual_seed(1)
    return moe.make_cases(SIZES, torch.randn(SIZES.tokens, SIZES.dim), autocast=False)


# ---------------------------------------------------------------------- the command line


def test_moe_writes_a_row_for_every_case_and_phase(tmp_path, capfd):
    table = rows(tmp_path, "moe", "--tokens=96", "--dim=16", "--hidden=32")
    ours = {"topk1", "topk2", "topany", "topp", "ternary", "default", "fine64", "swiglu"}
    assert {*ours, "dense", "dense_k1", "dense_swiglu", "einsum"} <= {row["case"] for row in table}
    for phase in ("fwd", "fwd_bwd"):
        by_case = {row["case"]: row for row in table if row["phase"] == phase}
        for name, row in by_case.items():
            assert set(row) >= HEADER | TIMED | {"tokens", "dim", "hidden", "experts", "k"}
            assert row["median_s"] > 0 and row["ratio_to_dense"] > 0 and row["peak_bytes"] > 0
            if name not in ours | {"einsum"}:
                continue
            assert row["pairs"] > 0 and row["pairs_per_token"] == row["pairs"] / 96
        for name in ours:
            parts = by_case[name]["parts_s"]
            assert set(parts) >= {"routing", "dispatch", "experts", "combine"}
            assert all(seconds >= 0 for seconds in parts.values())
            assert ("experts bwd" in parts) == (phase == "fwd_bwd")
    out = capfd.readouterr()
    assert "topany" in out.out and "x dense" in out.out
    assert "USDT" not in out.err


def test_moe_in_mixed_precision(tmp_path):
    table = rows(tmp_path, "moe", "--tokens=64", "--dim=16", "--hidden=32", "--dtype=bf16")
    assert {row["dtype"] for row in table} == {"bf16"}


def test_step_compares_a_method_with_bare_loops_and_lightning(tmp_path, capfd):
    table = rows(tmp_path, "step", "--recipe=digits", "--methods=dynmoe", "--batch_size=4")
    names = {"timm", "dynmoe", "dynmoe:bare", "dynmoe:lightning", "dynmoe:no_monitor"}
    assert {row["case"] for row in table} == names
    for row in table:
        assert set(row) >= HEADER | TIMED | {"recipe", "batch_size", "images_per_second"}
        assert row["phase"] == "step" and row["images_per_second"] > 0
    (method,) = (row for row in table if row["case"] == "dynmoe")
    assert {"ratio_to_bare", "ratio_to_lightning", "ratio_to_no_monitor"} <= set(method)
    assert "dynmoe:bare" in capfd.readouterr().out


def test_data_compares_with_torchvision(tmp_path):
    table = rows(tmp_path, "data", "--batch_size=16", "--images=16")
    kinds = ("ours", "per_sample_pil", "per_sample_tensor")
    assert {row["case"] for row in table} == {f"{k}:{a}" for k in kinds for a in AUGMENTATIONS}
    for row in table:
        assert row["threads"] == 1 and row["images_per_second"] > 0
        assert {"ratio_to_per_sample_pil", "ratio_to_per_sample_tensor"} <= set(row)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["step", "--recipe=nothing"], "--recipe: there is no nothing; choose of"),
        (["step", "--methods", "dynmoe", "top9"], "--method: there is no top9; choose of"),
        (["step", "--recipe=shakespeare"], "--recipe: shakespeare is no image model"),
        (["moe", "--k=9"], "--k is 9, more than the 8 experts"),
        (["moe", "--hidden=12"], "--hidden is 12; it must be a multiple of 8"),
        (["moe", "--device=meta"], "benchmarks run on cpu and cuda"),
        (["moe", "--device=nowhere"], "'nowhere' is not available here"),
    ],
)
def test_mistakes_cost_one_line(arguments, says, capsys):
    assert main(["benchmark", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


# ---------------------------------------------------------------------- what is compared


def test_routers_are_forced_to_one_load(cases):
    pairs = SIZES.k * SIZES.tokens
    for name in ("topk2", "topany", "ternary", "default", "swiglu", "einsum"):
        assert cases[name].pairs == pairs
    assert abs(cases["topp"].pairs - pairs) <= 4
    assert cases["fine64"].pairs == moe.FINE * pairs
    load_E = cases["topany"].module.routing.load_E()
    assert load_E.eq(pairs / SIZES.experts).all()
    gates_TE = cases["ternary"].module.routing.gates_TE
    assert gates_TE[:, ::2].le(0).all() and gates_TE[:, 1::2].ge(0).all()
    assert gates_TE.lt(0).any() and gates_TE.gt(0).any()


def test_dense_layers_have_the_active_flops(cases):
    def flops(module: nn.Module) -> int:
        return 2 * SIZES.tokens * sum(p.numel() for p in module.parameters() if p.ndim == 2)

    for name in ("topk1", "topk2", "topany", "ternary", "default", "fine64", "swiglu"):
        case = cases[name]
        executed = case.pairs * case.module.experts.flops_per_pair()
        assert executed == flops(cases[case.reference].module), name


def test_default_vectors_move_with_each_step(cases):
    case = cases["default"]
    timed = moe.Step(case, torch.randn(SIZES.tokens, SIZES.dim), autocast=False)
    before_ED = case.module.default_ED.clone()
    timed.forward_backward()
    assert not torch.equal(case.module.default_ED, before_ED)
    assert timed.x_TD.grad is not None


def test_einsum_dispatch_equals_the_block():
    torch.manual_seed(2)
    block = MoEBlock(16, 32, TopK)
    x_TD = torch.randn(40, 16)
    torch.testing.assert_close(moe.EinsumLayer(block)(x_TD), block(x_TD), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_mixtral_computes_what_ours_does(implementation):
    pytest.importorskip("transformers")
    peer = peers.mixtral(implementation, SIZES, CPU, torch.float32).module
    theirs = peer.layer
    ours = MoEBlock(16, 32, partial(TopK, normalize=True), experts=moe.SwiGLUExperts)
    with torch.no_grad():
        ours.router.weight.copy_(theirs.gate.weight)
        gate, up = theirs.experts.gate_up_proj.chunk(2, dim=1)
        for own, given in (("gate", gate), ("up", up), ("down", theirs.experts.down_proj)):
            getattr(ours.experts, own).copy_(given)
    x_TD = torch.randn(SIZES.tokens, SIZES.dim)
    torch.testing.assert_close(peer(x_TD), ours(x_TD), rtol=1e-3, atol=1e-6)


def test_a_peer_that_fails_is_left_out_with_a_reason():
    def broken(*_: object) -> peers.Peer:
        raise TypeError("unexpected keyword\nand more")

    with pytest.raises(peers.Skipped, match=r"it fails here \(unexpected keyword\)$"):
        peers._tried(broken)(SIZES, CPU, torch.float32)


# ---------------------------------------------------------------------- how it is timed


def test_rounds_are_interleaved_and_ratios_paired():
    order: list[str] = []
    cases = {name: partial(order.append, name) for name in "abc"}
    seconds = interleave(cases, 4, CPU, warmup=1)
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 5 and all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1
    assert all(len(values) == 4 for values in seconds.values())
    # A slow round slows both: the ratio of the pairs is 2 throughout, that of the medians is not.
    assert paired_ratio([2.0, 20.0, 6.0], [1.0, 10.0, 3.0]) == (2.0, 2.0, 2.0)
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_peak_memory_is_what_lives_together():
    def call() -> None:
        first = torch.empty(1000, 1000)
        second = torch.empty(500, 1000)
        del first, second
        torch.empty(800, 1000)

    assert peak_bytes(call, CPU) == pytest.approx(4 * 1_500_000, rel=0.01)


def test_a_loop_goes_on_only_when_told():
    steps: list[int] = []

    def body(pause) -> None:
        for index in range(100):
            pause()
            steps.append(index)

    with step.Loop(nn.Identity(), body, CPU) as loop:
        assert steps == []
        loop.advance(3)
        assert steps == [0, 1, 2]
        loop.advance(2)
        assert steps == [0, 1, 2, 3, 4]
    assert len(steps) == 5


def test_an_error_in_a_loop_is_raised_where_it_is_waited_for():
    def body(pause) -> None:
        pause()
        raise ValueError("no such thing")

    with step.Loop(nn.Identity(), body, CPU) as loop, pytest.raises(ValueError, match="no such"):
        loop.advance(1)


def test_random_images_serve_batches_of_the_asked_size():
    data = RandomImages(8, 1, 5, images=64, batch_size=16, crop_padding=1)
    data.setup("fit")
    images, labels = next(iter(data.train_dataloader()))
    assert images.shape == (16, 1, 8, 8) and labels.max() < 5
    assert len(data.train_dataloader()) == 4


# ---------------------------------------------------------------------- compiled blocks


def test_compiled_blocks_compute_the_same_through_births():
    from app.models import VisionTransformer

    torch.manual_seed(3)
    moe_block = partial(MoEBlock, router=TopAny, num_experts=3, max_experts=5)
    size = {"image_size": 8, "dim": 16, "depth": 3, "heads": 2}
    plain = VisionTransformer(**size, moe=moe_block, moe_blocks=[1])
    compiled = copy.deepcopy(plain)
    compile_blocks(compiled, backend="eager")
    torch._dynamo.reset()
    images = torch.randn(6, 3, 8, 8)
    with torch._dynamo.config.patch(error_on_recompile=False):
        torch.testing.assert_close(compiled(images), plain(images))
    with torch._dynamo.config.patch(error_on_recompile=True):  # experts come: nothing is compiled
        for network in (plain, compiled):
            network.blocks[1].mlp.activate(3)
        torch.testing.assert_close(compiled(images), plain(images))
    assert set(compiled.state_dict()) == set(plain.state_dict())


def test_compiled_blocks_train(tmp_path, capsys):
    arguments = [
        "--config=configs/quickstart.yaml", f"--runs={tmp_path}", "--trainer.max_steps=3",
        "--trainer.accelerator=cpu", "--trainer.limit_val_batches=1",
        "--trainer.enable_progress_bar=false", "--trainer.callbacks+=CompileBlocks",
        "--trainer.callbacks.backend=eager",
    ]  # fmt: skip
    assert main(["fit", *arguments]) == 0
    assert CompileBlocks().backend == "inductor"
    assert (tmp_path / "quickstart" / "version_0" / "checkpoints" / "last.ckpt").is_file()


# ---------------------------------------------------------------------- the GPU script


def test_gpu_settings_go_on_top_of_any_image_config(tmp_path):
    configs = ("vision/cifar10_dynmoe_weighted_average", "hardware/gpu", "hardware/compile")
    arguments = [f"--config={step.CONFIGS / name}.yaml" for name in configs]
    with quiet_lightning():
        built = step._Built(expand(["fit", *arguments, "--trainer.accelerator=cpu"]))
    names = {type(callback).__name__ for callback in built.trainer.callbacks}
    assert {"AdaptiveExperts", "CompileBlocks", "RoutingMonitor"} <= names
    assert built.trainer.precision == "bf16-mixed"
    assert built.datamodule.batch_size == 512 and built.datamodule.device == "auto"
    (group,) = built.model.optimizer([nn.Parameter(torch.zeros(1))]).param_groups
    assert group["fused"] and group["lr"] == 1e-3


def test_summary_of_the_gpu_script_says_what_ran(tmp_path):
    (tmp_path / "parts.csv").write_text("part,seconds,status\ncorrectness,31,0\nmoe,75,124\n")
    checks = [{"check": "top-2", "good": True, "found": ""}]
    checks += [{"check": "top-p", "good": False, "found": "error 0.3"}]
    (tmp_path / "correctness.json").write_text(json.dumps(checks))
    run = tmp_path / "training"
    run.mkdir()
    (run / "config.yaml").write_text("data: {init_args: {batch_size: 500}}")
    (run / "metrics.csv").write_text(
        "epoch,step,seconds,val/accuracy\n0,100,30.0,0.5\n1,200,32.0,0.6\n2,300,34.0,0.7\n"
    )
    script = Path("benchmarks/summary.py")
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=60)
    text = (tmp_path / "summary.md").read_text()
    assert "| moe | 75 | 124 |" in text
    assert "1 of 2 checks good" in text and "- top-p: error 0.3" in text
    # 200 steps of 500 images in 4 seconds; 200 epochs of 50,000 images at that rate.
    assert "| training | 3 | 2.00 | 25,000 | 6.7 | 0.7000 |" in text


def test_shell_scripts_parse():
    for script in ("benchmarks/gpu.sh", "benchmarks/gpu_table.sh", "benchmarks/cpu.sh"):
        subprocess.run(["bash", "-n", script], check=True)
