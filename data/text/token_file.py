"""A file of token ids that is built once, memory-mapped, and checked whenever it is reused.

`<name>.bin` holds the ids, packed as uint16 or uint32; `<name>.json` beside it is the header. Both
are written to a temporary file first and moved into place, the header last: whoever sees a header
sees a complete file, whatever was interrupted and however many processes build at once.

Shape legend: N tokens.
"""

import json
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from rich.console import Console
from rich.progress import Progress

from ..errors import DataError, blame

_VERSION = 2


@dataclass(frozen=True)
class TokenFile:
    """An open token file.

    Attributes:
        path: the `.bin` file.
        tokens_N: its ids, a read-only memory map of uint16 or uint32.
        text_bytes: UTF-8 bytes of the text that the tokens stand for.
    """

    path: Path
    tokens_N: np.ndarray
    text_bytes: int

    def __len__(self) -> int:
        return len(self.tokens_N)

    @property
    def bytes_per_token(self) -> float:
        """Mean UTF-8 bytes per token: turns nats per token into bits per byte."""
        return self.text_bytes / len(self)


def open_or_build(
    path: Path,
    source: str,
    tokenizer: str,
    dtype: np.dtype,
    pieces: Iterable[tuple[np.ndarray, int]],
    *,
    name: str,
    total_bytes: int | None = None,
    check: bool = True,
) -> TokenFile:
    """Open a token file, building it first where it is missing, damaged or of another source.

    Args:
        path: the `.bin` file; the header's name follows from it.
        source: fingerprint of the text.
        tokenizer: fingerprint of the tokenizer.
        dtype: uint16 or uint32.
        pieces: ids and the number of UTF-8 bytes they stand for, piece by piece; only iterated when
            the file has to be built.
        name: of the text, for messages.
        total_bytes: of the text, for the progress bar.
        check: read the whole file and compare its checksum, rather than its size alone.

    Raises:
        DataError: the folder cannot be written, or there were no tokens at all.
    """
    identity = {"version": _VERSION, "source": source, "tokenizer": tokenizer, "dtype": dtype.name}
    if path.with_suffix(".json").exists():
        try:
            return _open(path, identity, check)
        except ValueError as problem:
            rank_zero_info(f"{path} cannot be reused ({problem}); building it again")
    count = text_bytes = checksum = 0
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with blame(f"cannot write the token file {path}", "choose another data.cache_dir", OSError):
        with whole_file(path) as file, bar:
            task = bar.add_task(f"Tokenising {name}", total=total_bytes)
            for ids, size in pieces:
                packed = ids.astype(dtype).tobytes()
                file.write(packed)
                checksum = zlib.crc32(packed, checksum)
                count, text_bytes = count + len(ids), text_bytes + size
                bar.update(task, completed=text_bytes)
            if not count:
                raise DataError(f"{name} has no text to tokenise; give more text")
        header = identity | {"count": count, "text_bytes": text_bytes, "crc32": checksum}
        header["header_crc32"] = _header_checksum(header)
        with whole_file(path.with_suffix(".json")) as file:
            file.write(json.dumps(header, indent=2).encode())
    return _open(path, identity, check=False)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which gets its name when all is well and is removed when not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: os.replace is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _open(path: Path, identity: dict[str, object], check: bool) -> TokenFile:
    """Raises ValueError with the reason why the file cannot be used."""
    try:
        header = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        count, text_bytes, checksum = header["count"], header["text_bytes"], header["crc32"]
        size = path.stat().st_size
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"unreadable: {type(error).__name__}") from error
    for key, expected in identity.items():
        if header.get(key) != expected:
            raise ValueError(f"made from another {key}")
    if header.get("header_crc32") != _header_checksum(header):
        raise ValueError("the checksum of its header is wrong")
    dtype = np.dtype(str(identity["dtype"]))
    if size != count * dtype.itemsize:
        raise ValueError(f"{size} bytes instead of {count * dtype.itemsize}")
    tokens_N = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    if check and zlib.crc32(tokens_N) != checksum:
        raise ValueError("its checksum is wrong")
    return TokenFile(path, tokens_N, text_bytes)


def _header_checksum(header: dict[str, object]) -> int:
    rest = {key: value for key, value in header.items() if key != "header_crc32"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())
