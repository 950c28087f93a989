"""The embedded data set: scikit-learn's handwritten digits."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import DataError
from .module import ImageData, stratified_split
from .reading import ImageSet, resize_images


class DigitsData(ImageData):
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels: embedded, nothing to download.

    Four fifths of each class are for training, the rest is the test set; this split never changes.

    Args:
        channels: 1, or 3 to repeat the grey channel for a model that expects colour.
        crop_padding: Black pixels added on each side before a random crop. 0 turns it off.
        flip: Mirror half of the training images, which changes what some digits are.
        **kwargs: See `ImageData`.
    """

    native_size = 8

    def __init__(self, channels: int = 1, crop_padding: int = 1, flip: bool = False, **kwargs: Any):
        if channels not in (1, 3):
            raise DataError(f"--data.channels is {channels}; it must be 1 or 3")
        self.channels = channels
        self.mean, self.std = (0.3053,) * channels, (0.3760,) * channels
        super().__init__(crop_padding=crop_padding, flip=flip, **kwargs)

    @property
    def class_names(self) -> list[str]:
        """The digits 0 to 9."""
        return [str(digit) for digit in range(10)]

    def read(self, split: str) -> ImageSet:
        """Read "train" or "test"."""
        from sklearn.datasets import load_digits  # half a second that other data need not wait for

        digits = load_digits()
        labels = torch.from_numpy(digits.target).long()
        pixels = torch.from_numpy(digits.images / 16 * 255).round().to(torch.uint8)  # from 0..16
        images = resize_images(pixels[:, None], self.image_size).repeat(1, self.channels, 1, 1)
        train, test = stratified_split(labels, 0.2, seed=0)
        names = [f"row {row}" for row in range(len(labels))]
        return ImageSet(images, labels, names).subset(train if split == "train" else test)
