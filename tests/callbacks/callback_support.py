"""Networks of known routing, tiny runs of them, and what the tests of the callbacks read back.

Token i of the toy network, 0 to 7, is 1 in place i and -0.2 elsewhere; expert e looks along axis e.
So token i takes expert i if that is active and none otherwise, with room to train a little.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from app.models import VisionTransformer
from app.moe import MoEBlock, Router, Routing, TopAny
from app.tasks import ImageClassification
from app.tasks.base import MoETask
from data import DigitsData

DIM = 8
EXPERTS = ("experts.up", "experts.up_bias", "experts.down", "experts.down_bias")


def tokens(text: str) -> Tensor:
    """A batch (T, 8) from digits: "0017" is four tokens."""
    place = torch.tensor([int(digit) for digit in text])
    return torch.eye(DIM)[place] * 1.2 - 0.2


def toy_block(
    router: Callable[[int, int], Router] = TopAny,
    num_experts: int = 3,
    slots: int = 5,
    **options: Any,
) -> MoEBlock:
    """A block of width 8 whose expert e looks along axis e; random biases, unlike at the start."""
    block = MoEBlock(DIM, 4, router=router, num_experts=num_experts, max_experts=slots, **options)
    with torch.no_grad():
        if block.router.weight.shape[0] == slots:
            block.router.weight.copy_(torch.eye(slots, DIM))
        for parameter in block.experts.parameters():
            parameter.normal_(std=0.3)
    return block


class ToyNetwork(nn.Module):
    """Blocks side by side over the same tokens."""

    def __init__(self, *blocks: MoEBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x_TD: Tensor) -> Tensor:
        return sum(block(x_TD) for block in self.blocks)


class Toy(MoETask):
    """Pulls the outputs of a toy network towards its inputs; `loss_scale` may change any time."""

    def __init__(self, *blocks: MoEBlock, optimizer: Any = None, losses: Any = None) -> None:
        optimizer = optimizer or partial(torch.optim.SGD, lr=0.0)
        super().__init__(ToyNetwork(*blocks), optimizer, "constant", 0.0, losses)
        self.loss_scale = 1.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.network(batch) - batch).square().mean() * self.loss_scale
        self.log("train/loss", loss.detach())
        return loss + self.auxiliary_loss(batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", (self.network(batch) - batch).square().mean(), sync_dist=True)


def loader(batches: list[Tensor]) -> DataLoader:
    """The batches in order, each epoch."""
    return DataLoader(batches, batch_size=None)


class Endless(IterableDataset):
    """The batches over and over: a stream that does not know its length."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches

    def __iter__(self):
        while True:
            yield from self.batches


def make_trainer(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """A quiet trainer on one CPU, with TensorBoard in `folder`/log."""
    options.setdefault("logger", TensorBoardLogger(folder, name="log", version=""))
    defaults = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
        "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks),
    }
    return L.Trainer(callbacks=list(callbacks), **(defaults | options))


def fit(
    folder: Path,
    task: L.LightningModule,
    batches: list[Tensor],
    *callbacks: L.Callback,
    val: list[Tensor] | None = None,
    **options: Any,
) -> L.Trainer:
    """Trains a toy task on the batches."""
    trainer = make_trainer(folder, *callbacks, **options)
    trainer.fit(task, loader(batches), None if val is None else loader(val))
    return trainer


def vision_task(
    router: Callable[[int, int], Router] = TopAny,
    num_experts: int = 2,
    slots: int = 6,
    optimizer: Any = None,
    drop: float = 0.0,
    block: dict[str, Any] | None = None,
    **options: Any,
) -> ImageClassification:
    """A ViT of width 16 for 8 x 8 images with experts in both of its blocks; the same each time."""
    torch.manual_seed(0)
    moe = partial(
        MoEBlock, router=router, num_experts=num_experts, max_experts=slots, **(block or {})
    )
    network = VisionTransformer(
        image_size=8, patch_size=4, channels=1, dim=16, depth=2, heads=2, mlp_ratio=2,
        drop_rate=drop, drop_path=drop, moe=moe, moe_blocks=[0, 1],
    )  # fmt: skip
    optimizer = optimizer or partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.05)
    return ImageClassification(network, optimizer, **options)


