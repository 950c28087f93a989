"""Data modules for image classification: small images, held in memory on the device that trains.

Batches are `(images float32 [B, C, H, W] normalised, labels int64 [B])`; in prediction they are
`(images, indices int64 [B])`, where `predict_names[index]` identifies an image.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from ..batches import BatchLoader
from ..errors import DataError, check_range
from .augment import (
    Flip,
    Normalize,
    PadCrop,
    RandAugment,
    RandomErasing,
    Transform,
    augment,
    to_device,
)
from .reading import ImageSet, read_folder


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split a dataset so that every class gives the same part of its samples.

    Args:
        labels: int64 [N].
        fraction: Part of each class in the second half, in (0, 1); rounded to whole samples.
        seed: Determines the split.

    Returns:
        Indices of the two halves, int64, disjoint, each ascending.
    """
    rng = np.random.default_rng(seed)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        members = torch.nonzero(labels == label).flatten()
        order = torch.from_numpy(rng.permutation(len(members)))
        held_out[members[order[: round(fraction * len(members))]]] = True
    return torch.nonzero(~held_out).flatten(), torch.nonzero(held_out).flatten()


class ImageData(LightningDataModule):
    """Images that fit in memory: loads them once, serves augmented batches of them.

    A data set of your own is a subclass that sets `native_size`, `mean` and `std` (of pixels in 0
    to 1), `channels` if it is not 3, and defines `class_names` and `read`. One with another
    validation set than its test set also defines `evaluation_split`. `reading.py` has what reads
    class folders, parquet files and single images.

    Files of images are brought to 8-bit RGB: turned as their EXIF data says, transparent parts on
    white, 16-bit grey scaled to 8 bits. Pixels that are 32-bit numbers are refused.

    Args:
        batch_size: Training batch over all processes together.
        eval_batch_size: Batch in validation, test and prediction over all processes together,
            rounded up to a multiple of the number of processes.
        image_size: Side in pixels that images are resized to on loading. Null keeps their size.
        crop_padding: Black pixels added on each side before a random crop. 0 turns it off.
        flip: Mirror half of the training images.
        randaugment_ops: Operations of RandAugment for each image. 0 turns it off.
        randaugment_magnitude: Strength of RandAugment, 0 to 30.
        erasing: Probability that a random rectangle of an image is erased.
        val_fraction: Part of each class of the training set that is held out for validation. 0
            validates on the test set, as the papers do.
        seed: Determines the order, the augmentation and the validation split.
        device: Where the images lie: "auto" for the trainer's GPU if it has one, "cpu", "cuda".
        predict_folder: Images to predict, at any depth of this folder. Null predicts the test set.
    """

    native_size: int
    channels: int = 3
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __init__(
        self,
        batch_size: int = 128,
        eval_batch_size: int = 512,
        image_size: int | None = None,
        crop_padding: int = 4,
        flip: bool = True,
        randaugment_ops: int = 0,
        randaugment_magnitude: int = 9,
        erasing: float = 0.0,
        val_fraction: float = 0.0,
        seed: int = 0,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        predict_folder: str | None = None,
    ):
        super().__init__()
        check_range(1, batch_size=batch_size, eval_batch_size=eval_batch_size)
        check_range(1, image_size=image_size)
        check_range(0, crop_padding=crop_padding, randaugment_ops=randaugment_ops, seed=seed)
        check_range(0, 30, randaugment_magnitude=randaugment_magnitude)
        check_range(0, 1, erasing=erasing)
        if not 0 <= val_fraction < 1:
            raise DataError(f"--data.val_fraction is {val_fraction}; it must be 0 to below 1")
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.image_size, self.val_fraction, self.seed = image_size, val_fraction, seed
        self.device, self.predict_folder = device, predict_folder
        transforms: tuple[tuple[float, Transform], ...] = (
            (crop_padding, PadCrop(crop_padding)),
            (flip, Flip()),
            (randaugment_ops, RandAugment(randaugment_ops, randaugment_magnitude)),
            (erasing, RandomErasing(erasing, self.mean)),
        )
        self._transforms = [transform for wanted, transform in transforms if wanted]
        self._splits: dict[str, ImageSet] = {}

    # ---- what a model wants to know

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image in a batch; known before the data is read."""
        size = self.image_size or self.native_size
        return self.channels, size, size

    @property
    def num_train(self) -> int:
        """Number of training images, those held out for validation not counted."""
        return len(self._split("train"))

    @property
    def predict_names(self) -> list[str]:
        """What identifies each image of the prediction set: a file's name, or as "row 17"."""
        return self._split("predict").names

    # ---- Lightning's hooks

    def setup(self, stage: str | None = None) -> None:
        """Read what a stage needs into memory, once.

        Args:
            stage: "fit", "validate", "test", "predict", or None for all.

        Raises:
            DataError: If the data is missing or broken.
        """
        device = self._device()
        self._splits = {name: data.to(device) for name, data in self._splits.items()}
        self._normalize = Normalize(self.mean, self.std, device)
        stages = {"fit": ("train", "val"), "validate": ("val",), None: ("train", "val", "test")}
        for name in stages.get(stage, (stage,)):
            self._split(name)
        if stage == "fit" and not self.val_fraction and self.evaluation_split("val") == "test":
            rank_zero_info(
                "Validation uses the test set, as published results do; "
                "set --data.val_fraction to choose a model on held-out training images instead."
            )

    def train_dataloader(self) -> BatchLoader:
        """Shuffled, augmented batches; continues where the trainer stands when a run is resumed."""
        return BatchLoader(
            self._train_batch,
            self.num_train,
            self.batch_size,
            shuffle=True,
            seed=self.seed,
            drop_last=True,
            trainer=self.trainer,
        )

    def val_dataloader(self) -> BatchLoader:
        """The validation set in order."""
        return self._eval_loader("val")

    def test_dataloader(self) -> BatchLoader:
        """The test set in order."""
        return self._eval_loader("test")

    def predict_dataloader(self) -> BatchLoader:
        """The prediction set in order: images and their indices."""
        return self._eval_loader("predict")

    # ---- batches

    def pixels(self, images: Tensor) -> Tensor:
        """Images of a batch as they can be looked at: uint8 of the same shape."""
        levels = (images - self._normalize.bias) / self._normalize.scale
        return levels.round().clamp(0, 255).to(torch.uint8)

    def _train_batch(
        self, indices: Tensor, local: slice, generator: torch.Generator, epoch: int
    ) -> tuple[Tensor, Tensor]:
        images, labels = self._select(self._split("train"), indices[local])
        images = augment(images, self._transforms, len(indices), local, generator)
        return self._normalize(images), labels

    def _eval_loader(self, name: str) -> BatchLoader:
        data = self._split(name)

        def make_batch(indices: Tensor, local: slice, *_: Any) -> tuple[Tensor, Tensor]:
            images, labels = self._select(data, indices[local])
            return self._normalize(images), indices[local] if name == "predict" else labels

        return BatchLoader(make_batch, len(data), self.eval_batch_size, trainer=self.trainer)

    @staticmethod
    def _select(data: ImageSet, indices: Tensor) -> tuple[Tensor, Tensor]:
        rows = to_device(indices, data.images.device)
        return data.images.index_select(0, rows), data.labels.index_select(0, rows)

    # ---- what a data set of your own defines

    @property
    def class_names(self) -> list[str]:
        """Names of the classes in the order of their labels."""
        raise NotImplementedError

    def read(self, split: str) -> ImageSet:
        """Read "train", or a split that `evaluation_split` names.

        Returns:
            All images of the split, in the size `image_shape`.
        """
        raise NotImplementedError

    def evaluation_split(self, name: str) -> str:
        """The split to read for "test", and for "val" when no training images are held out."""
        return "test"

    # ---- loading

    def _split(self, name: str) -> ImageSet:
        """Return "train", "val", "test" or "predict", read at most once."""
        if name == "predict" and self.predict_folder is None:
            name = "test"
        if name == "val" and self.val_fraction:
            name = "held_out"
        elif name in ("val", "test"):
            name = self.evaluation_split(name)
        if name not in self._splits:
            self._splits.update(self._load(name))
        return self._splits[name]

    def _load(self, name: str) -> dict[str, ImageSet]:
        device = self._device()
        splits = self.val_fraction and name in ("train", "held_out")
        if name == "predict":
            data = read_folder(Path(self.predict_folder).expanduser(), None, self.image_shape[-1])
            if self.channels == 1:
                data = replace(data, images=tv.rgb_to_grayscale(data.images))
        else:
            data = self.read("train" if splits else name)
        if (shape := tuple(data.images.shape[1:])) != self.image_shape:
            raise DataError(
                f"{data.names[0]}: image of shape {shape}, expected {self.image_shape}; "
                f"set --data.image_size to resize all images on loading"
            )
        if not splits:
            return {name: data.to(device)}
        train, val = stratified_split(data.labels, self.val_fraction, self.seed)
        if not len(train) or not len(val):
            raise DataError(
                f"--data.val_fraction {self.val_fraction} of {len(data)} training images leaves "
                f"{len(train)} to train on and {len(val)} to validate on; choose another fraction"
            )
        return {"train": data.subset(train).to(device), "held_out": data.subset(val).to(device)}

    # ---- the trainer's side

    def _device(self) -> torch.device:
        root = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        if self.device == "auto":
            return root if root.type == "cuda" else torch.device("cpu")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise DataError("--data.device is cuda, and there is no GPU here; set it to auto")
        # "cuda" alone means this process's own GPU.
        return root if root.type == self.device else torch.device(self.device)
