"""Reading labelled images from parquet files, class folders and archives into uint8 tensors."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import struct
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torchvision.datasets.utils import check_integrity, download_url, extract_archive
from torchvision.transforms.v2 import functional as tv

from ..errors import DataError

SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
)


@dataclass(frozen=True)
class ImageSet:
    """Images of one size in memory: N images, C channels, H height, W width.

    Args:
        images: uint8 [N, C, H, W].
        labels: int64 [N], from 0; -1 where there is none.
        names: What identifies each image to a person, as a file's name or "row 17"; length N.
    """

    images: Tensor
    labels: Tensor
    names: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def subset(self, indices: Tensor) -> ImageSet:
        """Return the images at `indices`, int64 [M]."""
        return ImageSet(
            self.images[indices], self.labels[indices], [self.names[i] for i in indices.tolist()]
        )

    def to(self, device: torch.device) -> ImageSet:
        """Return the set with its tensors on `device`."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


def check_labels(labels: Sequence[int | None], num_classes: int, names: Sequence[str]) -> Tensor:
    """Return labels as int64 [N].

    Args:
        labels: What the file holds.
        num_classes: Labels go from 0 to one less than this.
        names: Names the place of each label in an error.

    Raises:
        DataError: If a label is missing or outside the range.
    """
    for label, name in zip(labels, names, strict=True):
        if not isinstance(label, int) or not 0 <= label < num_classes:
            raise DataError(
                f"{name}: label {label} is outside 0 to {num_classes - 1}; "
                f"the data must have {num_classes} classes, numbered from 0"
            )
    return torch.tensor(labels, dtype=torch.int64)


def decode_images(
    sources: Sequence[Path | bytes], names: Sequence[str], image_size: int | None
) -> Tensor:
    """Decode images to RGB.

    Args:
        sources: Files, or the encoded bytes; at least one.
        names: Names the place of each image in an error.
        image_size: If given, images are scaled so that the shorter side has this many pixels, and
            the square in the centre is kept. If None, all must have the size of the first.

    Returns:
        uint8 [N, 3, H, W].

    Raises:
        DataError: If an image cannot be decoded or has another size than the first.
    """
    pixels_NCHW: np.ndarray | None = None
    for i, source in enumerate(_progress(sources)):
        pixels_CHW = _decode(source, names[i], image_size).transpose(2, 0, 1)
        if pixels_NCHW is None:
            pixels_NCHW = np.empty((len(sources), *pixels_CHW.shape), np.uint8)
        if pixels_CHW.shape != pixels_NCHW.shape[1:]:
            height, width = pixels_CHW.shape[1:]
            first_height, first_width = pixels_NCHW.shape[2:]
            raise DataError(
                f"{names[i]}: this image is {width}x{height}, {names[0]} is "
                f"{first_width}x{first_height}; set --data.image_size to bring all to one size"
            )
        pixels_NCHW[i] = pixels_CHW
    assert pixels_NCHW is not None, "no images to decode"
    return torch.from_numpy(pixels_NCHW)


def _decode(source: Path | bytes, name: str, image_size: int | None) -> np.ndarray:
    try:
        content = source if isinstance(source, bytes) else source.read_bytes()
        if content.startswith(_PNG):
            _check_png(content)
        with Image.open(io.BytesIO(content)) as image:
            image = image.convert("RGB")
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and more
        raise DataError(
            f"{name}: this image cannot be decoded ({error}); replace or remove it"
        ) from error
    if image_size is not None and image.size != (image_size, image_size):
        image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR)
    return np.asarray(image)


_PNG = b"\x89PNG\r\n\x1a\n"


def _check_png(content: bytes) -> None:
    """Compares the checksums of a PNG's chunks, which decoders leave out for the pixels.

    Raises:
        ValueError: if one is wrong or the file ends too early.
    """
    at, kind = len(_PNG), b""
    while kind != b"IEND":
        size, kind = struct.unpack(">I4s", content[at : at + 8])
        end = at + 8 + size
        (checksum,) = struct.unpack(">I", content[end : end + 4])
        if zlib.crc32(content[at + 4 : end]) != checksum:
            raise ValueError("its checksum is wrong")
        at = end + 4


