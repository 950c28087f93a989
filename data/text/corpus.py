"""Where text comes from: files, the embedded default, downloads and Hugging Face streams.

All of them end in the same record, `Text`: a name and a fingerprint, and chunks of text in a fixed
order, so that whoever tokenises need not know the origin.
"""

import codecs
import csv
import glob
import gzip
import hashlib
import io
import itertools
import json
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import pyarrow.parquet as pq

from ..errors import DataError, blame
from .token_file import whole_file

_CHUNK = 1 << 20  # bytes of text that are read and tokenised at a time

_TABLES = {".jsonl", ".ndjson", ".csv", ".tsv", ".parquet"}

_RAW = "https://raw.githubusercontent.com"
_WIKITEXT = f"{_RAW}/pytorch/examples/main/word_language_model/data/wikitext-2"
# By split: the address, and Git's id of the content (SHA-1 of "blob <size>\\0<content>").
DOWNLOADS = {
    "tinyshakespeare": {
        "train": (
            f"{_RAW}/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            "7dcb3a2d4cc3b48b6283dd46870bfeb78f88aac9",
        ),
    },
    "wikitext2": {
        "train": (f"{_WIKITEXT}/train.txt", "2d84b35af79e411d73ea7cae83c73964c6ac83b4"),
        "val": (f"{_WIKITEXT}/valid.txt", "eec944eb2d9e46061cd34a6913528797db6842fc"),
        "test": (f"{_WIKITEXT}/test.txt", "6f3fc88e4cd88456ea892971f9f12243e8428624"),
    },
}


@dataclass(frozen=True)
class Text:
    """A text that can be read again and again.

    Attributes:
        name: for messages.
        fingerprint: SHA-256 (hexadecimal) of what determines the content.
        chunks: gives an iterator of (starts a document, text), each chunk a whole number of
            characters.
        size: UTF-8 bytes, where known beforehand.
        max_tokens: read no further than this many tokens.
    """

    name: str
    fingerprint: str
    chunks: Callable[[], Iterator[tuple[bool, str]]]
    size: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Span:
    """A part of a file, or of the embedded text where `path` is None.

    Attributes:
        path: the file.
        start: first byte, of the text in UTF-8 as it is unpacked.
        stop: one past the last byte.
        column: of a table, whose rows are documents; they lie one after the other, and a row
            belongs to the span that has its first byte.
    """

    path: Path | None
    start: int
    stop: int
    column: str | None = None

    def open(self) -> BinaryIO:
        """The whole file, positioned at `start`."""
        file: BinaryIO = io.BytesIO(embedded_text()) if self.path is None else _open(self.path)
        file.seek(self.start)
        return file


def embedded_text() -> bytes:
    """The Python language reference that CPython carries for `help()`, about 460 kB of UTF-8.

    Its wording differs a little from one Python version to the next.
    """
    with blame("this Python lacks the embedded text", "name a text file or folder with data.files"):
        from pydoc_data.topics import topics
    return "\n\n".join(topics[key].strip("\n") for key in sorted(topics)).encode("utf-8")


def find_files(names: str | Sequence[str], key: str, column: str = "text") -> list[Span]:
    """The texts that `names` stand for.

    Args:
        names: files, folders, which are searched for `*.txt`, or patterns such as `docs/**/*.md`;
            what a folder or a pattern stands for is sorted. Tables (.jsonl, .csv, .tsv, .parquet)
            are read by column; any of them, and text, may be compressed (.gz).
        key: the option they were given with, for messages.
        column: that has the text in tables.

    Raises:
        DataError: a path that does not exist, a folder without text files, an empty file, a table
            that has no such column or can't be read.
    """
    paths: list[Path] = []
    for name in [names] if isinstance(names, str) else names:
        path = Path(name).expanduser()
        if path.is_file():
            found = [path]
        elif path.is_dir():
            found = path.rglob("*.txt")
        else:
            found = map(Path, glob.glob(str(path), recursive=True))
        inside = sorted(p for p in found if p.is_file())
        if not inside and path.is_dir():
            raise DataError(
                f"{key}: the folder {path} has no .txt file; add one, or name other files by "
                f"a pattern such as {path}/**/*.md"
            )
        if not inside:
            raise DataError(
                f"{key}: {path} does not exist; give a text file, a folder of .txt or a "
                f"pattern such as docs/**/*.md"
            )
        paths += inside
    if not paths:
        raise DataError(f"{key}: the list is empty; name at least one text file")
    spans = [_whole(path, column) for path in paths]
    for span in spans:
        if span.start == span.stop:
            raise DataError(
                f"{key}: the file {span.path} is empty; remove it or give one with text"
            )
    return spans


