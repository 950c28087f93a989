"""A person's own images in class folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import DataError
from .module import ImageData
from .reading import ImageSet, list_classes, read_folder


class ImageFolderData(ImageData):
    """Any images of your own, sorted into a folder for each class.

    All images are held in memory: 3 * image_size^2 bytes each.

    Args:
        root: Holds train/<class>/<image>, and val/ or test/ or both in the same form. With one of
            them only, it serves for validation and test.
        image_size: Side in pixels that images are resized to on loading; what is longer than wide
            or wider than long loses its ends.
        mean: Mean of each channel of pixels in 0 to 1; the default is ImageNet's.
        std: Standard deviation of each channel likewise.
        **kwargs: See `ImageData`.
    """

    def __init__(
        self,
        root: str,
        image_size: int = 64,
        mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
        std: tuple[float, float, float] = (0.229, 0.224, 0.225),
        **kwargs: Any,
    ):
        self.mean, self.std = tuple(mean), tuple(std)
        super().__init__(image_size=image_size, **kwargs)
        self.native_size = image_size
        self.root = Path(root).expanduser()

    @property
    def class_names(self) -> list[str]:
        """Names of the folders in train/, sorted."""
        return list_classes(self.root / "train")

    def evaluation_split(self, name: str) -> str:
        """The folder of that name if it is there, else the other one."""
        if (self.root / name).is_dir():
            return name
        return "val" if name == "test" else "test"

    def read(self, split: str) -> ImageSet:
        """Read "train", "val" or "test"."""
        folder = self.root / split
        if split != "train" and not folder.is_dir():
            raise DataError(
                f"{self.root}: no val/ or test/ folder here; add one, or set "
                f"--data.val_fraction to hold out training images for validation"
            )
        return read_folder(folder, self.class_names, self.image_size)
