"""Guards against numbers that stop being finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from app.errors import DivergedError
from app.moe import Experts, MoEBlock, Routing, moe_blocks
from app.moe.sharded import is_sharded


@dataclass(frozen=True)
class Verdict:
    """What was finite in one optimizer step, over all processes and micro-batches.

    Attributes:
        step: number of the step, from 1.
        names: what was looked at, in the order in which it was computed.
        finite: a flag for each, in the memory of the host.
        copied: CUDA event after which `finite` may be read; None if it may at once.
    """

    step: int
    names: list[str]
    finite: Tensor
    copied: Any

    def first_bad(self) -> str | None:
        """The first that was not finite, or None; waits for the copy to the host."""
        if self.copied is not None:
            self.copied.synchronize()
        return next(
            (n for n, ok in zip(self.names, self.finite.tolist(), strict=True) if not ok), None
        )


class NumericalGuards(L.Callback):
    """Stops, or skips updates, when losses or gradients are not finite; keeps checkpoints good.

    Looks at every training batch: the batch, the output of each layer, the loss and the gradient of
    each parameter, all by their sums or norms (one that overflows counts as not finite). All
    processes judge together. On a GPU nobody waits for it: what was found is copied to the host in
    the background and read one step later. Elsewhere, and where updates are skipped, it is read
    before the update. Gradients under a loss scaler (16-mixed) are the scaler's to judge.

    A checkpoint whose weights or optimizer state are not finite is never written.

    Args:
        nonfinite: `stop` the run with the step, the first thing that was not finite and the last
            good checkpoint; or `skip` the update, and stop after `max_skips` in a row. Skipping
            makes the host wait for the GPU in every step.
        max_skips: how many updates in a row are skipped at most.
        check_layers: to look closer, at a cost: every module, and of MoE blocks the router's
            logits, thresholds, gates, default vectors and expert outputs; before each update.
    """

    def __init__(
        self,
        nonfinite: Literal["stop", "skip"] = "stop",
        max_skips: int = 10,
        check_layers: bool = False,
    ) -> None:
        if nonfinite not in ("stop", "skip"):
            raise ValueError(f"nonfinite must be stop or skip, got {nonfinite!r}")
        if max_skips < 0:
            raise ValueError(f"max_skips must be 0 or more, got {max_skips}")
        self.nonfinite, self.max_skips, self.check_layers = nonfinite, max_skips, check_layers
        self.skipped: list[int] = []
        self.lag = 0
        self._in_a_row = 0
        self._hooks: list[Any] = []
        self._sums: dict[str, Tensor] = {}  # of this batch
        self._names: list[str] = []
        self._finite: Tensor | None = None  # of this step's batches so far
        self._pending: list[Verdict] = []

    # ------------------------------------------------------------------ watching

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        lazy = pl_module.device.type == "cuda" and self.nonfinite == "stop"
        self.lag = int(lazy and not self.check_layers)
        network = getattr(pl_module, "network", pl_module)
        self._hooks = [network.register_forward_pre_hook(self._see_batch)]
        if self.check_layers:  # first: their names say more than "output"
            for name, block in moe_blocks(network).items():
                for module, see in (
                    (block.router, partial(self._see_routing, name)),
                    (block.experts, partial(self._see_experts, name)),
                    (block, partial(self._see_defaults, name)),
                ):
                    self._hooks.append(module.register_forward_hook(see))
        for name, module in network.named_modules() if self.check_layers else _layers(network):
            if name and not isinstance(module, nn.Identity):
                see = partial(self._see_output, f"the output of {name}")
                self._hooks.append(module.register_forward_hook(see))

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _see(self, name: str, value: Any) -> None:
        if torch.is_grad_enabled() and isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach()
            wide = value if value.dtype.itemsize > 2 else value.float()
            self._sums.setdefault(name, wide.sum().float())

    def _see_batch(self, network: nn.Module, inputs: tuple[Any, ...]) -> None:
        if network.training:
            self._sums = {}
            self._see("the batch", inputs[0] if inputs else None)

    def _see_output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if module.training:
            self._see(name, output)

    def _see_routing(self, name: str, router: nn.Module, inputs: Any, routing: Routing) -> None:
        if not router.training:
            return
        for what, value in routing.watched().items():  # -inf stands for slots not in use
            used = value.detach().nan_to_num(torch.nan, torch.inf, 0.0)
            self._see(f"the {what} of {name}", used)

    def _see_experts(self, name: str, experts: Experts, inputs: Any, outputs: list[Tensor]) -> None:
        if experts.training:
            sums = torch.stack([each.detach().float().sum() for each in outputs])
            self._see(f"the expert outputs of {name}", sums)

    def _see_defaults(self, name: str, block: MoEBlock, inputs: Any, output: Any) -> None:
        if block.training:
            self._see(f"the default vectors of {name}", getattr(block, "default_ED", None))

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        self._see("the loss", loss)
        finite = torch.stack(list(self._sums.values())).isfinite()
        self._names, self._sums = list(self._sums), {}
        self._finite = finite if self._finite is None else self._finite & finite

    # ------------------------------------------------------------------ judging

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        named = [(n, p) for n, p in pl_module.named_parameters() if p.grad is not None]
        names, finite = self._names, self._finite
        self._finite = None
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        if named and not scaled:
            norms = torch._foreach_norm([_local(p.grad) for _, p in named])
            names = names + [
                f"the gradient of {name.removeprefix('network.')}" for name, _ in named
            ]
            finite = torch.cat([finite, torch.stack([n.float() for n in norms]).isfinite()])
        self._pending.append(_judge(trainer.global_step + 1, names, finite))
        while len(self._pending) > self.lag:
            self._act(trainer, pl_module, self._pending.pop(0))

    def _act(self, trainer: L.Trainer, module: L.LightningModule, verdict: Verdict) -> None:
        bad = verdict.first_bad()
        if bad is None:
            self._in_a_row = 0
            return
        what = f"step {verdict.step}: {bad} is not finite"
        if self.nonfinite == "stop" or self._in_a_row >= self.max_skips:
            again = f", after {self._in_a_row} skipped updates in a row" if self._in_a_row else ""
            raise DivergedError(f"{what}{again}; training stops. {_last_good(trainer)}")
        for parameter in module.parameters():
            parameter.grad = None  # an optimizer passes over it: no momentum, no decay
        self._in_a_row += 1
        self.skipped.append(verdict.step)
        rank_zero_warn(f"{what}; its update is skipped ({len(self.skipped)} so far)")
        for logger in trainer.loggers:
            logger.log_metrics({"guards/skipped": len(self.skipped)}, step=trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._settle(trainer, pl_module)

    def _settle(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Reads what is still on its way."""
        while self._pending:
            self._act(trainer, module, self._pending.pop(0))

    # ------------------------------------------------------------------ checkpoints

    @torch.no_grad()
    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._settle(trainer, pl_module)
        kept = dict(_kept(trainer, pl_module))
        if kept:
            sums = torch.stack([_local(value).sum().float() for value in kept.values()])
            bad = _judge(trainer.global_step, list(kept), sums.isfinite()).first_bad()
            if bad:
                raise DivergedError(
                    f"step {trainer.global_step}: {bad} is not finite; no checkpoint of it is "
                    f"written and training stops. {_last_good(trainer)}"
                )

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = list(state["skipped"])


