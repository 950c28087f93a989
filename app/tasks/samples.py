"""Samples of a validation batch in a form to look at: what routing pictures are drawn over."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class ImageSamples:
    """Images that a network cuts into a grid of patches, row by row.

    Attributes:
        rows: places of the samples in their batch.
        pixels: uint8 (samples, height, width, channels), of 1 or 3 channels.
        captions: a word for each.
        grid: rows and columns of patches.
        prefix: tokens before the first patch, as a class token.
    """

    rows: list[int]
    pixels: np.ndarray
    captions: list[str]
    grid: tuple[int, int]
    prefix: int

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.prefix + self.grid[0] * self.grid[1]

    @classmethod
    def join(cls, parts: list[ImageSamples]) -> ImageSamples:
        """Samples of several batches as one; `rows` are those of each in its own."""
        return replace(
            parts[0],
            rows=[row for part in parts for row in part.rows],
            pixels=np.concatenate([part.pixels for part in parts]),
            captions=[caption for part in parts for caption in part.captions],
        )


@dataclass(frozen=True)
class TextSamples:
    """Texts of one length.

    Attributes:
        rows: places of the samples in their batch.
        pieces: of each sample, the text of each token; "" for a place that is no token.
    """

    rows: list[int]
    pieces: list[list[str]]

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return len(self.pieces[0])

    @classmethod
    def join(cls, parts: list[TextSamples]) -> TextSamples:
        """Samples of several batches as one; `rows` are those of each in its own."""
        rows = [row for part in parts for row in part.rows]
        return cls(rows, [pieces for part in parts for pieces in part.pieces])


def spread(size: int, count: int) -> list[int]:
    """Up to `count` of the numbers below `size`, evenly spread."""
    count = min(size, count)
    return [i * size // count for i in range(count)]
