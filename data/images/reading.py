"""Reading labelled images from parquet files, class folders and archives into uint8 tensors.

Shapes: N images, C channels, H height, W width.
"""

from __future__ import annotations

import filecmp
import io
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torchvision.datasets.utils import check_integrity, download_and_extract_archive
from torchvision.transforms.v2 import functional as tv

from ..errors import DataError, blame

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


@dataclass(frozen=True)
class ImageSet:
    """Images of one size in memory.

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
    pixels_NHWC: np.ndarray | None = None
    transparent = 0
    # A bar where the wait is noticed and someone is looking.
    shown = len(sources) > 2000 and rank_zero_only.rank == 0 and sys.stderr.isatty()
    bar = track(
        sources, "Reading images", console=Console(stderr=True), transient=True, disable=not shown
    )
    for i, source in enumerate(bar):
        with blame(f"{names[i]}: this image cannot be decoded", "replace or remove it"):
            image, on_white = _decode(source)
        transparent += on_white
        if image_size is not None and image.size != (image_size, image_size):
            image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR)
        if pixels_NHWC is None:
            pixels_NHWC = np.empty((len(sources), image.height, image.width, 3), np.uint8)
        height, width = pixels_NHWC.shape[1:3]
        if image.size != (width, height):
            raise DataError(
                f"{names[i]}: this image is {image.width}x{image.height}, {names[0]} is "
                f"{width}x{height}; set --data.image_size to bring all to one size"
            )
        pixels_NHWC[i] = np.asarray(image)
    assert pixels_NHWC is not None, "no images to decode"
    if transparent:
        rank_zero_info(
            f"{names[0]} and those with it: {transparent} of {len(names)} images have transparent "
            f"parts, which are read as white"
        )
    return torch.from_numpy(pixels_NHWC).permute(0, 3, 1, 2).contiguous()


def _decode(source: Path | bytes) -> tuple[Image.Image, bool]:
    """An image as RGB, and whether parts of it are transparent; may raise anything."""
    content = source if isinstance(source, bytes) else source.read_bytes()
    with Image.open(io.BytesIO(content)) as image:
        image.verify()  # a PNG's checksums, which decoders leave out for the pixels
    with Image.open(io.BytesIO(content)) as image:
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
            # Pillow's conversion would clip at 255.
            return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB"), False
        if image.mode in ("I", "F"):
            raise ValueError("its pixels are 32-bit numbers of unknown range; save it with 8 bits")
        if not image.has_transparency_data:
            return image.convert("RGB"), False
        rgba = image.convert("RGBA")
    if rgba.getextrema()[3][0] == 255:
        return rgba.convert("RGB"), False
    white = Image.new("RGBA", rgba.size, "white")
    return Image.alpha_composite(white, rgba).convert("RGB"), True


def resize_images(images: Tensor, image_size: int | None) -> Tensor:
    """Scale square uint8 images [N, C, H, W] to `image_size`, if given."""
    if image_size is None or images.shape[-1] == image_size:
        return images
    size = [image_size, image_size]
    return torch.cat([tv.resize(part, size, antialias=True) for part in images.split(1000)])


# ---- folders


def list_classes(folder: Path) -> list[str]:
    """Return the names of the class folders in `folder`, sorted: a class's label is its place.

    Raises:
        DataError: If there is no such folder, or none in it.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; it must hold a folder of images for each class")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not _hidden(path))
    if not names:
        raise DataError(f"{folder}: no class folders here; put each class's images into its own")
    return names


def _hidden(path: Path) -> bool:
    """Whether a file or folder is one that a system leaves behind, such as macOS's ._name.jpg."""
    return path.name[0] == "." or path.name == "__MACOSX"


