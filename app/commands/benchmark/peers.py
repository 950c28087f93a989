"""Other libraries' MoE layers, where they are installed: the same sizes, top-K, gated experts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .moe import Sizes


class Skipped(Exception):
    """Why a peer takes no part."""


def _everything(x_TD: Tensor) -> float:
    return 1.0


@dataclass(frozen=True)
class Peer:
    """A layer of another library.

    Attributes:
        module: (T, D) -> (T, D).
        executed_share: of a batch: the pairs that it executes, over K T.
        note: for readers.
    """

    module: nn.Module
    executed_share: Callable[[Tensor], float] = _everything
    note: str = "dropless"


class Wrapped(nn.Module):
    """A layer that takes (1, T, D) and returns it, perhaps with more beside it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_TD: Tensor) -> Tensor:
        y = self.layer(x_TD[None])
        return (y[0] if isinstance(y, tuple) else y).view_as(x_TD)


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Skipped("not installed")


def _need_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Skipped("needs CUDA")


def mixtral(implementation: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Peer:
    """Mixtral's block of Hugging Face transformers, by one of its implementations."""
    _need("transformers")
    from transformers import MixtralConfig
    from transformers.models.mixtral import modeling_mixtral

    config = MixtralConfig(
        hidden_size=sizes.dim,
        intermediate_size=sizes.hidden,
        num_local_experts=sizes.experts,
        num_experts_per_tok=sizes.k,
        router_jitter_noise=0.0,
        experts_implementation=implementation,
    )
    if implementation != "eager" and not hasattr(modeling_mixtral, "use_experts_implementation"):
        raise Skipped("this version of transformers has no such implementation")
    layer = modeling_mixtral.MixtralSparseMoeBlock(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.02)
    return Peer(Wrapped(layer.to(device, dtype)).train())


def st_moe(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Peer:
    """st-moe-pytorch with its defaults: a capacity of 1.25, and a second expert by chance."""
    _need("st_moe_pytorch")
    from st_moe_pytorch import MoE

    layer = MoE(
        dim=sizes.dim,
        num_experts=sizes.experts,
        gating_top_n=sizes.k,
        # It makes the hidden width 2 / 3 of this multiple; a hair more, as it rounds down.
        expert_hidden_mult=1.5 * (sizes.hidden + 0.5) / sizes.dim,
    ).to(device, dtype)

    @torch.no_grad()
    def executed_share(x_TD: Tensor) -> float:
        dispatch = layer.gate(x_TD[None])[0]
        return float((dispatch != 0).sum()) / (sizes.k * len(x_TD))

    return Peer(Wrapped(layer).train(), executed_share, "drops pairs beyond its capacity")


class ScatterMoE(nn.Module):
    """Top-K routing in front of scattermoe's gated experts."""

    def __init__(self, experts: nn.Module, sizes: Sizes) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.dim, sizes.experts, bias=False)
        self.experts, self.k = experts, sizes.k

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_TK, kept_TK = self.router(x_TD).float().softmax(1).topk(self.k, dim=1)
        gate_TK = (gate_TK / gate_TK.sum(1, keepdim=True)).to(x_TD)
        return self.experts(x_TD, gate_TK, kept_TK)


def scattermoe(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Peer:
    """scattermoe (arXiv 2403.08245)."""
    _need_cuda(device)
    _need("scattermoe")
    from scattermoe.mlp import GLUMLP

    experts = GLUMLP(
        input_size=sizes.dim,
        hidden_size=sizes.hidden,
        num_experts=sizes.experts,
        top_k=sizes.k,
        activation=nn.SiLU(),
    )
    return Peer(ScatterMoE(experts, sizes).to(device, dtype).train())


def megablocks(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Peer:
    """megablocks' dropless layer (arXiv 2211.15841)."""
    _need_cuda(device)
    _need("megablocks")
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    arguments = Arguments(
        hidden_size=sizes.dim,
        ffn_hidden_size=sizes.hidden,
        moe_num_experts=sizes.experts,
        moe_top_k=sizes.k,
        moe_normalize_expert_weights=1,
        activation_fn=torch.nn.functional.silu,
        mlp_type="glu",
        mlp_impl="grouped" if importlib.util.find_spec("grouped_gemm") else "sparse",
        bias=False,
        return_bias=False,
        fp16=False,
        bf16=dtype == torch.bfloat16,
        device=device,
    )
    return Peer(Wrapped(dMoE(arguments).to(device, dtype)).train())


def _tried(make: Callable[..., Peer], *first: Any) -> Callable[..., Peer]:
    """A maker that also leaves a peer out which does not run in this version, and says why."""

    def tried(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Peer:
        try:
            peer = make(*first, sizes, device, dtype)
            x_TD = torch.randn(sizes.tokens, sizes.dim, device=device, dtype=dtype)
            peer.module(x_TD.requires_grad_()).sum().backward()
        except Skipped:
            raise
        except Exception as error:  # another library's fault must not end the benchmark
            message = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Skipped(f"it fails here ({message})") from error
        return peer

    return tried


PEERS: dict[str, Callable[[Sizes, torch.device, torch.dtype], Peer]] = {
    "mixtral_eager": _tried(mixtral, "eager"),
    "mixtral_grouped": _tried(mixtral, "grouped_mm"),
    "st_moe": _tried(st_moe),
    "scattermoe": _tried(scattermoe),
    "megablocks": _tried(megablocks),
}
