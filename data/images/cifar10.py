"""CIFAR-10 in its three common layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torchvision.datasets import CIFAR10

from ..errors import DataError
from .module import ImageData
from .reading import (
    ImageSet,
    fetch_archive,
    find_parquet,
    has_parquet,
    read_folder,
    read_parquet,
    resize_images,
)


class CIFAR10Data(ImageData):
    """CIFAR-10: 50,000 training and 10,000 test images of 32 x 32 pixels in 10 classes.

    Args:
        root: Folder with the dataset in one of these layouts, tried in this order: Hugging Face
            parquet (train-*.parquet and test-*.parquet), the published python version
            (cifar-10-batches-py), class folders (train/<class>/<image>, test/<class>/<image>).
        download: Download the published version if root is missing or empty.
        **kwargs: See `ImageData`.
    """

    native_size = 32
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def __init__(self, root: str = "data_cache/cifar10", download: bool = True, **kwargs: Any):
        super().__init__(**kwargs)
        self.root = Path(root).expanduser()
        self.published = self.root / CIFAR10.base_folder
        self.download = download

    def prepare_data(self) -> None:
        """Download the dataset if it is not there.

        Raises:
            DataError: If that fails, or is not allowed.
        """
        if not (
            has_parquet(self.root, "train", "test")
            or self.published.is_dir()
            or (self.root / "train").is_dir()
        ):
            fetch_archive(CIFAR10.url, CIFAR10.tgz_md5, self.published, self.download)

    @property
    def class_names(self) -> list[str]:
        """The published names, which are in alphabetical order."""
        animals = ["bird", "cat", "deer", "dog", "frog", "horse"]
        return sorted(["airplane", "automobile", "ship", "truck", *animals])

    def read(self, split: str) -> ImageSet:
        """Read "train" or "test"."""
        if has_parquet(self.root, "train", "test"):
            files = find_parquet(self.root, split)
            return read_parquet(files, self.num_classes, self.image_size)
        if self.published.is_dir():
            return self._read_published(split)
        if (self.root / "train").is_dir():
            return read_folder(self.root / split, self.class_names, self.image_size)
        raise DataError(
            f"{self.root}: no CIFAR-10 here; point --data.root to a folder with train-*.parquet, "
            f"{CIFAR10.base_folder} or train/"
        )

    def _read_published(self, split: str) -> ImageSet:
        """Read pickles, which torchvision unpickles only if their MD5 is the published one."""
        try:
            data = CIFAR10(self.root, train=split == "train")
        except (RuntimeError, OSError) as error:
            raise DataError(
                f"{self.published}: a file is missing or not as it was published; "
                f"remove the folder and run again to download it"
            ) from error
        images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
        names = [f"{split} image {row}" for row in range(len(images))]
        return ImageSet(resize_images(images, self.image_size), torch.tensor(data.targets), names)
