"""timm's Vision Transformer with the MLPs of chosen blocks replaced by MoE blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import timm
import timm.models.vision_transformer as timm_vit
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..moe import MoEBlock
from ..moe.slots import upcycle


class VisionTransformer(timm_vit.VisionTransformer):
    """A timm ViT, any size, in which `moe_blocks` carry experts.

    The defaults are ViT-S at patch 4 on 32 x 32 images with MoE layers in blocks 8 and 10 of 12
    (counted from 0), as in the vision experiments of DynMoE (arXiv 2405.14297).

    Args:
        num_classes: classes of the head.
        image_size: height and width of the images, in pixels.
        patch_size: height and width of a patch, in pixels.
        channels: channels of the images.
        dim: model width D.
        depth: number of Transformer blocks.
        heads: attention heads; must divide `dim`.
        mlp_ratio: hidden width of the feed-forward layers over `dim`.
        drop_rate: dropout before the head.
        drop_path: largest stochastic-depth rate, reached in the last block.
        pool: `token` reads the class token, `avg` averages the patches (no class token then).
        moe: the MoE block; called with (dim, hidden).
        moe_blocks: which blocks' MLPs are replaced, counted from 0; [] for a dense network.
        pretrained: weights to start from: a local file (.safetensors, or a state dict saved by
            torch) or the name of a timm model to download. Experts start as copies of the MLP that
            they replace (sparse upcycling); position and patch embeddings are resampled where the
            sizes differ, a head of another number of classes is left out.

    Raises:
        ValueError: for sizes that do not fit together, a block number out of range, or pretrained
            weights that are missing, damaged or of another architecture.
    """

    def __init__(
        self,
        num_classes: int = 10,
        image_size: int = 32,
        patch_size: int = 4,
        channels: int = 3,
        dim: int = 384,
        depth: int = 12,
        heads: int = 6,
        mlp_ratio: float = 4.0,
        drop_rate: float = 0.0,
        drop_path: float = 0.0,
        pool: Literal["token", "avg"] = "token",
        moe: Callable[[int, int], nn.Module] = MoEBlock,
        moe_blocks: list[int] | tuple[int, ...] = (8, 10),
        pretrained: str | None = None,
    ) -> None:
        if image_size % patch_size:
            raise ValueError(
                f"image_size {image_size} is not a multiple of patch_size {patch_size}"
            )
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}")
        for index in moe_blocks:
            if not 0 <= index < depth:
                raise ValueError(f"moe_blocks: there is no block {index} among {depth} (from 0)")
        super().__init__(
            img_size=image_size,
            patch_size=patch_size,
            in_chans=channels,
            num_classes=num_classes,
            embed_dim=dim,
            depth=depth,
            num_heads=heads,
            mlp_ratio=mlp_ratio,
            drop_rate=drop_rate,
            drop_path_rate=drop_path,
            global_pool=pool,
            class_token=pool == "token",
        )
        for index in sorted(set(moe_blocks)):
            self.blocks[index].mlp = moe(dim, int(dim * mlp_ratio))
        if pretrained is not None:
            self._start_from(pretrained)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Images (B, channels, image_size, image_size) -> logits (B, num_classes)."""
        # Backwards in bfloat16 on a CPU, torch's fused attention takes five times as long as in
        # float32 (seen in 2.14), and plain products are the fastest for so few patches.
        plain = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
        for block in self.blocks:
            block.attn.fused_attn = not plain
        return super().forward(x, attn_mask)

    def _start_from(self, pretrained: str) -> None:
        weights = timm_vit.checkpoint_filter_fn(read_weights(pretrained), self)
        for index, block in enumerate(self.blocks):
            if _is_moe(block):
                mlp = {
                    ours: weights.pop(f"blocks.{index}.mlp.{theirs}", None)
                    for ours, theirs in MLP_NAMES.items()
                }
                if any(value is None for value in mlp.values()):
                    raise ValueError(f"pretrained: {pretrained} has no MLP in block {index}")
                upcycle(block.mlp, mlp)
        own = self.state_dict()
        if "head.weight" in weights and weights["head.weight"].shape != own["head.weight"].shape:
            weights = {k: v for k, v in weights.items() if not k.startswith("head.")}
        optional = tuple(f"blocks.{i}.mlp" for i, b in enumerate(self.blocks) if _is_moe(b))
        missing = [k for k in own if k not in weights and not k.startswith(("head.", *optional))]
        wrong = [k for k, v in weights.items() if k not in own or v.shape != own[k].shape]
        if missing or wrong:
            raise ValueError(
                f"pretrained: {pretrained} is of another architecture; it lacks "
                f"{missing[:3] or 'nothing'} and does not fit in {wrong[:3] or 'nothing'}"
            )
        self.load_state_dict(weights, strict=False)


MLP_NAMES = {
    "up": "fc1.weight",
    "up_bias": "fc1.bias",
    "down": "fc2.weight",
    "down_bias": "fc2.bias",
}
"""Parameters of an expert, and what they are called in timm's MLP."""


def _is_moe(block: nn.Module) -> bool:
    return isinstance(block.mlp, MoEBlock)


def read_weights(source: str) -> dict[str, Tensor]:
    """A state dict from a local file, or else from timm's model of that name.

    Raises:
        ValueError: if there is neither, or the file is damaged.
    """
    path = Path(source)
    if not path.exists():
        if not timm.is_model(source.split(".")[0]):
            raise ValueError(f"pretrained: there is neither a file nor a timm model {source}")
        try:
            return timm.create_model(source, pretrained=True).state_dict()
        except Exception as error:  # whatever a failed download raises
            raise ValueError(
                f"pretrained: the weights of {source} could not be downloaded ({error}); save them "
                "to a file where there is a network and give its path"
            ) from error
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # bytes that are no state dict make the readers raise anything
        raise ValueError(f"pretrained: {source} is damaged or holds no weights") from error
    weights = weights.get("state_dict", weights) if isinstance(weights, dict) else {}
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"pretrained: {source} holds no state dict")
    return weights
