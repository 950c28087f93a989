"""Router gradients with and without default vectors, against those of the dense mixture."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from app.cli.main import main as app
from app.commands.analyze.router_gradients import Cosines, main, mixing, router_gradient_cosines
from app.models import VisionTransformer
from app.moe import MoEBlock, Ternary, TopAny, TopK
from app.tasks import ImageClassification
from callbacks import DefaultVectors
from data import DigitsData
from tests.callbacks.callback_support import make_trainer


def make_task(seed: int, lr: float, router=TopK, **block) -> ImageClassification:
    torch.manual_seed(seed)
    moe = partial(MoEBlock, router=router, **({"default_vectors": "ema"} | block))
    network = VisionTransformer(
        image_size=8, patch_size=2, channels=1, dim=32, depth=3, heads=2, mlp_ratio=2.0,
        pool="avg", drop_rate=0.1, moe=moe, moe_blocks=[1, 2],
    )  # fmt: skip
    optimizer = partial(torch.optim.AdamW, lr=lr, weight_decay=0.05)
    return ImageClassification(network, optimizer, losses={"load_balance": 0.01})


def warm_up(folder, task: ImageClassification, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Trains on the digits while DefaultVectors follows; returns the test images and labels."""
    data = DigitsData(batch_size=64, crop_padding=0)
    options = {"max_epochs": -1, "max_steps": steps, "limit_val_batches": 0, "logger": False}
    make_trainer(folder, DefaultVectors(0.9), **options).fit(task, data)
    return next(iter(data.val_dataloader()))


def measure(task: ImageClassification, images, labels) -> dict[str, Cosines]:
    return router_gradient_cosines(
        task.network, lambda: F.cross_entropy(task.network(images), labels)
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_against_the_equations(seed):
    """One block in float64 with an inactive slot: gradients from sums written out token by token.

    y = sum_taken p_e E_e(x) [+ sum_others p_e V_e], dp_i/dz_j = p_i (delta_ij - p_j), z = W x.
    """
    torch.manual_seed(seed)
    block = MoEBlock(6, 8, partial(TopK, k=2), num_experts=4, max_experts=5, default_vectors="ema")
    block.double()
    for parameter in block.parameters():
        parameter.data.normal_(std=0.5)
    block.default_ED.normal_()
    x_TD, target_TD = torch.randn(7, 6).double(), torch.randn(7, 6).double()

    def expected(kind: str) -> torch.Tensor:
        gradient = torch.zeros(5, 6, dtype=torch.float64)
        for x, target in zip(x_TD, target_TD, strict=True):
            p = (block.router.weight.detach()[:4] @ x).softmax(0)
            best = p.topk(2).indices.tolist()
            parts = []
            for e in range(4):
                weights = [w.detach()[e] for w in block.experts.parameters()]
                executed = e in best or kind == "dense"
                missing = block.default_ED[e] if kind == "default" else torch.zeros(6).double()
                parts.append(block.experts.expert(F.linear, x, *weights) if executed else missing)
            y = sum(p[e] * parts[e] for e in range(4))
            upstream = 2 * (y - target) / x_TD.numel()
            for j in range(4):
                slope = sum((upstream @ parts[i]) * p[i] * (float(i == j) - p[j]) for i in range(4))
                gradient[j] += slope * x
        return gradient.flatten()

    cosine = partial(F.cosine_similarity, dim=0)
    found = router_gradient_cosines(
        torch.nn.ModuleDict({"0": block}), lambda: (block(x_TD) - target_TD).square().mean()
    )["0"]
    dense = expected("dense")
    assert found.plain == pytest.approx(cosine(expected("plain"), dense).item(), abs=1e-9)
    assert found.default == pytest.approx(cosine(expected("default"), dense).item(), abs=1e-9)
    assert abs(found.plain - found.default) > 1e-3


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_experts_that_a_vector_describes(tmp_path, seed):
    """Where an expert's output hardly depends on the token, V is what top-k lacks.

    The vectors come from real images through the callback (an expert that never was chosen has
    none); with them the gradient is nearly the dense mixture's, and without it is not.
    """
    task = make_task(seed, lr=0.0)
    with torch.no_grad():
        for block in task.blocks.values():
            block.experts.up.mul_(1e-3)
            block.experts.up_bias.normal_()
            block.experts.down.normal_(std=0.1)
    for name, each in measure(task, *warm_up(tmp_path, task, 20)).items():
        print(f"seed {seed} {name}: {each}")
        assert each.explained > 0.6
        assert each.default > 0.8 > each.plain


def test_the_network_stays_as_it_is(tmp_path):
    task = make_task(0, lr=0.0).train()
    images, labels = warm_up(tmp_path, task, 1)
    task.train()
    blocks = list(task.blocks.values())
    before = [(block.router, block.default_vectors, block.routing) for block in blocks]
    state = {name: value.clone() for name, value in task.state_dict().items()}
    task.zero_grad()
    measure(task, images, labels)
    for block, (router, vectors, routing) in zip(blocks, before, strict=True):
        assert block.router is router and block.default_vectors == vectors
        assert block.routing is routing
    assert all(module.training for module in task.network.modules())
    assert all(parameter.grad is None for parameter in task.parameters())
    assert all(torch.equal(state[name], value) for name, value in task.state_dict().items())
    with pytest.raises(RuntimeError), mixing(blocks[0], "dense"):
        assert blocks[0].router.weight is before[0][0].weight
        raise RuntimeError
    assert blocks[0].router is before[0][0]


@pytest.mark.parametrize(
    ("router", "block"),
    [
        (TopK, {"default_vectors": "none"}),
        (TopAny, {"default_vectors": "none"}),
        (partial(Ternary, gates="raw"), {}),
    ],
)
def test_what_cannot_be_compared(router, block):
    task = make_task(0, 0.0, router, **block)
    with pytest.raises(ValueError, match=r"blocks\.1 has default_vectors.*router"):
        measure(task, torch.randn(2, 1, 8, 8), torch.zeros(2, dtype=torch.long))


def test_command(tmp_path, capsys):
    """From a checkpoint alone; a mistake is one line."""
    config = tmp_path / "run.yaml"
    files = [
        Path("configs", file).resolve() for file in ("recipes/digits.yaml", "methods/default.yaml")
    ]
    config.write_text(f"base: [{', '.join(map(str, files))}]\n")
    flags = ["--trainer.max_steps=2", "--trainer.accelerator=cpu", f"--runs={tmp_path}"]
    assert app(["fit", f"--config={config}", *flags, "--trainer.enable_progress_bar=false"]) == 0
    (path,) = tmp_path.glob("run/version_0/checkpoints/*.ckpt")
    capsys.readouterr()
    report = tmp_path / "report.json"
    assert main([f"--ckpt_path={path}", "--samples=32", f"--json={report}"]) == 0
    assert "blocks.1" in capsys.readouterr().out and '"explained"' in report.read_text()
    assert main([f"--ckpt_path={tmp_path / 'none.ckpt'}"]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    report.with_suffix(".ckpt").write_text("no checkpoint")
    assert main([f"--ckpt_path={report.with_suffix('.ckpt')}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
