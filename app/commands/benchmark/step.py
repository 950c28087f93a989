"""`python -m app benchmark step`: the whole training step, as `python -m app fit` runs it.

Every case is a live training loop in a thread of its own. One loop runs at a time, for a few steps;
then it hands over, so that all of them see the machine in the same state.
"""

from __future__ import annotations

import copy
import multiprocessing
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import timm.models.vision_transformer as timm_vit
import torch
import torch.nn.functional as F
import yaml
from rich.progress import Progress
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from callbacks import AdaptiveExperts, CompileBlocks
from callbacks.run.compile_blocks import compile_blocks

from ...cli.config_files import expand
from ...cli.main import App, quiet_libraries
from ...errors import ConfigError
from ...moe import LOSSES
from ...tasks import ImageClassification
from ...tasks.base import parameter_groups
from .rows import Row, quiet_lightning, ratio_to, setting, show, timed
from .timing import CLOCKS, interleave, synchronize

CONFIGS = Path(__file__).parents[3] / "configs"
METHODS = ("dense", "topk1", "topk2", "topp", "topany", "dynmoe", "tcmoe", "default", "lossfree")
FILES = {"dynmoe": "dynmoe_weighted_average"}
AGAINST = ("bare", "lightning", "no_monitor")
WATCHERS = ("RoutingMonitor", "RoutingPictures", "Dashboard")  # what `no_monitor` goes without
PLAIN = "timm"  # the case without experts, in a bare loop


@dataclass(frozen=True)
class Plan:
    """What to time.

    Attributes:
        recipe: file of configs/recipes, of an image model.
        methods: files of configs/methods, `dynmoe` for the weighted average.
        against: what each is compared with: the same modules in a `bare` PyTorch loop, `lightning`
            without callbacks and loggers, and the same run with `no_monitor`.
        batch_size: images of a step.
        steps: of one measurement.
        repeats: measurements of each case.
        dtype: `fp32`, or `bf16` for autocast.
        compile: backend that compiles the Transformer blocks around the experts, in all cases.
        memory: also measure the peak memory of each case, in processes of their own.
        clock: name of one of `timing.CLOCKS`.
    """

    recipe: str = "cifar10_vit_s"
    methods: tuple[str, ...] = ("dynmoe",)
    against: tuple[str, ...] = AGAINST
    batch_size: int = 16
    steps: int = 1
    repeats: int = 8
    dtype: str = "fp32"
    compile: str | None = None
    memory: bool = False
    clock: str = "wall"


def run(plan: Plan, device: torch.device) -> list[Row]:
    """Times all cases and prints the table.

    Raises:
        ConfigError: for a recipe or method that is not there, or no image model.
    """
    plan = _checked(plan)
    common = setting(
        "step", device, plan.dtype, recipe=plan.recipe, batch_size=plan.batch_size,
        steps=plan.steps, compiled=plan.compile, clock=plan.clock,
    )  # fmt: skip
    names = [PLAIN] + [case for method in plan.methods for case in (method, *_others(plan, method))]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(quiet_lightning())
        loops: dict[str, Loop] = {}
        for method in plan.methods:
            loops |= make_loops(plan, method, device, Path(folder), with_plain=not loops)
        for loop in loops.values():
            stack.enter_context(loop)
        turns = (plan.repeats + 2) * len(loops)
        with Progress(transient=True) as progress:
            bar = progress.add_task("training steps", total=turns)
            seconds = interleave(
                {name: lambda loop=loops[name]: loop.advance(plan.steps) for name in names},
                plan.repeats,
                device,
                warmup=2,
                done=lambda: progress.advance(bar),
                clock=CLOCKS[plan.clock],
            )
        rows = [common | _row(plan, name, seconds, loops[name].task) for name in names]
    if plan.memory:
        _add_memory(plan, device, rows)
    _show(rows, plan)
    return rows