def _progress(sources: Sequence[Path | bytes]) -> Iterable[Path | bytes]:
    """Show a bar on stderr where the wait is noticed and someone is looking."""
    shown = len(sources) > 2000 and rank_zero_only.rank == 0 and sys.stderr.isatty()
    console = Console(stderr=True)
    return track(sources, "Reading images", console=console, transient=True, disable=not shown)


def resize_images(images: Tensor, image_size: int | None) -> Tensor:
    """Scale square uint8 images [N, C, H, W] to `image_size`, if given."""
    if image_size is None or images.shape[-1] == image_size:
        return images
    size = [image_size, image_size]
    return torch.cat([tv.resize(part, size, antialias=True) for part in images.split(1000)])


# ---- class folders


def list_classes(folder: Path) -> list[str]:
    """Return the names of the class folders in `folder`, sorted: a class's label is its place.

    Raises:
        DataError: If there is no such folder, or none in it.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it must hold one folder of images a class")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    if not names:
        raise DataError(f"{folder}: no class folders here; put each class's images into its own")
    return names


def find_images(folder: Path) -> list[Path]:
    """Return all image files in `folder`, at any depth, sorted.

    Raises:
        DataError: If there is no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give the path of a folder of images")
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES and path.name[0] != "."  # macOS leaves ._name.jpg
    )
    if not files:
        raise DataError(f"{folder}: no images here; expected files such as .png or .jpg")
    return files


def read_class_folders(folder: Path, class_names: list[str], image_size: int | None) -> ImageSet:
    """Read folder/<class>/**/<image>.

    Args:
        folder: Holds one folder a class.
        class_names: All classes in the order of their labels; some may be absent here.
        image_size: See `decode_images`.

    Raises:
        DataError: If a folder is not a class or has no images, or an image is unreadable.
    """
    files, labels = [], []
    for name in list_classes(folder):
        if name not in class_names:
            raise DataError(
                f"{folder / name}: there is no class {name!r} in the training set; "
                f"rename the folder or add training images of it"
            )
        found = find_images(folder / name)
        files += found
        labels += [class_names.index(name)] * len(found)
    images = decode_images(files, [str(file) for file in files], image_size)
    names = [file.relative_to(folder).as_posix() for file in files]
    return ImageSet(images, torch.tensor(labels), names)


def read_unlabelled(folder: Path, image_size: int | None) -> ImageSet:
    """Read all images in a folder, at any depth; labels are -1.

    Raises:
        DataError: If there are no images or one is unreadable.
    """
    files = find_images(folder)
    images = decode_images(files, [str(file) for file in files], image_size)
    names = [file.relative_to(folder).as_posix() for file in files]
    return ImageSet(images, torch.full((len(files),), -1), names)


# ---- Hugging Face parquet


def find_parquet(root: Path, split: str) -> list[Path]:
    """Return the parquet files of a split, `<split>-*.parquet` in root or a folder in it, sorted.

    Raises:
        DataError: If the files' numbering (00000-of-00002) says that some are missing.
    """
    files = sorted(root.glob(f"{split}-*.parquet")) or sorted(root.glob(f"*/{split}-*.parquet"))
    totals = [re.search(r"-of-(\d+)\.parquet$", file.name) for file in files]
    if files and totals[0] and len(files) != int(totals[0][1]):
        raise DataError(
            f"{files[0]}: {len(files)} of {int(totals[0][1])} parts of this split are here; "
            f"copy the missing {split}-*.parquet files to the same folder"
        )
    return files


def parquet_class_names(file: Path) -> list[str] | None:
    """Return the class names in a file's metadata, as Hugging Face datasets writes them, or None.

    Raises:
        DataError: If the file is no readable parquet.
    """
    try:
        metadata = pq.read_schema(file).metadata or {}
    except Exception as error:  # damaged bytes make the reader raise anything
        raise _unreadable(file, error) from error
    try:
        return json.loads(metadata[b"huggingface"])["info"]["features"]["label"]["names"]
    except (KeyError, TypeError, ValueError):
        return None  # other writers leave this out


