"""A bounded sample of validation data, of images or of text (shape legend in app/moe/routing.py).

Further suffixes: n samples (images, or sequences of tokens).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data.text.module import IGNORED
from data.text.tokenizers import Tokenizer

from ...errors import ConfigError
from ...tasks import ImageClassification, LanguageModeling


@dataclass(frozen=True)
class Sample:
    """Validation samples.

    Attributes:
        inputs: images (n, C, H, W), or token ids (n, S) with a negative id where no token is.
        targets: labels (n,), or the next tokens (n, S) with -100 where none is known.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def is_text(self) -> bool:
        """Whether the samples are sequences of tokens."""
        return self.targets.ndim == 2

    def batches(self, size: int, device: torch.device) -> Iterator[Sample]:
        """The same samples in order, at most `size` at a time, on a device."""
        for inputs, targets in zip(self.inputs.split(size), self.targets.split(size), strict=True):
            yield Sample(inputs.to(device), targets.to(device))

    def losses_n(self, network: nn.Module) -> Tensor:
        """Cross-entropy of each sample, summed over its predictions: float64 (n,), on the CPU."""
        # A place that is no token is read as token 0: causality keeps it from all real ones.
        logits = network(self.inputs.clamp_min(0) if self.is_text else self.inputs)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(
            logits.movedim(-1, 1), self.targets, ignore_index=IGNORED, reduction="none"
        )
        return losses.cpu().double().reshape(len(self), -1).sum(1)

    def predictions_n(self) -> Tensor:
        """How many predictions of each sample count, 1 for an image: float64 (n,), on the CPU."""
        return (self.targets.cpu() != IGNORED).double().reshape(len(self), -1).sum(1)

    def group_T(self, tokens: int) -> Tensor:
        """What each of the network's tokens belongs to: its image's label, or its own id (T,).

        Args:
            tokens: T, all samples together; every image has equally many, its class token included.

        Returns:
            int64; negative at places that are no token.
        """
        if self.is_text:
            return self.inputs.flatten()
        return self.targets.repeat_interleave(tokens // len(self))


def draw_sample(loader: Iterable[Any], count: int, seed: int = 0) -> Sample:
    """Draws validation samples at random, without replacement, in the order of the data.

    Every sample of the loader gets a random key, and the smallest keys stay: one pass, whatever the
    length, and folders sorted by class give all of their classes.

    Args:
        loader: batches of (images, labels), or of token ids (B, S + 1).
        count: samples to draw; all, if there are fewer.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    kept: list[Tensor] = []
    for batch in loader:
        parts = (batch[:, :-1], batch[:, 1:]) if isinstance(batch, Tensor) else tuple(batch)
        keys = torch.rand(len(parts[0]), generator=generator, dtype=torch.float64)
        new = [keys, *(part.cpu() for part in parts)]
        if kept:
            new = [torch.cat(pair) for pair in zip(kept, new, strict=True)]
        best = new[0].argsort()[:count].sort().values
        kept = [part[best] for part in new]
    return Sample(kept[1], kept[2])


def check_fits(task: L.LightningModule, data: L.LightningDataModule) -> None:
    """Checks that a task is one of those that can be sampled, and its data what it can read.

    Args:
        task: with its trained weights.
        data: set up.

    Raises:
        ConfigError: if not.
    """
    if isinstance(task, LanguageModeling):
        return
    if not isinstance(task, ImageClassification):
        raise ConfigError(
            f"ckpt_path: analyze reads ImageClassification and LanguageModeling, not "
            f"{type(task).__name__}"
        )
    given, known = getattr(data, "num_classes", 0), task.network.num_classes
    if given > known:
        raise ConfigError(
            f"data: it has {given} classes and the network {known}; give the data that the model "
            "was trained on"
        )


def group_names(data: L.LightningDataModule, group_G: Tensor, is_text: bool) -> list[str]:
    """What classes, or the tokens of a text, are called."""
    if is_text:
        return [readable(data.tokenizer, each) for each in group_G.tolist()]
    names = getattr(data, "class_names", None)
    return [names[each] if names else str(each) for each in group_G.tolist()]


def readable(tokenizer: Tokenizer, token: int) -> str:
    """A token's text in quotes, as Python writes it; its number where it is no text alone."""
    text = tokenizer.decode([token])
    if token == tokenizer.end_of_text:
        return "end of text"
    if not text or "\ufffd" in text:
        return f"0x{token:02x}" if tokenizer.vocab_size == 256 else f"token {token}"
    return repr(text)