def _checked(plan: Plan) -> Plan:
    if plan.methods == ("all",):
        plan = replace(plan, methods=METHODS)
    for kind, names in (("recipes", (plan.recipe,)), ("methods", plan.methods)):
        for name in names:
            if not _file(kind, name).is_file():
                there = ", ".join(sorted(path.stem for path in (CONFIGS / kind).glob("*.yaml")))
                raise ConfigError(f"--{kind.rstrip('s')}: there is no {name}; choose of {there}")
    if "image_size" not in _network(plan):
        raise ConfigError(f"--recipe: {plan.recipe} is no image model")
    return plan


def _file(kind: str, name: str) -> Path:
    return CONFIGS / kind / f"{FILES.get(name, name)}.yaml"


def _network(plan: Plan) -> dict[str, Any]:
    """The network's settings in the recipe."""
    recipe = yaml.safe_load(_file("recipes", plan.recipe).read_text(encoding="utf-8"))
    return recipe["model"]["init_args"]["network"]["init_args"]


def _others(plan: Plan, method: str) -> list[str]:
    return [f"{method}:{other}" for other in plan.against]


def _row(plan: Plan, name: str, seconds: dict[str, list[float]], task: ImageClassification) -> Row:
    taken = {case: [value / plan.steps for value in values] for case, values in seconds.items()}
    row = timed(name, "step", taken[name]) | ratio_to("dense", taken[name], taken[PLAIN])
    for other in plan.against:
        if f"{name}:{other}" in taken:
            row |= ratio_to(other, taken[name], taken[f"{name}:{other}"])
    row["images_per_second"] = plan.batch_size / row["median_s"]
    routings = [block.routing for block in task.blocks.values() if block.routing is not None]
    if routings:  # Lightning's loops let go of them after each step
        taken_T = torch.cat([routing.mask_TE.sum(1) for routing in routings])
        row["experts_per_token"] = float(taken_T.float().mean())
    row["parameters"] = sum(p.numel() for p in task.parameters())
    return row


def _show(rows: Sequence[Row], plan: Plan) -> None:
    first = rows[0]
    columns = {
        "case": "case",
        "median_s": "ms",
        "spread": "spread %",
        "ratio_to_dense": "x timm",
        "ratio_to_bare": "x bare",
        "ratio_to_lightning": "x lightning",
        "ratio_to_no_monitor": "x no mon.",
        "images_per_second": "images/s",
        "experts_per_token": "experts/token",
        "peak_bytes": "peak MiB",
        "memory_ratio": "x memory",
    }
    if not plan.memory:
        del columns["peak_bytes"], columns["memory_ratio"]
    show(
        f"Training step: {plan.recipe}, batch {plan.batch_size}, {plan.dtype}, "
        f"{first['hardware']}, {first['threads']} threads, torch {first['torch']}",
        rows,
        columns,
        "A method runs with all its callbacks, the monitor and TensorBoard, the progress bar off. "
        "bare: the same modules in a plain loop; lightning: Lightning without callbacks; timm: the "
        "dense network in a plain loop. AdaptiveExperts records in every step here, a third of "
        "them by default. x memory: over that of timm plus the further weights and Adam state.",
    )


# ---------------------------------------------------------------------- the loops


class _Over(Exception):
    """Ends a loop from within."""


class Loop:
    """A training loop in a thread of its own, that goes on only while `advance` waits for it.

    Args:
        task: the module that it trains.
        body: trains, and calls what it is given before every step.
        device: waited for before a measurement ends.
    """

    def __init__(
        self, task: nn.Module, body: Callable[[Callable[[], None]], None], device: torch.device
    ) -> None:
        self.task, self._body, self._device = task, body, device
        self._threads = torch.get_num_threads()
        self._go, self._ready = threading.Semaphore(0), threading.Semaphore(0)
        self._left, self._over = 0, False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Loop:
        self._left = 1  # up to the first step
        self._thread.start()
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._go.release()
        self._thread.join()

    def advance(self, steps: int) -> None:
        """Trains so many steps."""
        self._left = steps
        self._go.release()
        self._wait()

    def _wait(self) -> None:
        self._ready.acquire()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP counts threads for each thread
        try:
            self._body(self._pause)
            raise RuntimeError("a training loop ended before its time")
        except _Over:
            return
        except BaseException as error:
            self._error = error
            self._ready.release()

    def _pause(self) -> None:
        self._left -= 1
        if self._left > 0:
            return
        synchronize(self._device)
        self._ready.release()
        self._go.acquire()
        if self._over:
            raise _Over