def _layers(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a network in a user's words: its children, blocks one by one."""
    for name, child in network.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from ((f"{name}.{inner}", module) for inner, module in child.named_children())
        else:
            yield name, child


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if is_sharded(tensor) else tensor


def _judge(step: int, names: list[str], finite: Tensor) -> Verdict:
    """Agrees with all processes on what was finite, and brings it to the host."""
    finite = finite.to(torch.uint8)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    if finite.device.type != "cuda":
        return Verdict(step, names, finite.cpu(), None)
    host = torch.empty(finite.shape, dtype=finite.dtype, pin_memory=True)
    host.copy_(finite, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return Verdict(step, names, host, copied)


def _kept(trainer: L.Trainer, module: L.LightningModule) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint keeps of floating-point numbers: weights, buffers, optimizer state."""
    for name, value in module.state_dict().items():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield name.removeprefix("network."), value
    names = {id(p): n.removeprefix("network.") for n, p in module.named_parameters()}
    for optimizer in trainer.optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
                    yield f"the optimizer's {key} of {names.get(id(parameter), '?')}", value


def _last_good(trainer: L.Trainer) -> str:
    """A sentence that names the newest checkpoint of this run."""
    paths = {trainer.ckpt_path}
    for each in trainer.checkpoint_callbacks:
        paths |= {getattr(each, name, None) for name in ("last_model_path", "best_model_path")}
    files = [Path(path) for path in paths if path and Path(path).exists()]
    if not files:
        return "No checkpoint was written before; try a lower learning rate or gradient clipping"
    newest = max(files, key=lambda path: path.stat().st_mtime_ns)
    return (
        f"The last good checkpoint is {newest}; go on from it with --ckpt_path and a lower "
        "learning rate, gradient clipping or --guards.nonfinite skip"
    )
