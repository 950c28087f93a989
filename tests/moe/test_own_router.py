"""A router of one's own, with a parameter for each slot: no other file knows of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import app
from app.cli.main import main
from app.models import exported
from app.moe import Router, Routing
from tests.callbacks.callback_support import read_scalars

RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "digits.yaml"


class ExpertChoice(Router):
    """Each expert takes the quarter of the tokens that suit it best (arXiv 2202.09368)."""

    why_not_adaptive = "the number of tokens of an expert is fixed"

    def __init__(self, dim: int, slots: int) -> None:
        super().__init__(dim, slots)
        self.weight = nn.Parameter(0.02 * torch.randn(slots, dim))
        self.temperature_E = nn.Parameter(torch.ones(slots))

    def forward(self, x_TD: torch.Tensor, active_E: torch.Tensor) -> Routing:
        scores_TE = x_TD @ self.weight.to(x_TD).t() * self.temperature_E.to(x_TD)
        probs_TE = scores_TE.masked_fill(~active_E, -torch.inf).softmax(1)
        best = probs_TE.topk(max(1, len(x_TD) // 4), dim=0).indices
        mask_TE = torch.zeros_like(probs_TE, dtype=torch.bool).scatter(0, best, True) & active_E
        return Routing(mask_TE, probs_TE * mask_TE, active_E, x_TD)


def test_it_trains_is_watched_exports_and_reloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exported, "KNOWN", dict(exported.KNOWN))
    moe = "--model.network.init_args.moe.init_args"
    options = [
        "--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.log_every_n_steps=1",
        f"--runs={tmp_path}", "--name=own", f"{moe}.max_experts=6",
        f"{moe}.router=tests.moe.test_own_router.ExpertChoice", "--monitor.every_n_steps=5",
    ]  # fmt: skip
    assert main(["fit", "--config", str(RECIPE), *options]) in (0, None)
    run = tmp_path / "own" / "version_0"
    logged = read_scalars(run)
    assert any(tag.endswith("/experts_per_token") for tag in logged)
    checkpoint = run / "checkpoints" / "last.ckpt"
    export = ["export", "--ckpt_path", str(checkpoint), f"--out={tmp_path / 'model'}"]
    assert main([*export, "--classes", __name__]) == 0  # its outputs are equal, or it says so
    model = app.load_model(tmp_path / "model", classes=[ExpertChoice])
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    routers = [m for m in model.modules() if isinstance(m, ExpertChoice)]
    assert routers and all(len(r.temperature_E) == len(r.weight) == 4 for r in routers)
    names = [name for name in saved if name.endswith("temperature_E")]
    for name, router in zip(names, routers, strict=True):
        assert not torch.equal(saved[name][:4], torch.ones(4))  # it was trained
        assert torch.equal(router.temperature_E.detach(), saved[name][:4])
