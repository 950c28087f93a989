"""timm's Vision Transformer with the MLPs of chosen blocks replaced by MoE blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import timm.models.vision_transformer as timm_vit
from torch import nn

from ..moe import MoEBlock


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

    Raises:
        ValueError: for sizes that do not fit together or a block number out of range.
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