class _HandOver(L.Callback):
    def __init__(self, pause: Callable[[], None]) -> None:
        self._pause = pause

    def on_train_batch_start(self, *_: Any) -> None:
        self._pause()


class _Built(App):
    """What `python -m app fit` builds, not run."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


def make_loops(
    plan: Plan, method: str, device: torch.device, folder: Path, with_plain: bool
) -> dict[str, Loop]:
    """The loops of one method, by the name of their case; all begin with the same weights."""
    built = _build(plan, method, device, folder)
    precision = built.trainer.precision
    loops: dict[str, Loop] = {}
    if with_plain:
        plain = copy.deepcopy(built.model)
        plain.network = _plain(plan)
        plain.blocks, plain.losses = {}, {}
        loops[PLAIN] = _bare_loop(plan, plain, device)
    if "bare" in plan.against:
        loops[f"{method}:bare"] = _bare_loop(plan, copy.deepcopy(built.model), device)
    if "lightning" in plan.against:
        trainer = L.Trainer(
            accelerator=device.type, devices=1, precision=precision, max_epochs=10**6,
            limit_val_batches=0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[CompileBlocks(plan.compile)] if plan.compile else None,
            gradient_clip_val=built.trainer.gradient_clip_val,
        )  # fmt: skip
        name = f"{method}:lightning"
        loops[name] = _fit_loop(trainer, copy.deepcopy(built.model), _images(plan), device)
    if "no_monitor" in plan.against:
        other = _build(plan, method, device, folder)
        other.trainer.callbacks = [
            each for each in other.trainer.callbacks if type(each).__name__ not in WATCHERS
        ]
        loops[f"{method}:no_monitor"] = _fit_loop(
            other.trainer, other.model, other.datamodule, device
        )
    loops[method] = _fit_loop(built.trainer, built.model, built.datamodule, device)
    return loops


def _build(plan: Plan, method: str, device: torch.device, folder: Path) -> App:
    network = _network(plan)
    arguments = [
        "fit",
        f"--config={_file('recipes', plan.recipe)}",
        f"--config={_file('methods', method)}",
        f"--name={method}",
        f"--runs={folder}",
        "--trainer.max_epochs=1000000",
        "--trainer.limit_val_batches=0",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
        f"--trainer.accelerator={device.type}",
        "--trainer.devices=1",
        f"--trainer.precision={'bf16-mixed' if plan.dtype == 'bf16' else '32-true'}",
        "--data=app.commands.benchmark.images.RandomImages",
        f"--data.batch_size={plan.batch_size}",
        f"--data.image_size={network['image_size']}",
        f"--data.channels={network.get('channels', 3)}",
        f"--data.classes={network['num_classes']}",
    ]
    built = _Built(expand(arguments))
    if plan.compile:
        built.trainer.callbacks.insert(0, CompileBlocks(plan.compile))
    for callback in built.trainer.callbacks:
        if isinstance(callback, AdaptiveExperts):
            # Record in every step, decide, and neither add nor remove: the load stays comparable.
            callback.window, callback.window_steps = (0.0, 1.0), None
            callback.min_unrouted_fraction = 0.999
    return built


def _images(plan: Plan) -> L.LightningDataModule:
    from .images import RandomImages

    network = _network(plan)
    return RandomImages(
        network["image_size"],
        network.get("channels", 3),
        network["num_classes"],
        batch_size=plan.batch_size,
    )


def _plain(plan: Plan) -> nn.Module:
    """timm's Vision Transformer in the sizes of the recipe."""
    network = _network(plan)
    pool = network.get("pool", "token")
    return timm_vit.VisionTransformer(
        img_size=network["image_size"],
        patch_size=network["patch_size"],
        in_chans=network.get("channels", 3),
        num_classes=network["num_classes"],
        embed_dim=network["dim"],
        depth=network["depth"],
        num_heads=network["heads"],
        mlp_ratio=network.get("mlp_ratio", 4.0),
        global_pool=pool,
        class_token=pool == "token",
    )


