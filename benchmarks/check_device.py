"""Whether a device computes what the CPU computes, and whether a training step waits for it.

python benchmarks/check_device.py [--device cuda] [--json FILE] [--tiny]
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from app.commands.benchmark.images import RandomImages
from app.models import VisionTransformer
from app.moe import Dense, MoEBlock, SwiGLUExperts, Ternary, TopAny, TopK, TopP
from app.tasks import ImageClassification
from callbacks import AdaptiveExperts, CompileBlocks, RoutingMonitor

BLOCKS = {
    "dense mixture": {"router": Dense},
    "top-1": {"router": partial(TopK, k=1)},
    "top-2": {"router": TopK},
    "top-2 SwiGLU": {"router": TopK, "experts": SwiGLUExperts},
    "top-2, 64 experts": {"router": partial(TopK, k=16), "num_experts": 64, "expert_ratio": 0.125},
    "top-2, shared expert": {"router": TopK, "shared_experts": 1},
    "top-p": {"router": TopP},
    "top-any": {"router": TopAny},
    "top-any, free slots": {"router": TopAny, "num_experts": 5, "max_experts": 8},
    "ternary": {"router": Ternary},
    "default vectors": {"router": TopK, "default_vectors": "ema"},
}
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the relative error, Frobenius norms


def main() -> int:
    """Prints a line for each check; 1 if one of them is bad."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    options = parser.parse_args()
    device = torch.device(options.device)
    found: list[dict[str, Any]] = []
    for checks in (blocks, augmentation, training, waits):
        try:
            for row in checks(device, options.tiny):
                found.append(row)
                print(f"{'good' if row['good'] else 'BAD '}  {row['check']}: {row['found']}")
        except Exception as error:
            traceback.print_exc()
            found.append({"check": checks.__name__, "good": False, "found": repr(error)})
        if options.json:  # what was found so far counts, whatever comes
            options.json.write_text(json.dumps(found, indent=2), encoding="utf-8")
    return 0 if all(row["good"] for row in found) else 1


def blocks(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Output and gradients of every router against float64 on the CPU."""
    tokens, dim, hidden = (64, 16, 32) if tiny else (2048, 256, 512)
    for name, settings in BLOCKS.items():
        torch.manual_seed(0)
        exact = MoEBlock(dim, hidden, **settings).train()
        x_TD, grad_TD = torch.randn(tokens, dim), torch.randn(tokens, dim)
        for dtype, limit in LIMITS.items():
            here = copy.deepcopy(exact).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                found = _gradients(here, x_TD.to(device), grad_TD.to(device))
            expected = _gradients(copy.deepcopy(exact).double(), x_TD.double(), grad_TD.double())
            errors = {
                key: float(
                    (found[key].cpu().double() - value).norm() / value.norm().clamp_min(1e-12)
                )
                for key, value in expected.items()
                if value.norm() > 0
            }
            worst = max(errors, key=errors.get)
            yield {
                "check": f"{name}, {str(dtype).removeprefix('torch.')}",
                "good": errors[worst] < limit,
                "found": f"largest relative error {errors[worst]:.1e} (of {worst})",
            }


def _gradients(block: MoEBlock, x_TD: Tensor, grad_TD: Tensor) -> dict[str, Tensor]:
    x_TD = x_TD.clone().requires_grad_()
    y_TD = block(x_TD)
    y_TD.backward(grad_TD.to(y_TD.dtype))
    named = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {"output": y_TD.detach(), "input's gradient": x_TD.grad} | named


def augmentation(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """The same seed gives the same batch wherever the images lie."""
    batches = []
    for kind in ("cpu", device.type):
        data = RandomImages(images=600, batch_size=128, randaugment_ops=2, erasing=0.5)
        data.device = kind
        data.setup("fit")
        batches.append(next(iter(data.train_dataloader()))[0].cpu())
    # Resampling may round differently: a grey level of 255 is 2 / 255 after normalising.
    close = float(((batches[0] - batches[1]).abs() < 2.1 / 255 * 2).float().mean())
    yield {
        "check": "augmentation",
        "good": close > 0.999,
        "found": f"{close:.4%} of the pixels within a grey level of the CPU's",
    }


def _task(tiny: bool) -> ImageClassification:
    torch.manual_seed(0)
    moe = partial(MoEBlock, router=TopAny, num_experts=4, max_experts=8)
    size = {"dim": 32, "depth": 2, "heads": 2} if tiny else {"dim": 128, "depth": 4, "heads": 2}
    network = VisionTransformer(**size, moe=moe, moe_blocks=[1])
    optimizer = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    return ImageClassification(network, optimizer, losses={"topany": 0.01})


class _Losses(L.Callback):
    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.values.append(outputs["loss"].detach())


def _fit(
    device: torch.device, tiny: bool, precision: str, steps: int, *extra: L.Callback
) -> list[float]:
    losses = _Losses()
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator=device.type, devices=1, precision=precision, max_steps=steps,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, limit_val_batches=0, default_root_dir=folder,
            callbacks=[RoutingMonitor(), AdaptiveExperts(window=(0.0, 0.5)), *extra, losses],
        )  # fmt: skip
        trainer.fit(_task(tiny), RandomImages(images=640, batch_size=64))
    return [float(value) for value in losses.values]


def training(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Losses of a training with births against the CPU's, eager and compiled."""
    steps = 8
    expected = torch.tensor(_fit(torch.device("cpu"), tiny, "32-true", steps))
    for name, precision, limit, extra in (
        ("float32", "32-true", 1e-3, ()),
        ("bfloat16", "bf16-mixed", 5e-2, ()),
        ("bfloat16, compiled", "bf16-mixed", 5e-2, (CompileBlocks(),)),
    ):
        if extra and tiny and device.type == "cpu":
            extra = (CompileBlocks(backend="eager"),)
        found = torch.tensor(_fit(device, tiny, precision, steps, *extra))
        error = float((found - expected).abs().max())
        yield {
            "check": f"training, {name}",
            "good": error < limit,
            "found": f"largest difference of the loss over {steps} steps {error:.1e}",
        }


class _SyncWarnings(L.Callback):
    """Lets CUDA tell, in steps far from any logging, where the host waits for it."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            torch.cuda.set_sync_debug_mode("default")


def waits(device: torch.device, tiny: bool) -> Iterator[dict[str, Any]]:
    """Where a training step waits for the GPU; told, never bad: some sizes must be known."""
    if device.type != "cuda":
        yield {"check": "host waits", "good": True, "found": "there is no GPU to wait for"}
        return
    places: Counter[str] = Counter()

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if "synchroniz" in str(message):
            stack = [
                frame
                for frame in traceback.extract_stack()
                if any(f"/{part}/" in frame.filename for part in ("app", "callbacks", "data"))
            ]
            near = f"{Path(stack[-1].filename).name}:{stack[-1].lineno}" if stack else "elsewhere"
            places[f"{near} through {Path(filename).name}:{lineno}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        _fit(device, tiny, "bf16-mixed", 9, _SyncWarnings())
    for place, count in places.most_common():
        yield {"check": "host waits", "good": True, "found": f"{count / 5:g} a step at {place}"}
    if not places:
        yield {"check": "host waits", "good": True, "found": "none in a step"}


if __name__ == "__main__":
    sys.exit(main())
