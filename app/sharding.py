"""Weights, gradients and optimizer state sharded over processes: PyTorch's FSDP2."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from .errors import ConfigError
from .moe import Router


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


def shard(network: nn.Module, mesh: DeviceMesh) -> None:
    """Shards a network whose Transformer blocks are called `blocks`, in place.

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
    for block in network.blocks:
        # Losses read routing vectors after the forward pass: these few weights stay until then.
        for module in block.modules():
            if isinstance(module, Router):
                fully_shard(module, reshard_after_forward=False, **options)
        fully_shard(block, **options)
    fully_shard(network, **options)