def read_parquet(files: Sequence[Path], num_classes: int, image_size: int | None) -> ImageSet:
    """Read parquet files with columns `img` or `image`, each {bytes, path}, and `label`.

    Args:
        files: In order; at least one.
        num_classes: Labels must be below this.
        image_size: See `decode_images`.

    Raises:
        DataError: If a file is truncated or has other columns, a label is outside the range, or an
            image is unreadable.
    """
    encoded, labels, places, names = [], [], [], []
    for file in files:
        images, file_labels = _read_columns(file)
        rows = [f"{file} row {row}" for row in range(len(images))]
        encoded += [image["bytes"] if image else None for image in images]
        labels.append(check_labels(file_labels, num_classes, rows))
        places += rows
        names += [
            (image and image.get("path")) or f"{file.name} row {row}"
            for row, image in enumerate(images)
        ]
    if not encoded:
        raise DataError(f"{files[0]}: this file has no rows; download it again")
    for place, content in zip(places, encoded, strict=True):
        if content is None:
            raise DataError(f"{place}: this row has no image bytes; remove it or embed the image")
    return ImageSet(decode_images(encoded, places, image_size), torch.cat(labels), names)


def _read_columns(file: Path) -> tuple[list[dict | None], list[int | None]]:
    """Read the image column and the label column of one file."""
    try:
        schema = pq.read_schema(file)
        image = next((name for name in ("img", "image") if name in schema.names), None)
        if image is None or "label" not in schema.names:
            raise DataError(
                f"{file}: the columns are {', '.join(schema.names)}; "
                f"expected 'img' or 'image', and 'label'"
            )
        kind = schema.field(image).type
        if not pa.types.is_struct(kind) or kind.get_field_index("bytes") < 0:
            raise DataError(f"{file}: column {image!r} is {kind}; expected a struct with 'bytes'")
        table = pq.read_table(file, columns=[image, "label"], page_checksum_verification=True)
        return table[image].to_pylist(), table["label"].to_pylist()
    except DataError:
        raise
    except Exception as error:  # damaged bytes make the reader raise anything
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(
        f"{file}: not readable as parquet ({error}); it may be truncated, download it again"
    )


# ---- archives


def fetch_archive(url: str, md5: str, root: Path, folder: str, download: bool) -> None:
    """Extract `folder` from an archive in root, after downloading the archive if need be.

    Nothing is downloaded into a folder that holds anything else: it is not the place meant.

    The folder appears in one step when it is complete, so an interrupted run leaves no half of it.

    Args:
        url: Its last part is the archive's file name.
        md5: Checksum of the archive.
        root: Where the archive and the folder go.
        folder: The archive's top-level folder.
        download: Whether downloading is allowed.

    Raises:
        DataError: If the archive is not there and may not be downloaded, or fetching it fails.
    """
    archive = root / url.rsplit("/", 1)[1]
    try:
        others = root.exists() and any(p.name[0] != "." and p != archive for p in root.iterdir())
        if not check_integrity(archive, md5):
            state = "this file is damaged" if archive.exists() else "this file is not there"
            if others or not download:
                raise DataError(
                    f"{archive}: {state}, nor is the dataset in another layout; point --data.root "
                    f"to the dataset, or to an empty folder with --data.download true"
                )
            root.mkdir(parents=True, exist_ok=True)
            download_url(url, root, md5=md5)
        with tempfile.TemporaryDirectory(dir=root, prefix=".extract-") as partial:
            extract_archive(archive, partial)
            os.replace(Path(partial) / folder, root / folder)
    except (
        OSError, RuntimeError, EOFError,
        http.client.HTTPException, zipfile.BadZipFile, tarfile.TarError,
    ) as error:  # fmt: skip
        raise DataError(
            f"{archive}: fetching this from {url} failed ({error}); "
            f"put the file here by other means, or point --data.root to a copy of the dataset"
        ) from error