def digits(**options: Any) -> DigitsData:
    """Augmented digits in small batches."""
    return DigitsData(**({"batch_size": 32, "eval_batch_size": 180} | options))


class Recorder(L.Callback):
    """Keeps the routing of every training batch; place it anywhere, the task clears them last."""

    def __init__(self) -> None:
        self.train: list[dict[str, Routing]] = []
        self.val: list[dict[str, Routing]] = []
        self.losses: list[float] = []
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.train.append({name: block.routing for name, block in pl_module.blocks.items()})
        self.losses.append(float(outputs["loss"]))
        self.steps.append(trainer.global_step)

    def on_validation_batch_end(self, trainer, pl_module, *_) -> None:
        if not trainer.sanity_checking:
            self.val.append({name: block.routing for name, block in pl_module.blocks.items()})


class At(L.Callback):
    """Calls a function with the task at the start of the batch that begins at a given step."""

    def __init__(self, actions: dict[int, Callable[[Any], None]]) -> None:
        self.actions = dict(actions)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        action = self.actions.pop(trainer.global_step, None)
        if action:
            action(pl_module)


def weights(block: MoEBlock, slot: int) -> dict[str, Tensor]:
    """A copy of one expert's weights, by the name in its block."""
    state = block.state_dict()
    return {name: state[name][slot].clone() for name in EXPERTS}


def same(left: Any, right: Any) -> bool:
    """Whether two nests of tensors and plain values are equal, bit for bit."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Everything scalar that TensorBoard's own reader finds: tag -> (step, value)."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags}


def read_texts(folder: Path) -> dict[str, list[tuple[int, str]]]:
    """All texts that TensorBoard's own reader finds: tag -> (step, text)."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return {
        tag.removesuffix("/text_summary"): [
            (each.step, each.tensor_proto.string_val[0].decode()) for each in events.Tensors(tag)
        ]
        for tag in events.Tags()["tensors"]
    }


# ---------------------------------------------------------------------- several processes

DDP = {"strategy": "ddp", "devices": 2}


def on_two_processes(
    function: Callable[..., Any], folder: Path, *arguments: Any, seconds: float = 90.0
) -> list[Any]:
    """Calls `function(folder, *arguments)` on two processes: see `on_processes`."""
    return on_processes(2, function, folder, *arguments, seconds=seconds)


def on_processes(
    world: int,
    function: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    seconds: float = 90.0,
) -> list[Any]:
    """Calls `function(folder, *arguments)` on processes that can talk by gloo.

    Returns:
        What each returned. Fails the test if one raises, or if they take longer than `seconds`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning.pytorch", "timm", "sklearn.datasets"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [
        context.Process(target=_one_process, args=(rank, port, function, folder, arguments))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    try:
        until = time.monotonic() + seconds
        while any(process.is_alive() for process in ranks) and time.monotonic() < until:
            time.sleep(0.02)
            if any(process.exitcode for process in ranks):
                break  # the others would wait for it for ever
        hung = any(process.is_alive() for process in ranks)
        errors = [path.read_text() for path in sorted(folder.glob("error*.txt"))]
        if errors:
            pytest.fail("\n".join(errors))
        if hung or any(process.exitcode for process in ranks):
            pytest.fail(
                f"{world} processes did not end within {seconds:g} s: they wait for each other"
            )
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(world)]


def _one_process(rank: int, port: int, function: Any, folder: Path, arguments: tuple) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
    }
    torch.set_num_threads(1)
    try:
        torch.save(function(folder, *arguments), folder / f"result{rank}.pt")
    except BaseException:
        (folder / f"error{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        raise
