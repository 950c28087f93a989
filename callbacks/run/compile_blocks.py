"""torch.compile for the dense parts of a network."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from app.models.with_experts import transformer_blocks


def compile_blocks(network: nn.Module, **options: Any) -> None:
    """Compiles every Transformer block in place; MoE blocks inside them run as they are, as
    `MoEBlock.forward` is left out of compilation.

    What lies around the experts (norms, attention, residuals) becomes one graph before and one
    after them. Blocks of one kind share the compiled code, and since sizes of expert slices never
    enter a graph, nothing is compiled anew when the routing changes or experts come and go.

    Args:
        network: has Transformer blocks.
        **options: of torch.compile.
    """
    for block in transformer_blocks(network):
        block.compile(**options)


class CompileBlocks(L.Callback):
    """Compiles the Transformer blocks around the experts before training.

    Pays on GPUs, where it fuses the many small operations between the matrix products; the first
    step takes about a minute longer. Needs a C++ compiler on CPUs.

    Args:
        backend: of torch.compile.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self.backend = backend

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not transformer_blocks(pl_module.network):
            raise MisconfigurationException(
                f"CompileBlocks: {type(pl_module.network).__name__} has no Transformer blocks; "
                "remove the callback"
            )
        compile_blocks(pl_module.network, backend=self.backend)
