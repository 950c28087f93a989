"""Reading labelled images from parquet files, class folders and archives into uint8 tensors."""

from __future__ import annotations

import filecmp
import io
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
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
    pixels_NHWC: np.ndarray | None = None
    transparent = 0
    for i, source in enumerate(_progress(sources)):
        image, on_white = _decode(source, names[i])
        transparent += on_white
        if image_size is not None and image.size != (image_size, image_size):
            image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR)
        if pixels_NHWC is None:
            pixels_NHWC = np.empty((len(sources), image.height, image.width, 3), np.uint8)
        first_height, first_width = pixels_NHWC.shape[1:3]
        if image.size != (first_width, first_height):
            raise DataError(
                f"{names[i]}: this image is {image.width}x{image.height}, {names[0]} is "
                f"{first_width}x{first_height}; set --data.image_size to bring all to one size"
            )
        pixels_NHWC[i] = np.asarray(image)
    assert pixels_NHWC is not None, "no images to decode"
    if transparent:
        rank_zero_info(
            f"{names[0]} and those with it: {transparent} of {len(names)} images have transparent "
            f"parts, which are read as white"
        )
    return torch.from_numpy(pixels_NHWC).permute(0, 3, 1, 2).contiguous()


def _decode(source: Path | bytes, name: str) -> tuple[Image.Image, bool]:
    """An image as RGB, and whether parts of it are transparent."""
    try:
        content = source if isinstance(source, bytes) else source.read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            image.verify()  # a PNG's checksums, which decoders leave out for the pixels
        with Image.open(io.BytesIO(content)) as image:
            ImageOps.exif_transpose(image, in_place=True)
            return _to_rgb(image)
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error and more
        raise DataError(
            f"{name}: this image cannot be decoded ({error}); replace or remove it"
        ) from error


def _to_rgb(image: Image.Image) -> tuple[Image.Image, bool]:
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        # Pillow's conversion would clip at 255.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB"), False
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers of unknown range; save it with 8 bits")
    if not image.has_transparency_data:
        return image.convert("RGB"), False
    image = image.convert("RGBA")
    if image.getextrema()[3][0] == 255:
        return image.convert("RGB"), False
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB"), True


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
        raise DataError(f"{folder}: no such folder; it must hold a folder of images for each class")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not _hidden(path))
    if not names:
        raise DataError(f"{folder}: no class folders here; put each class's images into its own")
    return names


def _hidden(path: Path) -> bool:
    """Whether a file or folder is one that a system leaves behind, such as macOS's ._name.jpg."""
    return path.name[0] == "." or path.name == "__MACOSX"


def find_images(folder: Path, passed_over: Counter[str]) -> list[Path]:
    """Return all image files in `folder`, at any depth, sorted. Links are followed.

    Args:
        folder: Where to look.
        passed_over: Counts, by kind, the files that are no images.

    Raises:
        DataError: If there is no such folder, or no image in it.
    """
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


def _say_passed_over(folder: Path, passed_over: Counter[str]) -> None:
    if total := passed_over.total():
        kinds = ", ".join(f"{count} {kind}" for kind, count in passed_over.most_common() if count)
        rank_zero_info(f"{folder}: passed over {total} files that are no images: {kinds}")


def read_class_folders(folder: Path, class_names: list[str], image_size: int | None) -> ImageSet:
    """Read folder/<class>/**/<image>.

    Args:
        folder: Holds a folder for each class.
        class_names: All classes in the order of their labels; some may be absent here.
        image_size: See `decode_images`.

    Raises:
        DataError: If a folder is not a class or has no images, or an image is unreadable.
    """
    files, labels = [], []
    passed_over = Counter(
        _not_an_image(path) or "outside the class folders"
        for path in folder.iterdir()
        if not path.is_dir()
    )
    for name in list_classes(folder):
        if name not in class_names:
            raise DataError(
                f"{folder / name}: there is no class {name!r} in the training set; "
                f"rename the folder or add training images of it"
            )
        found = find_images(folder / name, passed_over)
        files += found
        labels += [class_names.index(name)] * len(found)
    return _read_files(folder, files, labels, passed_over, image_size)


def read_unlabelled(folder: Path, image_size: int | None) -> ImageSet:
    """Read all images in a folder, at any depth; labels are -1.

    Raises:
        DataError: If there are no images or one is unreadable.
    """
    passed_over: Counter[str] = Counter()
    files = find_images(folder, passed_over)
    return _read_files(folder, files, [-1] * len(files), passed_over, image_size)


def _read_files(
    folder: Path,
    files: list[Path],
    labels: list[int],
    passed_over: Counter[str],
    image_size: int | None,
) -> ImageSet:
    _say_passed_over(folder, passed_over)
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
    try:
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
    except DataError:
        raise
    except Exception as error:  # of the network, the file system and three kinds of archive
        raise DataError(
            f"{archive}: fetching this from {url} failed ({error}); "
            f"put the file here by other means, or point --data.root to a copy of the dataset"
        ) from error
