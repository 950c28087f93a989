"""Random images, for benchmarks of everything that comes after reading files."""

from __future__ import annotations

from typing import Any

import torch

from data.images.module import ImageData
from data.images.reading import ImageSet


class RandomImages(ImageData):
    """Uniform noise in the sizes of a data set; nothing to download.

    Args:
        image_size: height and width in pixels.
        channels: of an image.
        classes: number of classes.
        images: number of training images; the test set has 1,000.
        **kwargs: See `ImageData`.
    """

    def __init__(
        self,
        image_size: int = 32,
        channels: int = 3,
        classes: int = 10,
        images: int = 50_000,
        **kwargs: Any,
    ) -> None:
        self.native_size, self.channels = image_size, channels
        self.mean = self.std = (0.5,) * channels
        super().__init__(image_size=image_size, **kwargs)
        self._classes, self._images = classes, images

    @property
    def class_names(self) -> list[str]:
        """Numbers."""
        return [str(label) for label in range(self._classes)]

    def read(self, split: str) -> ImageSet:
        generator = torch.Generator().manual_seed(0)
        count = self._images if split == "train" else 1000
        images = torch.randint(
            256, (count, *self.image_shape), dtype=torch.uint8, generator=generator
        )
        labels = torch.randint(self._classes, (count,), generator=generator)
        return ImageSet(images, labels, [f"random image {index}" for index in range(count)])
