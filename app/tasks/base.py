"""What training an MoE network takes, whatever its modality."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ..errors import ConfigError
from ..moe import LOSSES, MoEBlock, Router, moe_blocks
from ..moe.losses import load_balance
from .samples import ImageSamples, TextSamples
from .sharding import shard

NO_END = "model.schedule needs an end: set trainer.max_epochs or trainer.max_steps"


class MoETask(L.LightningModule):
    """Optimizer, schedule and auxiliary losses of a network with MoE blocks.

    Args:
        network: the network to train.
        optimizer: optimizer class; weight decay applies to matrices only.
        schedule: `cosine` down to 1 % of the learning rate, or `constant`; both after `warmup`.
        warmup: share of all optimizer steps over which the learning rate rises linearly.
        losses: weights of auxiliary losses, by name, summed over the MoE layers.
        balance_over: what the load of the load-balance loss is counted over: the `batch` of one
            process, the batches of all `ranks`, or all micro-batches of a `step` on all ranks.

    Raises:
        ValueError: for a loss that is unknown or not defined for the network's router.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        schedule: Literal["cosine", "constant"] = "cosine",
        warmup: float = 0.05,
        losses: dict[str, float] | None = None,
        balance_over: Literal["batch", "ranks", "step"] = "batch",
    ) -> None:
        super().__init__()
        if not 0.0 <= warmup < 1.0:
            raise ValueError(f"warmup is a share of all steps in [0, 1), got {warmup}")
        self.network = network
        self.optimizer, self.schedule, self.warmup = optimizer, schedule, warmup
        self.losses, self.balance_over = dict(losses or {}), balance_over
        unknown = set(self.losses) - set(LOSSES)
        if unknown:
            raise ValueError(f"losses: no loss {min(unknown)!r}; there are {', '.join(LOSSES)}")
        self.blocks = moe_blocks(network)
        self._step_load: dict[str, Tensor] = {}
        self._optimizer_settings: list[dict[str, Any]] = []
        self._stop_later = False
        for name, block in self.blocks.items():
            self._check_losses(name, block)

    def _check_losses(self, name: str, block: MoEBlock) -> None:
        training = block.router.training
        with torch.no_grad():
            routing = block.router.eval()(torch.zeros(1, block.dim), block.active_E)
            for loss in self.losses:
                try:
                    LOSSES[loss](routing)
                except ValueError as error:
                    router = type(block.router).__name__
                    raise ValueError(f"losses: {error}; {name} has a {router} router") from None
        block.router.train(training)

    def configure_model(self) -> None:
        """Shards the network where the strategy asks for it (app.sharding.FSDP2)."""
        if self.device_mesh is not None:
            shard(self.network, self.device_mesh)

    def on_train_start(self) -> None:
        """Has the configured optimizer settings win over those of a checkpoint."""
        self._let_fused_optimizers_clip()
        for scheduled, optimizer in zip(
            self.trainer.lr_scheduler_configs, self.trainer.optimizers, strict=False
        ):
            scheduler = scheduled.scheduler
            for group, settings in zip(
                optimizer.param_groups, self._optimizer_settings, strict=False
            ):
                group |= settings | {"initial_lr": settings["lr"]}
                group["lr"] *= self._rate(scheduler.last_epoch)
            scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]

    def _let_fused_optimizers_clip(self) -> None:
        """Lets fused optimizers go with gradient clipping in mixed precision.

        Inside its step, where clipping comes too late, a fused optimizer would unscale the
        gradients itself; Lightning refuses the pair, also in bfloat16, where nothing is scaled.
        Without this mark the scaler unscales them first, as for any other optimizer.
        """
        if self.trainer.gradient_clip_val:
            for optimizer in self.trainer.optimizers:
                optimizer._step_supports_amp_scaling = False

    def auxiliary_loss(self, batch_idx: int) -> Tensor:
        """Weighted sum of the auxiliary losses of the last forward pass; logs each."""
        total = torch.zeros((), device=self.device)
        shared = dist.is_available() and dist.is_initialized() and self.balance_over != "batch"
        mean = _mean_over_processes if shared else None
        for loss, weight in self.losses.items():
            values = [
                load_balance(block.routing, self._balance_load(name, block, batch_idx), mean)
                if loss == "load_balance"
                else LOSSES[loss](block.routing)
                for name, block in self.blocks.items()
            ]
            if values:
                value = torch.stack(values).sum()
                total = total + weight * value
                self.log(f"train/aux/{loss}", value.detach(), on_step=True, on_epoch=False)
        return total

    def _balance_load(self, name: str, block: MoEBlock, batch_idx: int) -> Tensor:
        load_E = block.routing.load_E()
        if self.balance_over == "batch":
            return load_E
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(load_E)
        if self.balance_over == "step":
            if batch_idx % self.trainer.accumulate_grad_batches:
                load_E = load_E + self._step_load.get(name, 0.0)
            self._step_load[name] = load_E
        return load_E

    def samples(self, batch: Any, count: int) -> ImageSamples | TextSamples | None:
        """Up to `count` samples of a validation batch, spread over it, in a form to look at."""
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Runs after the callbacks have read the routings: lets go of their memory."""
        for block in self.blocks.values():
            block.forget()
        self._stop_between_steps()

    def on_validation_end(self) -> None:
        """Runs after the callbacks, which may have asked for a stop."""
        self._stop_between_steps()

    def _stop_between_steps(self) -> None:
        """Puts off a stop within an optimizer step, whose gradients no checkpoint holds."""
        trainer = self.trainer
        if trainer.state.fn != "fit":
            return
        if trainer.fit_loop._should_accumulate():
            self._stop_later |= trainer.should_stop
            trainer.should_stop = False
        elif self._stop_later:
            self._stop_later, trainer.should_stop = False, True

    def configure_optimizers(self) -> dict[str, Any]:
        """Optimizer over two groups (with and without weight decay), schedule by step."""
        if self.trainer.max_epochs == -1 and self.trainer.max_steps == -1:
            raise ConfigError(NO_END)
        try:
            optimizer = self.optimizer(parameter_groups(self.network))
        except ValueError as error:
            raise ConfigError(f"model.optimizer: {error}") from error
        self._optimizer_settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        scheduler = LambdaLR(optimizer, self._rate)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "lr"},
        }

    def _rate(self, step: int) -> float:
        """Learning rate at an optimizer step, over its peak."""
        # Lightning asks for step 0 before it knows the number of batches. (Its own
        # `estimated_stepping_batches` would set the loaders up too early for an exact resume.)
        if step == 0:
            return 0.01 if self.warmup else 1.0
        total = self.total_steps()
        warm = self.warmup * total
        if step < warm:
            return 0.01 + 0.99 * step / warm
        if self.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warm) / max(1.0, total - warm))
        return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * done))

    def total_steps(self) -> int:
        """Optimizer steps of the whole fit."""
        trainer = self.trainer
        by_steps = trainer.max_steps if trainer.max_steps and trainer.max_steps > 0 else math.inf
        by_epochs = math.inf
        if trainer.max_epochs and trainer.max_epochs > 0:
            batches = trainer.num_training_batches
            if batches != math.inf:
                batches = math.ceil(batches / trainer.accumulate_grad_batches)
            by_epochs = batches * trainer.max_epochs
        total = min(by_steps, by_epochs)
        if total == math.inf:
            raise ConfigError(NO_END)
        return int(total)


def _mean_over_processes(tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def parameter_groups(network: nn.Module) -> list[dict[str, Any]]:
    """Two optimizer groups: weight decay for the matrices of linear layers, convolutions and
    experts; none for norms, biases, embeddings, routers, thresholds and default vectors."""
    decayed = set()
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            decayed.add(module.weight)
        elif isinstance(module, MoEBlock):
            for experts in filter(None, (module.experts, module.shared)):
                decayed.update(p for p in experts.parameters() if p.ndim == 3)
    for module in network.modules():  # a tied output layer is an embedding; a router is no matrix
        if isinstance(module, Router | nn.Embedding):
            decayed.difference_update(module.parameters())
    parameters: Iterable[nn.Parameter] = [p for p in network.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p in decayed]},
        {"params": [p for p in parameters if p not in decayed], "weight_decay": 0.0},
    ]