def _find_images(folder: Path, passed_over: Counter[str]) -> list[Path]:
    """All image files at any depth, sorted; links are followed, and other files counted by kind."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; give the path of a folder of images")
    found, seen = [], set()
    for place, folders, names in os.walk(folder, followlinks=True):
        # A link to a folder above would go round in circles.
        if os.path.realpath(place) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(place))
        passed_over["__MACOSX"] += folders.count("__MACOSX")
        folders[:] = [name for name in folders if name != "__MACOSX"]
        for path in (Path(place, name) for name in names):
            if kind := _not_an_image(path):
                passed_over[kind] += 1
            else:
                found.append(path)
    if not found:
        raise DataError(f"{folder}: no images here; expected files such as .png or .jpg")
    return sorted(found)


def _not_an_image(path: Path) -> str | None:
    """What kind of file this is if it is no image; a pipe must never be opened."""
    if _hidden(path):
        return "hidden"
    if not path.is_file():
        return "no regular file"
    suffix = path.suffix.lower()
    return None if suffix in SUFFIXES else suffix or "without suffix"


def read_folder(folder: Path, class_names: list[str] | None, image_size: int | None) -> ImageSet:
    """Read folder/<class>/**/<image>, or without classes every image in the folder.

    Args:
        folder: Holds a folder for each class.
        class_names: All classes in the order of their labels; some may be absent here. None to
            label all images -1.
        image_size: See `decode_images`.

    Raises:
        DataError: If a folder is not a class or has no images, or an image is unreadable.
    """
    files, labels = [], []
    passed_over: Counter[str] = Counter()
    if class_names is not None:
        loose = [path for path in folder.iterdir() if not path.is_dir()] if folder.is_dir() else []
        passed_over.update(_not_an_image(path) or "outside the class folders" for path in loose)
    for name in [""] if class_names is None else list_classes(folder):
        if class_names is not None and name not in class_names:
            raise DataError(
                f"{folder / name}: there is no class {name!r} in the training set; "
                f"rename the folder or add training images of it"
            )
        found = _find_images(folder / name, passed_over)
        files += found
        labels += [-1 if class_names is None else class_names.index(name)] * len(found)
    if total := passed_over.total():
        kinds = ", ".join(f"{count} {kind}" for kind, count in passed_over.most_common() if count)
        rank_zero_info(f"{folder}: passed over {total} files that are no images: {kinds}")
    images = decode_images(files, [str(file) for file in files], image_size)
    names = [file.relative_to(folder).as_posix() for file in files]
    return ImageSet(images, torch.tensor(labels), names)


# ---- Hugging Face parquet


def has_parquet(root: Path, *splits: str) -> bool:
    """Whether `root`, or a folder in it, holds parquet files of one of these splits."""
    return any(_parquet_files(root, split) for split in splits)


def _parquet_files(root: Path, split: str) -> list[Path]:
    name = f"{split}-*.parquet"
    return sorted(path for path in (*root.glob(name), *root.glob(f"*/{name}")) if path.is_file())


def find_parquet(root: Path, split: str) -> list[Path]:
    """Return the parquet files of a split, `<split>-*.parquet` in root or a folder in it, sorted.

    Raises:
        DataError: If there are none, two are the same or lie in different folders, or the files'
            numbering (00000-of-00002) says that some are missing.
    """
    files = _parquet_files(root, split)
    if not files:
        raise DataError(f"{root}: no {split}-*.parquet here; copy it to the other parquet files")
    for one, other in combinations(files, 2):
        if one.parent != other.parent or filecmp.cmp(one, other, shallow=False):
            raise DataError(
                f"{other}: the images would count twice, as there is {one} too; remove one of them"
            )
    total = re.search(r"-of-(\d+)", files[0].name)
    if total and len(files) != int(total[1]):
        raise DataError(
            f"{files[0]}: {len(files)} of {int(total[1])} parts of this split are here; "
            f"copy the missing {split}-*.parquet files to the same folder, remove what is too many"
        )
    return files


def _schema(file: Path) -> pa.Schema:
    with blame(f"{file}: not readable as parquet", "it may be truncated, download it again"):
        return pq.read_schema(file)


def parquet_class_names(file: Path) -> list[str] | None:
    """Return the class names in a file's metadata, as Hugging Face datasets writes them, or None.

    Raises:
        DataError: If the file is no readable parquet.
    """
    metadata = _schema(file).metadata or {}
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
        for row, (image, label) in enumerate(_read_rows(file)):
            place = f"{file} row {row}"
            if not isinstance(label, int) or not 0 <= label < num_classes:
                raise DataError(
                    f"{place}: label {label} is outside 0 to {num_classes - 1}; "
                    f"the data must have {num_classes} classes, numbered from 0"
                )
            if not image or image["bytes"] is None:
                raise DataError(
                    f"{place}: this row has no image bytes; remove it or embed the image"
                )
            encoded.append(image["bytes"])
            labels.append(label)
            places.append(place)
            names.append(image.get("path") or f"{file.name} row {row}")
    if not encoded:
        raise DataError(f"{files[0]}: this file has no rows; download it again")
    return ImageSet(decode_images(encoded, places, image_size), torch.tensor(labels), names)


def _read_rows(file: Path) -> list[tuple[dict | None, int | None]]:
    """The image and the label of each row."""
    schema = _schema(file)
    found = [name for name in ("img", "image") if name in schema.names]
    if len(found) != 1 or "label" not in schema.names:
        raise DataError(
            f"{file}: the columns are {', '.join(schema.names)}; "
            f"expected either 'img' or 'image', and 'label'"
        )
    (image,) = found
    kind = schema.field(image).type
    if not pa.types.is_struct(kind) or kind.get_field_index("bytes") < 0:
        raise DataError(f"{file}: column {image!r} is {kind}; expected a struct with 'bytes'")
    with blame(f"{file}: not readable as parquet", "it may be truncated, download it again"):
        table = pq.read_table(file, columns=[image, "label"], page_checksum_verification=True)
        return list(zip(table[image].to_pylist(), table["label"].to_pylist(), strict=True))


# ---- archives


def fetch_archive(url: str, md5: str, folder: Path, download: bool) -> None:
    """Extract a folder from an archive beside it, after downloading the archive if need be.

    Nothing is downloaded into a place that holds anything else: it is not the place meant. The
    folder appears in one step when it is complete, so an interrupted run leaves no half of it.

    Args:
        url: Its last part is the archive's file name.
        md5: Checksum of the archive.
        folder: The archive's top-level folder, which is to appear.
        download: Whether downloading is allowed.

    Raises:
        DataError: If the archive is not there and may not be downloaded, or fetching it fails.
    """
    root = folder.parent
    archive = root / url.rsplit("/", 1)[1]
    fix = "put the file here by other means, or point --data.root to a copy of the dataset"
    with blame(f"{archive}: fetching this from {url} failed", fix):
        others = root.exists() and any(p.name[0] != "." and p != archive for p in root.iterdir())
        if (others or not download) and not check_integrity(archive, md5):
            state = "this file is damaged" if archive.exists() else "this file is not there"
            raise DataError(
                f"{archive}: {state}, nor is the dataset in another layout; point --data.root "
                f"to the dataset, or to an empty folder with --data.download true"
            )
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".extract-") as partial:
            download_and_extract_archive(url, root, partial, md5=md5)
            os.replace(Path(partial) / folder.name, folder)
