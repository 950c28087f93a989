"""Networks of timm and of transformers by name, with experts in their feed-forward layers."""

from __future__ import annotations

import contextlib
import difflib
import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from torch import Tensor, nn

from ..moe import MoEBlock
from .with_experts import with_experts


class TimmClassifier(nn.Module):
    """Any timm image classifier with Transformer blocks: ViT, DeiT, EVA-02, DINOv2, Swin, BEiT ...

    Args:
        name: of the model, as timm knows it, such as deit3_small_patch16_224.fb_in22k_ft_in1k.
        num_classes: classes of the head.
        pretrained: true for the weights of that name, from the hub or its cache; a path of a local
            file with them; false to start from random weights.
        layers: which feed-forward layers become MoE blocks: indices from 0, {every: n}, {last: n},
            null for all, [] for none.
        moe: the MoE block; called with (dim, hidden).
        start: experts start as `copies` of the layer that they replace, or `anew`.
        options: further arguments of timm.create_model, such as {img_size: 32, patch_size: 4,
            drop_path_rate: 0.1, in_chans: 1}.

    Raises:
        ValueError: for a name that timm doesn't know, options that it refuses, or weights that
            can't be had or don't fit.
    """

    def __init__(
        self,
        name: str,
        num_classes: int = 10,
        pretrained: bool | str = False,
        layers: list[int] | dict[str, int] | None = None,
        moe: Callable[[int, int], nn.Module] = MoEBlock,
        start: Literal["copies", "anew"] = "copies",
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not timm.is_model(name.split(".")[0]):
            near = difflib.get_close_matches(name.split(".")[0], timm.list_models(), 4)
            raise ValueError(f"name: timm has no model {name}; near it: {', '.join(near) or '-'}")
        given = dict(options or {})
        if isinstance(pretrained, str):
            file = Path(pretrained).expanduser()
            if not file.is_file():
                raise ValueError(f"pretrained: there is no file {file}")
            given["pretrained_cfg_overlay"] = {"file": str(file)}
        with _told(f"{name}: pretrained weights", bool(pretrained)):
            self.model = timm.create_model(
                name, pretrained=bool(pretrained), num_classes=num_classes, **given
            )
        self.num_classes = num_classes
        with_experts(self.model, moe, layers, start)

    @property
    def patch_embed(self) -> nn.Module | None:
        """What cuts the image into patches, where the model has that."""
        return getattr(self.model, "patch_embed", None)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches: class token and registers."""
        return getattr(self.model, "num_prefix_tokens", 0)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) -> logits (B, num_classes)."""
        return self.model(images)


class HFCausalLM(nn.Module):
    """Any causal language model of transformers with the usual feed-forward: GPT-2, Llama, Qwen ...

    Args:
        name: of the model on the hub, or a local folder with its config.json.
        pretrained: whether to start from its weights; random ones else.
        layers: which feed-forward layers become MoE blocks: indices from 0, {every: n}, {last: n},
            null for all, [] for none.
        moe: the MoE block; called with (dim, hidden).
        start: experts start as `copies` of the layer that they replace, or `anew`.
        options: changes to the model's config, such as {attention_dropout: 0.1}.

    Attributes:
        vocab_size: number of token ids V.
        max_length: longest sequence.

    Raises:
        ValueError: where transformers is missing, or the model can't be had.
    """

    def __init__(
        self,
        name: str,
        pretrained: bool = True,
        layers: list[int] | dict[str, int] | None = None,
        moe: Callable[[int, int], nn.Module] = MoEBlock,
        start: Literal["copies", "anew"] = "copies",
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        transformers = import_transformers()
        with _told(name, True):
            config = transformers.AutoConfig.from_pretrained(name, **(options or {}))
            auto = transformers.AutoModelForCausalLM
            if pretrained:
                self.model = auto.from_pretrained(name, config=config, dtype=torch.float32)
            else:
                self.model = auto.from_config(config)
        self.vocab_size = config.vocab_size
        self.max_length = config.max_position_embeddings
        with_experts(self.model, moe, layers, start)

    def new_cache(self) -> Any:
        """An empty key/value cache."""
        return _cache_class()()

    def forward(self, tokens_BS: Tensor, cache: Any = None) -> Tensor:
        """Logits of the token after each position (B, S, V); see `Decoder.forward`."""
        return self.model(
            input_ids=tokens_BS, past_key_values=cache, use_cache=cache is not None
        ).logits


def import_transformers() -> Any:
    """The package, or a ValueError that says how to install it."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            "models of transformers need the package: pip install -e '.[language]'"
        ) from error
    return transformers


def _cache_class() -> type:
    from transformers import DynamicCache

    class Cache(DynamicCache):
        """transformers' cache with the attribute that `sampling.generate` reads."""

        @property
        def length(self) -> int:
            return self.get_seq_length()

    return Cache


@contextlib.contextmanager
def _told(what: str, from_hub: bool) -> Iterator[None]:
    """Turns what a library raises while it makes a model into one line."""
    log = logging.getLogger("transformers")
    level, quiet = log.level, io.StringIO()
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(quiet):
            yield
    except Exception as error:  # downloads, damaged files and wrong options raise anything
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
        hint = (
            "; without a network, give a local folder or file, or set pretrained to false"
            if from_hub
            else ""
        )
        raise ValueError(f"{what}: could not be made: {reason.strip()}{hint}") from error
    finally:
        log.setLevel(level)
