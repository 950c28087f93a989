"""Weights, gradients and optimizer state sharded over processes: PyTorch's FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..errors import ConfigError
from ..models.with_experts import transformer_blocks
from ..moe import Router


class FSDP2(ModelParallelStrategy):
    """Fully sharded data parallelism over all processes, on GPUs by NCCL and on CPUs by gloo.

    Every parameter is cut along its first axis, which for experts is the slot; a Transformer block
    is gathered for its forward and again for its backward pass. A checkpoint is one file with the
    whole weights and optimizer state, as any other strategy writes it: it is put together in the
    memory of the first process, and a run can go on with another number of processes or without
    sharding.
    """

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        # Lightning would make one tensor-parallel group of the devices of a node.
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()

    # Lightning numbers parameters as the module does where an optimizer does as its groups do (seen
    # in 2.6.6): with more than one group, moments would pass to other parameters between this
    # strategy and any other. And it leaves out the states of metrics.

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The whole state, numbered as every optimizer numbers it; empty but on the first process.

        All processes have to call.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(self.model, optimizer, options=options)
        if self.global_rank:
            return {}
        names = [name for group in state["param_groups"] for name in group["params"]]
        return _renamed(state, {name: number for number, name in enumerate(names)})

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads weights and optimizer state from a file that every process can read."""
        path = Path(self.broadcast(checkpoint_path))
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, checkpoint.pop("state_dict"), options=options)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        states = checkpoint.get("optimizer_states", [])
        for optimizer, state in zip(self.optimizers, states, strict=False):
            if not state["state"]:  # plain SGD, or before the first step
                continue
            order = [names[each] for group in optimizer.param_groups for each in group["params"]]
            state = _renamed(state, dict(enumerate(order)))
            set_optimizer_state_dict(self.model, optimizer, state, options=options)
        return checkpoint


def _renamed(state: dict[str, Any], keys: dict[Any, Any]) -> dict[str, Any]:
    """An optimizer's state dict with other keys for its parameters."""
    return {
        "state": {keys[key]: value for key, value in state["state"].items()},
        "param_groups": [
            group | {"params": [keys[key] for key in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def shard(network: nn.Module, mesh: DeviceMesh) -> None:
    """Shards a network and each of its Transformer blocks, in place.

    Args:
        network: sharded already, it is left as it is.
        mesh: Lightning's, of dimensions `data_parallel` and `tensor_parallel`.

    Raises:
        ConfigError: for a parameter that can't be sharded, being a single number.
    """
    if isinstance(network, FSDPModule):
        return
    for name, parameter in network.named_parameters():
        if not parameter.ndim:
            raise ConfigError(
                f"trainer.strategy: FSDP2 can't shard {name}, a single number; use the strategy "
                "ddp, or for a router's temperature set learn_temperature: false"
            )
    options: dict[str, Any] = {"mesh": mesh["data_parallel"]}
    for block in transformer_blocks(network):
        # Losses read routing vectors after the forward pass: these few weights stay until then.
        for module in block.modules():
            if isinstance(module, Router):
                fully_shard(module, reshard_after_forward=False, **options)
        fully_shard(block, **options)
    fully_shard(network, **options)
