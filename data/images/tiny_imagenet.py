"""Tiny ImageNet in its official layout and as parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import DataError, blame
from .module import ImageData
from .reading import (
    ImageSet,
    decode_images,
    fetch_archive,
    find_parquet,
    has_parquet,
    list_classes,
    parquet_class_names,
    read_folder,
    read_parquet,
)


class TinyImageNetData(ImageData):
    """Tiny ImageNet: 100,000 training images of 64 x 64 pixels in 200 classes.

    Its 10,000 validation images are the test set here: the labels of the official test images are
    not published.

    Args:
        root: Folder with Hugging Face parquet (train-*.parquet and valid-*.parquet), or with the
            official layout or its zip, tiny-imagenet-200.zip.
        download: Download the official zip if root is missing or empty.
        **kwargs: See `ImageData`.
    """

    native_size = 64
    mean = (0.4802, 0.4481, 0.3975)
    std = (0.2770, 0.2691, 0.2821)

    url = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
    md5 = "90528d7ca1a48142e341f4ef8d21d0de"

    def __init__(
        self, root: str = "data_cache/tiny_imagenet", download: bool = True, **kwargs: Any
    ):
        super().__init__(**kwargs)
        self.root = Path(root).expanduser()
        self.download = download

    @property
    def class_names(self) -> list[str]:
        """WordNet ids in alphabetical order, n01443537 first; "0" to "199" where unknown."""
        folder, names = self._folder(), None
        if has_parquet(self.root, "train"):
            names = parquet_class_names(find_parquet(self.root, "train")[0])
        elif folder:
            names = list_classes(folder / "train")
        return names or [str(label) for label in range(200)]

    def prepare_data(self) -> None:
        """Extract the zip, after downloading it, if the dataset is not there.

        Raises:
            DataError: If that fails, or is not allowed.
        """
        if not (self._folder() or has_parquet(self.root, "train", "valid")):
            fetch_archive(self.url, self.md5, self.root / "tiny-imagenet-200", self.download)

    def _folder(self) -> Path | None:
        """The folder that holds train/ and val/."""
        folders = (self.root, self.root / "tiny-imagenet-200")
        return next((folder for folder in folders if (folder / "train").is_dir()), None)

    def read(self, split: str) -> ImageSet:
        """Read "train" or "test"."""
        if has_parquet(self.root, "train", "valid"):
            files = find_parquet(self.root, "train" if split == "train" else "valid")
            return read_parquet(files, self.num_classes, self.image_size)
        folder = self._folder()
        if folder is None:
            raise DataError(
                f"{self.root}: no Tiny ImageNet here; point --data.root to a folder with "
                f"train-*.parquet or train/ and val/"
            )
        if split == "train":
            return read_folder(folder / "train", self.class_names, self.image_size)
        return self._read_annotated(folder / "val")

    def _read_annotated(self, folder: Path) -> ImageSet:
        """Read val/images, whose labels are in val/val_annotations.txt: file, wnid and a box."""
        table = folder / "val_annotations.txt"
        with blame(f"{table}: not readable", "extract the zip again", (OSError, ValueError)):
            rows = [line.split("\t")[:2] for line in table.read_text().splitlines() if line]
        label_of = {name: label for label, name in enumerate(self.class_names)}
        for number, row in enumerate(rows, 1):
            if len(row) != 2 or row[1] not in label_of:
                raise DataError(
                    f"{table} line {number}: expected a file name and a class that is a folder in "
                    f"train/, found {' '.join(row)!r}; extract the zip again"
                )
        if not rows:
            raise DataError(f"{table}: this file is empty; extract the zip again")
        files = [folder / "images" / name for name, _ in rows]
        images = decode_images(files, [str(file) for file in files], self.image_size)
        labels = torch.tensor([label_of[wnid] for _, wnid in rows])
        return ImageSet(images, labels, [name for name, _ in rows])