def _whole(path: Path, column: str) -> Span:
    if _kind(path) in _TABLES:
        return Span(path, 0, sum(size for _, size in _rows(path, column)), column)
    with blame(f"{path} cannot be read", "mend it, or leave it out"), _open(path) as file:
        start = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        return Span(path, start, file.seek(0, io.SEEK_END))


def _kind(path: Path) -> str:
    """The suffix, that before .gz where there is one."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix == ".gz" else suffix


def _open(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")


def _rows(path: Path, column: str) -> Iterator[tuple[str, int]]:
    """The texts of a table that are not empty, with their size in UTF-8.

    Raises:
        DataError: a row without text in this column, or one that can't be read.
    """
    number = 1
    try:
        for cell in _cells(path, column):
            if not isinstance(cell, str):
                raise DataError(f"{path} row {number} has no text in column {column!r}; remove it")
            if size := len(cell.encode("utf-8")):
                yield cell, size
            number += 1
    except KeyError as error:
        raise DataError(
            f"{path} row {number} has no column {column!r}; set data.column to the one that "
            "has the text"
        ) from error
    except DataError:
        raise
    except Exception as error:  # damaged bytes make the readers raise anything
        raise DataError(
            f"{path} row {number} cannot be read ({error}); mend the file, or leave it out"
        ) from error


def _cells(path: Path, column: str) -> Iterator[object]:
    kind = _kind(path)
    with _open(path) as file:
        if kind == ".parquet":
            for batch in pq.ParquetFile(file).iter_batches(1024, columns=[column]):
                yield from batch[column].to_pylist()
            return
        lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
        if kind in (".csv", ".tsv"):
            csv.field_size_limit(1 << 30)  # documents are longer than the cells of most tables
            rows = csv.DictReader(lines, delimiter="," if kind == ".csv" else "\t", strict=True)
        else:
            rows = (json.loads(line) for line in lines if line.strip())
        for row in rows:
            yield row[column]


def split_spans(spans: Sequence[Span], fraction: float) -> tuple[list[Span], list[Span]]:
    """Cut a text in two; the second part is the last `fraction` of its bytes.

    The cut moves forward to the start of a character, so that both parts are valid UTF-8.
    """
    cut = int(sum(s.stop - s.start for s in spans) * (1 - fraction))
    first: list[Span] = []
    second: list[Span] = []
    for span in spans:
        middle = min(max(span.start + cut, span.start), span.stop)
        if span.start < middle < span.stop and span.column is None:
            middle = _character_start(span, middle)
        first.append(replace(span, stop=middle))
        second.append(replace(span, start=middle))
        cut -= span.stop - span.start
    return [s for s in first if s.stop > s.start], [s for s in second if s.stop > s.start]


def text_of_spans(name: str, spans: Sequence[Span]) -> Text:
    """One text of several spans, each of them a document, or many where it is a table.

    Raises:
        DataError: a file that is not UTF-8 text (when the chunks are read).
    """
    digest = hashlib.sha256()
    for span in spans:
        if span.column is not None:
            for _, row in _documents(span):
                content = row.encode("utf-8")
                digest.update(b"row %d " % len(content) + content)
            continue
        digest.update(f"{span.stop - span.start} ".encode())
        for block in _blocks(span):
            digest.update(block)
    return Text(
        name,
        digest.hexdigest(),
        lambda: itertools.chain.from_iterable(_documents(span) for span in spans),
        sum(span.stop - span.start for span in spans),
    )


def download(dataset: str, folder: Path) -> dict[str, str]:
    """Fetch the files of a small public text, by split, once, into `folder`.

    Args:
        dataset: a key of `DOWNLOADS`: Tiny Shakespeare (Karpathy's char-rnn) or WikiText-2 (Merity
            et al. 2016, word level, as the PyTorch examples carry it).
        folder: where to keep it.

    Raises:
        DataError: an unknown name, no network, or a file other than the expected one.
    """
    if dataset not in DOWNLOADS:
        raise DataError(f"data.dataset is {dataset!r}; choose one of {', '.join(DOWNLOADS)}")
    found = {}
    for split, (url, expected) in DOWNLOADS[dataset].items():
        path = folder / dataset / url.rsplit("/", 1)[1]
        found[split] = str(path)
        if path.is_file():
            continue
        hint = f"download it by hand to {path}, or name your own text with data.files"
        # urllib's errors and time-outs are all of this kind.
        with (
            blame(f"cannot download {url}", hint, OSError),
            urllib.request.urlopen(url, timeout=30) as response,
        ):
            content = response.read()
        if hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() != expected:
            raise DataError(f"{url} did not give the expected file; {hint}")
        with whole_file(path) as file:
            file.write(content)
    return found


def stream_documents(
    dataset: str, name: str | None, split: str, field: str, start: int, stop: int | None
) -> Iterator[str]:
    """Documents `start` to `stop` of a Hugging Face dataset, streamed.

    Raises:
        DataError: the `datasets` library is missing, the dataset cannot be reached, or its rows
            have no text under `field`.
    """
    try:
        import datasets

        rows = datasets.load_dataset(dataset, name=name, split=split, streaming=True)
        for row in itertools.islice(rows, start, stop):
            yield row[field]
    except ImportError as error:
        raise DataError(
            "Hugging Face data needs the datasets library: pip install -e .[language]"
        ) from error
    except KeyError as error:
        raise DataError(f"{dataset} has no field {field!r}; set data.text_field") from error
    except (OSError, ValueError) as error:  # what the library raises for network and bad names
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"cannot read the dataset {dataset} ({reason}); check its name and the network"
        ) from error


def streamed_text(*place: str | int | None, max_tokens: int | None = None) -> Text:
    """What `stream_documents` gives for these arguments as a text of at most `max_tokens`.

    A stream has no checksum: what it is asked for stands for its content.
    """
    asked = json.dumps([*place, max_tokens])
    return Text(
        str(place[0]),
        hashlib.sha256(asked.encode()).hexdigest(),
        lambda: ((True, document) for document in stream_documents(*place)),
        max_tokens=max_tokens,
    )


def _blocks(span: Span) -> Iterator[bytes]:
    """The bytes of a span, cut after a line where there are lines."""
    with span.open() as file:
        left = span.stop - span.start
        while left > 0:
            block = file.read(min(_CHUNK, left))
            if not block:
                raise DataError(f"{span.path} became shorter while it was read; run again")
            left -= len(block)
            # A line feed is where a tokenizer's words end; without one the cut falls anywhere.
            rest = file.readline(min(_CHUNK, left)) if left else b""
            left -= len(rest)
            yield block + rest


def _documents(span: Span) -> Iterator[tuple[bool, str]]:
    """Chunks of a span's text, and whether each starts a document."""
    if span.column is None:
        yield from _decode(span)
        return
    at = 0
    for row, size in _rows(span.path, span.column):
        if span.start <= at < span.stop:
            yield True, row
        at += size


def _decode(span: Span) -> Iterator[tuple[bool, str]]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    start, seen = True, span.start
    for block in itertools.chain(_blocks(span), [b""]):
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{span.path} is not UTF-8 text (near byte {seen + error.start}); "
                "convert it to UTF-8, or leave it out"
            ) from error
        if "\0" in text:
            raise DataError(f"{span.path} is a binary file, not text; leave it out")
        seen += len(block)
        if text:
            yield start, text
            start = False


def _character_start(span: Span, position: int) -> int:
    with replace(span, start=position).open() as file:
        following = file.read(4)
    # Bytes of the form 10xxxxxx continue a character; there are at most three in a row.
    starts = (i for i, byte in enumerate(following) if byte & 0xC0 != 0x80)
    skip = next(starts, len(following))
    return min(position + skip, span.stop)
