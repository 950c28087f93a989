"""Data modules for image classification: small images, held in memory on the device that trains.

Batches are `(images float32 [B, C, H, W] normalised, labels int64 [B])`; in prediction they are
`(images, indices int64 [B])`, where `predict_names[index]` identifies an image.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torchvision.datasets import CIFAR10
from torchvision.transforms.v2 import functional as tv

from ..batches import BatchLoader, trainer_position
from ..errors import DataError
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
from .reading import (
    ImageSet,
    check_labels,
    decode_images,
    fetch_archive,
    find_parquet,
    list_classes,
    parquet_class_names,
    read_class_folders,
    read_parquet,
    read_unlabelled,
    resize_images,
)


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

    A subclass sets `native_size`, `mean` and `std` (of pixels in 0 to 1), and defines `class_names`
    and `_read`.

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
        for name, value, good, expected in (
            ("batch_size", batch_size, batch_size > 0, "1 or more"),
            ("eval_batch_size", eval_batch_size, eval_batch_size > 0, "1 or more"),
            ("image_size", image_size, image_size is None or image_size > 0, "1 or more, or null"),
            ("crop_padding", crop_padding, crop_padding >= 0, "0 or more"),
            ("randaugment_ops", randaugment_ops, randaugment_ops >= 0, "0 or more"),
            ("randaugment_magnitude", randaugment_magnitude, 0 <= randaugment_magnitude <= 30,
             "0 to 30"),
            ("erasing", erasing, 0 <= erasing <= 1, "0 to 1"),
            ("val_fraction", val_fraction, 0 <= val_fraction < 1, "0 or more and below 1"),
            ("seed", seed, seed >= 0, "0 or more"),
        ):  # fmt: skip
            if not good:
                raise DataError(f"--data.{name} is {value}; it must be {expected}")
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.image_size = image_size
        self.val_fraction = val_fraction
        self.seed = seed
        self.device = device
        self.predict_folder = predict_folder
        self._transforms: list[Transform] = []
        if crop_padding:
            self._transforms.append(PadCrop(crop_padding))
        if flip:
            self._transforms.append(Flip())
        if randaugment_ops:
            self._transforms.append(RandAugment(randaugment_ops, randaugment_magnitude))
        if erasing:
            self._transforms.append(RandomErasing(erasing, self.mean))
        self._splits: dict[str, ImageSet] = {}

    # ---- what a model wants to know

    @property
    def class_names(self) -> list[str]:
        """Names of the classes in the order of their labels."""
        raise NotImplementedError

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
        if stage == "fit" and not self.val_fraction and self._evaluation_split("val") == "test":
            rank_zero_info(
                "Validation uses the test set, as published results do; "
                "set --data.val_fraction to choose a model on held-out training images instead."
            )

    def train_dataloader(self) -> BatchLoader:
        """Shuffled, augmented batches; continues where the trainer stands when a run is resumed."""
        rank, world_size = self._processes()
        return BatchLoader(
            self._train_batch,
            self.num_train,
            self.batch_size,
            shuffle=True,
            seed=self.seed,
            drop_last=True,
            position=trainer_position(self.trainer) if self.trainer else None,
            rank=rank,
            world_size=world_size,
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
        self, indices: Tensor, local: slice, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        images, labels = self._select(self._split("train"), indices[local])
        images = augment(images, self._transforms, len(indices), local, generator)
        return self._normalize(images), labels

    def _eval_loader(self, name: str) -> BatchLoader:
        data = self._split(name)
        rank, world_size = self._processes()

        def make_batch(indices: Tensor, local: slice, _: torch.Generator) -> tuple[Tensor, Tensor]:
            images, labels = self._select(data, indices[local])
            return self._normalize(images), indices[local] if name == "predict" else labels

        return BatchLoader(
            make_batch,
            len(data),
            -(-self.eval_batch_size // world_size) * world_size,
            shuffle=False,
            seed=self.seed,
            drop_last=False,
            rank=rank,
            world_size=world_size,
        )

    @staticmethod
    def _select(data: ImageSet, indices: Tensor) -> tuple[Tensor, Tensor]:
        rows = to_device(indices, data.images.device)
        return data.images.index_select(0, rows), data.labels.index_select(0, rows)

    # ---- loading

    def _read(self, split: str) -> ImageSet:
        """Read "train" or what `_evaluation_split` returns; C, H, W must be `image_shape`."""
        raise NotImplementedError

    def _evaluation_split(self, name: str) -> str:
        """The split to read for "test", and for "val" when no training images are held out."""
        return "test"

    def _split(self, name: str) -> ImageSet:
        """Return "train", "val", "test" or "predict", read at most once."""
        if name == "predict" and self.predict_folder is None:
            name = "test"
        if name == "val" and self.val_fraction:
            name = "held_out"
        elif name in ("val", "test"):
            name = self._evaluation_split(name)
        if name not in self._splits:
            self._splits.update(self._load(name))
        return self._splits[name]

    def _load(self, name: str) -> dict[str, ImageSet]:
        device = self._device()
        if name == "predict":
            data = read_unlabelled(Path(self.predict_folder).expanduser(), self.image_shape[-1])
            if self.channels == 1:
                data = replace(data, images=tv.rgb_to_grayscale(data.images))
            return {name: self._checked(data).to(device)}
        if not self.val_fraction or name not in ("train", "held_out"):
            return {name: self._checked(self._read(name)).to(device)}
        whole = self._checked(self._read("train"))
        train, val = stratified_split(whole.labels, self.val_fraction, self.seed)
        if not len(train) or not len(val):
            raise DataError(
                f"--data.val_fraction {self.val_fraction} of {len(whole)} training images leaves "
                f"{len(train)} to train on and {len(val)} to validate on; choose another fraction"
            )
        return {"train": whole.subset(train).to(device), "held_out": whole.subset(val).to(device)}

    def _checked(self, data: ImageSet) -> ImageSet:
        if (shape := tuple(data.images.shape[1:])) != self.image_shape:
            raise DataError(
                f"{data.names[0]}: image of shape {shape}, expected {self.image_shape}; "
                f"set --data.image_size to resize all images on loading"
            )
        return data

    # ---- the trainer's side

    def _processes(self) -> tuple[int, int]:
        """Rank and number of processes."""
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)

    def _device(self) -> torch.device:
        root = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        if self.device == "auto":
            return root if root.type == "cuda" else torch.device("cpu")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise DataError("--data.device is cuda, and there is no GPU here; set it to auto")
        # "cuda" alone means this process's own GPU.
        return root if root.type == self.device else torch.device(self.device)


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

    def _read(self, split: str) -> ImageSet:
        from sklearn.datasets import load_digits  # half a second that other data need not wait for

        digits = load_digits()
        labels = torch.from_numpy(digits.target).long()
        pixels = torch.from_numpy(digits.images / 16 * 255).round().to(torch.uint8)  # from 0..16
        images = resize_images(pixels[:, None], self.image_size).repeat(1, self.channels, 1, 1)
        train, test = stratified_split(labels, 0.2, seed=0)
        names = [f"row {row}" for row in range(len(labels))]
        return ImageSet(images, labels, names).subset(train if split == "train" else test)


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
        self.download = download

    def prepare_data(self) -> None:
        """Download the dataset if it is not there.

        Raises:
            DataError: If that fails, or is not allowed.
        """
        if not self._layout():
            fetch_archive(
                CIFAR10.url, CIFAR10.tgz_md5, self.root, CIFAR10.base_folder, self.download
            )

    @property
    def class_names(self) -> list[str]:
        """The published names, which are in alphabetical order."""
        animals = ["bird", "cat", "deer", "dog", "frog", "horse"]
        return sorted(["airplane", "automobile", "ship", "truck", *animals])

    def _layout(self) -> str | None:
        if find_parquet(self.root, "train") or find_parquet(self.root, "test"):
            return "parquet"
        if (self.root / CIFAR10.base_folder).is_dir():
            return "pickle"
        return "folders" if (self.root / "train").is_dir() else None

    def _read(self, split: str) -> ImageSet:
        layout = self._layout()
        if layout == "parquet":
            files = _require_parquet(self.root, split)
            return read_parquet(files, self.num_classes, self.image_size)
        if layout == "pickle":
            return self._read_pickles(split)
        if layout == "folders":
            return read_class_folders(self.root / split, self.class_names, self.image_size)
        raise _missing(self.root, "CIFAR-10", "train-*.parquet, cifar-10-batches-py or train/")

    def _read_pickles(self, split: str) -> ImageSet:
        folder = self.root / CIFAR10.base_folder
        files = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
        parts = [_read_cifar_batch(folder / name) for name in files]
        images = torch.cat([part.images for part in parts])
        labels = torch.cat([part.labels for part in parts])
        names = [name for part in parts for name in part.names]
        return ImageSet(resize_images(images, self.image_size), labels, names)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays in containers and nothing else: a pickle could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")
        if (module, name) in {
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}")


def _read_cifar_batch(file: Path) -> ImageSet:
    """Read one file of the published python version of CIFAR-10."""
    try:
        with file.open("rb") as stream:
            content = _ArrayUnpickler(stream, encoding="latin1").load()
        images = torch.from_numpy(content["data"].reshape(-1, 3, 32, 32))
        labels = content["labels"]
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(
            f"{file}: not a readable CIFAR-10 batch ({error}); "
            f"remove {file.parent} and run again to download it"
        ) from error
    places = [f"{file} row {row}" for row in range(len(images))]
    names = content.get("filenames") or [f"{file.name} row {row}" for row in range(len(images))]
    return ImageSet(images, check_labels(labels, 10, places), names)


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
        folder, files = self._folder(), find_parquet(self.root, "train")
        if files:
            names = parquet_class_names(files[0])
        else:
            names = list_classes(folder / "train") if folder else None
        return names or [str(label) for label in range(200)]

    def prepare_data(self) -> None:
        """Extract the zip, after downloading it, if the dataset is not there.

        Raises:
            DataError: If that fails, or is not allowed.
        """
        if self._folder() or find_parquet(self.root, "train") or find_parquet(self.root, "valid"):
            return
        fetch_archive(self.url, self.md5, self.root, "tiny-imagenet-200", self.download)

    def _folder(self) -> Path | None:
        """The folder that holds train/ and val/."""
        for folder in (self.root, self.root / "tiny-imagenet-200"):
            if (folder / "train").is_dir():
                return folder
        return None

    def _read(self, split: str) -> ImageSet:
        name = "train" if split == "train" else "valid"
        if find_parquet(self.root, "train") or find_parquet(self.root, "valid"):
            files = _require_parquet(self.root, name)
            return read_parquet(files, self.num_classes, self.image_size)
        folder = self._folder()
        if folder is None:
            raise _missing(self.root, "Tiny ImageNet", "train-*.parquet or train/ and val/")
        if split == "train":
            return read_class_folders(folder / "train", self.class_names, self.image_size)
        return self._read_annotated(folder / "val")

    def _read_annotated(self, folder: Path) -> ImageSet:
        """Read val/images, whose labels are in val/val_annotations.txt: file, wnid and a box."""
        table = folder / "val_annotations.txt"
        try:
            rows = [line.split("\t")[:2] for line in table.read_text().splitlines() if line]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{table}: not readable ({error}); extract the zip again") from error
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


class ImageFolderData(ImageData):
    """Any images of your own, sorted into one folder a class.

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

    def _evaluation_split(self, name: str) -> str:
        if (self.root / name).is_dir():
            return name
        return "val" if name == "test" else "test"

    def _read(self, split: str) -> ImageSet:
        folder = self.root / split
        if split != "train" and not folder.is_dir():
            raise DataError(
                f"{self.root}: no val/ or test/ folder here; add one, or set "
                f"--data.val_fraction to hold out training images for validation"
            )
        return read_class_folders(folder, self.class_names, self.image_size)


def _require_parquet(root: Path, split: str) -> list[Path]:
    if files := find_parquet(root, split):
        return files
    raise DataError(f"{root}: no {split}-*.parquet here; copy it to the other parquet files")


def _missing(root: Path, dataset: str, expected: str) -> DataError:
    return DataError(f"{root}: no {dataset} here; point --data.root to a folder with {expected}")
