"""How near a router's gradient comes to that of the dense mixture, with and without default
vectors (Default MoE, arXiv 2504.12463): `python -m app router_gradients --ckpt_path FILE`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.errors import DataError

from ...errors import ConfigError
from ...moe import Dense, MoEBlock, moe_blocks
from ...moe.routers import SoftmaxRouter
from ...runs.checkpoints import read_checkpoint, rebuild
from ...tasks import LanguageModeling
from ..arguments import Parser, number, write_json

Mixture = Literal["plain", "default", "dense"]


@dataclass(frozen=True)
class Cosines:
    """Cosines of a router's weight gradient with that of the dense mixture.

    Attributes:
        plain: of the executed experts alone.
        default: of the executed experts and the default vectors of the others.
        explained: how well V_e stands in for what is not executed, 1 - sum ||E_e(x) - V_e||^2 /
            sum ||E_e(x)||^2 over the pairs that are not executed. 1: exactly; below 0: worse than
            nothing, and then `default` can't be expected to be above `plain`.
    """

    plain: float
    default: float
    explained: float


def router_gradient_cosines(network: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Cosines]:
    """Compares router gradients on the same weights and the same batch, layer by layer.

    The gradient of the dense mixture is that of y = sum over all active experts of p_e E_e(x), p
    the same router's softmax. All MoE layers change together; the network is in evaluation mode, so
    that neither dropout nor noise tells the passes apart, and is left as it was.

    Args:
        network: its MoE blocks have default vectors and a router over a softmax.
        loss: runs the network on the batch and returns the loss.

    Returns:
        The cosines by layer; nan where a gradient is zero.

    Raises:
        ValueError: a block without default vectors, or a router that has no dense mixture.
    """
    blocks = moe_blocks(network)
    for name, block in blocks.items():
        if block.default_vectors == "none" or not isinstance(block.router, SoftmaxRouter):
            raise ValueError(
                "router gradients are compared with default vectors and a router over a softmax "
                f"(TopK, TopP); {name} has default_vectors: {block.default_vectors} and the router "
                f"{type(block.router).__name__}"
            )
    if not blocks:
        raise ValueError("the network has no MoE block")
    plain = _gradients(network, blocks, loss, "plain")
    dense = _gradients(network, blocks, loss, "dense")
    inputs: dict[str, Tensor] = {}
    hooks = [
        block.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]}))
        for name, block in blocks.items()
    ]
    try:
        default = _gradients(network, blocks, loss, "default")
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: Cosines(
            _cosine(plain[i], dense[i]),
            _cosine(default[i], dense[i]),
            _explained(block, inputs[name]),
        )
        for i, (name, block) in enumerate(blocks.items())
    }


@contextmanager
def mixing(block: MoEBlock, mixture: Mixture) -> Iterator[None]:
    """Makes a block mix its experts in another way: `plain` without its default vectors, `dense`
    with all active experts executed, the router's weight shared."""
    router, default_vectors = block.router, block.default_vectors
    if mixture != "default":
        block.default_vectors = "none"
    if mixture == "dense":
        block.router = Dense(block.dim, block.slots)
        block.router.weight = router.weight
    try:
        yield
    finally:
        block.router, block.default_vectors = router, default_vectors


def _gradients(
    network: nn.Module, blocks: dict[str, MoEBlock], loss: Callable[[], Tensor], mixture: Mixture
) -> tuple[Tensor, ...]:
    """Gradients of the routers' weights; leaves every `.grad`, mode and record as it is."""
    weights = [block.router.weight for block in blocks.values()]
    records = [block.routing for block in blocks.values()]
    modes = [(module, module.training) for module in network.modules()]
    with ExitStack() as stack, torch.enable_grad():
        network.eval()
        for block in blocks.values():
            stack.enter_context(mixing(block, mixture))
        try:
            return torch.autograd.grad(loss(), weights)
        finally:
            for module, training in modes:
                module.training = training
            for block, routing in zip(blocks.values(), records, strict=True):
                block.routing = routing


@torch.no_grad()
def _explained(block: MoEBlock, x: Tensor) -> float:
    """See `Cosines.explained`; x (..., D) is the block's input."""
    x_TD = x.reshape(-1, block.dim)
    training = block.router.training
    routing = block.router.eval()(x_TD, block.active_E)
    block.router.train(training)
    pairs = replace(routing, mask_TE=~routing.mask_TE & block.active_E).pairs()
    y_ND = block.experts.of_pairs(x_TD[pairs.token_N], pairs)
    rest_ND = y_ND - block.default_ED[pairs.expert_N]
    return float(1.0 - rest_ND.square().sum() / y_ND.square().sum())


def _cosine(left: Tensor, right: Tensor) -> float:
    left, right = left.double().flatten(), right.double().flatten()
    return float(left @ right / (left.norm() * right.norm()))


def main(argv: Sequence[str]) -> int:
    """Prints the cosines of a trained network on validation samples.

    Returns:
        0; 2 after a mistake of the user's, told in one line on standard error.
    """
    parser = Parser(
        prog="python -m app router_gradients",
        description="Cosines of router gradients with those of the dense mixture, layer by layer.",
    )
    add = parser.add_argument
    add("--ckpt_path", required=True, type=Path, help="checkpoint of `python -m app fit`")
    add("--samples", type=number(int, 1), default=256, help="validation samples at most")
    add("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(list(argv))
    try:
        task, data = load_run(options.ckpt_path)
        data.prepare_data()
        data.setup("validate")
        batch = next(iter(data.val_dataloader()))
        cosines = router_gradient_cosines(task.network, _loss(task, batch, options.samples))
        if options.json:
            write_json(options.json, {name: asdict(each) for name, each in cosines.items()})
    except (ConfigError, DataError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{'layer':<12}{'plain':>9}{'default':>9}{'explained':>11}")
    for name, each in cosines.items():
        print(f"{name:<12}{each.plain:9.4f}{each.default:9.4f}{each.explained:11.3f}")
    return 0


def load_run(path: Path) -> tuple[L.LightningModule, L.LightningDataModule]:
    """Task (with its trained weights, on the CPU) and data module of a checkpoint.

    Raises:
        ConfigError: no such file, or no checkpoint of `python -m app fit`.
    """
    parts = {"model": L.LightningModule, "data": L.LightningDataModule}
    run = rebuild(path, read_checkpoint(path), **parts)
    return run["model"], run["data"]


def _loss(task: L.LightningModule, batch: Any, samples: int) -> Callable[[], Tensor]:
    """The task's cross-entropy on the first samples of a batch."""
    if isinstance(task, LanguageModeling):
        return lambda: task._loss(batch[:samples])
    images, labels = (part[:samples] for part in batch)
    return lambda: F.cross_entropy(task.network(images), labels)