def _fit_loop(
    trainer: L.Trainer, task: nn.Module, data: L.LightningDataModule, device: torch.device
) -> Loop:
    def body(pause: Callable[[], None]) -> None:
        trainer.callbacks.append(_HandOver(pause))
        trainer.fit(task, data)

    return Loop(task, body, device)


def _bare_loop(plan: Plan, task: ImageClassification, device: torch.device) -> Loop:
    """Forward, loss, backward, step and nothing else, on the same batches."""

    def body(pause: Callable[[], None]) -> None:
        task.to(device).train()
        if plan.compile:
            compile_blocks(task.network, backend=plan.compile)
        optimizer = task.optimizer(parameter_groups(task.network))
        # Where the schedule of so long a fit begins, and stays: the routing hardly moves.
        scheduler = LambdaLR(optimizer, lambda step: 0.01)
        for images, labels in _batches(plan, device):
            pause()
            with torch.autocast(device.type, torch.bfloat16, enabled=plan.dtype == "bf16"):
                loss = F.cross_entropy(task.network(images), labels)
                loss = loss + _auxiliary_loss(task)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    return Loop(task, body, device)


def _batches(plan: Plan, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    data = _images(plan)
    data.device = device.type
    data.setup("fit")
    while True:
        yield from data.train_dataloader()


def _auxiliary_loss(task: ImageClassification) -> Tensor | float:
    return sum(
        weight * LOSSES[name](block.routing)
        for name, weight in task.losses.items()
        for block in task.blocks.values()
    )


# ---------------------------------------------------------------------- memory


def _add_memory(plan: Plan, device: torch.device, rows: list[Row]) -> None:
    """Adds `peak_bytes` of timm and the methods, and `memory_ratio`: over that of timm plus, for
    each further parameter, the weight and Adam's two averages."""
    spawn = multiprocessing.get_context("spawn")
    plain = rows[0]
    for row in rows:
        if ":" in row["case"]:
            continue
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            row["peak_bytes"] = pool.submit(_peak, plan, row["case"], device.type).result()
        if row["peak_bytes"] and plain["peak_bytes"]:
            further = row["parameters"] - plain["parameters"]
            row["memory_ratio"] = row["peak_bytes"] / (plain["peak_bytes"] + 3 * 4 * further)


def _peak(plan: Plan, case: str, device_type: str) -> int | None:
    """Most memory that a few steps of a case take, in a process that has done nothing else."""
    quiet_libraries()
    device = torch.device(device_type)
    method = plan.methods[0] if case == PLAIN else case
    if device.type == "cpu" and not _forget_peak():
        return None
    before = _resident("VmRSS")
    with tempfile.TemporaryDirectory() as folder, quiet_lightning():
        alone = replace(plan, against=())
        loops = make_loops(alone, method, device, Path(folder), with_plain=case == PLAIN)
        loop = loops[case]
        del loops
        with loop:
            loop.advance(3)
            if device.type == "cuda":
                return torch.cuda.max_memory_allocated()
            return _resident("VmHWM") - before


def _forget_peak() -> bool:
    """Lets Linux count the largest resident size of this process anew; False elsewhere."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident(key: str) -> int:
    """Resident memory of this process in bytes: VmRSS now, VmHWM at most; 0 where unknown."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(key + ":"))
