"""Text for language models, as blocks of tokens from a memory-mapped token file.

Shape legend: B batch, S block_size (positions that predict), N tokens of a text.

A batch is one tensor, LongTensor [B, S + 1]: the model reads `batch[:, :-1]` and predicts
`batch[:, 1:]`. In validation and test, -100 marks the places after the end of the text.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ..batches import BatchLoader
from ..errors import DataError, check_range
from .corpus import (
    Span,
    Text,
    download,
    embedded_text,
    find_files,
    split_spans,
    streamed_text,
    text_of_spans,
)
from .token_file import TokenFile, open_or_build, whole_file
from .tokenizers import BPETokenizer, ByteTokenizer, Tokenizer, token_dtype

IGNORED = -100  # a place that is no token: cross_entropy's default ignore_index

Split = Literal["train", "val", "test"]
_NAMES = {"train": "training", "val": "validation", "test": "test"}


class TextData(L.LightningDataModule):
    """Blocks of tokens for training, and whole texts for validation and test.

    Training: the text is cut into non-overlapping blocks of `block_size` predictions, from an
    offset that is drawn anew in each epoch; an epoch takes each block once, in random order, both a
    pure function of (seed, epoch). Blocks that do not fill the last batch sit out.
    Validation and test: consecutive blocks that predict every token but the first exactly once.

    Args:
        files: a text file (UTF-8), a folder of `.txt` files, a pattern such as `docs/**/*.md`, a
            table (`.jsonl`, `.csv`, `.tsv`, `.parquet`) whose rows are documents, or a list of
            these; text and tables may be compressed (`.gz`). Null for the Python language
            reference that CPython carries.
        val_files: likewise; null for the last `val_fraction` of the text of `files`.
        test_files: likewise; null to test on the validation text.
        dataset: a public text to download in place of `files`.
        val_fraction: share of the bytes of `files`, from their end, kept for validation.
        tokenizer: `bytes`; `bpe` for a byte-level BPE trained on the training text; or the path of
            a saved `tokenizer.json`.
        vocab_size: of the BPE that is trained here.
        block_size: tokens that a block predicts (the model's sequence length S).
        batch_size: blocks in one optimisation step's batch, over all devices together.
        eval_batch_size: likewise for validation and test; null for `batch_size`.
        seed: of the order and the offsets.
        cache_dir: where downloads, trained tokenizers and token files are kept.
        column: that has the text in tables.

    A data set of your own is a subclass that defines `texts`.

    Attributes:
        tokenizer: the tokenizer object, once `setup` has run.

    Raises:
        DataError: (from `prepare_data` and `setup`) a file that is missing, empty or not UTF-8
            text, or a text that is shorter than a block.
    """

    tokenizer: Tokenizer

    def __init__(
        self,
        files: list[str] | str | None = None,
        val_files: list[str] | str | None = None,
        test_files: list[str] | str | None = None,
        dataset: Literal["tinyshakespeare", "wikitext2"] | None = None,
        val_fraction: float = 0.1,
        tokenizer: str = "bytes",
        vocab_size: int = 1024,
        block_size: int = 128,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        seed: int = 0,
        cache_dir: str = "data_cache/text",
        column: str = "text",
    ) -> None:
        super().__init__()
        if files is not None and dataset is not None:
            raise DataError("data.files and data.dataset exclude each other; set one of them")
        if not 0 < val_fraction < 1:
            raise DataError(f"--data.val_fraction is {val_fraction}; it must lie between 0 and 1")
        check_range(1, block_size=block_size, batch_size=batch_size)
        check_range(1, eval_batch_size=eval_batch_size)
        check_range(0, seed=seed)
        self.files, self.val_files, self.test_files = files, val_files, test_files
        self.dataset, self.val_fraction = dataset, val_fraction
        self.tokenizer_choice, self.vocab_size = tokenizer, vocab_size
        self.block_size, self.batch_size = block_size, batch_size
        self.eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        self.seed, self.cache_dir, self.column = seed, Path(cache_dir).expanduser(), column
        self._files: dict[Split, TokenFile] = {}

    def prepare_data(self) -> None:
        """Download, train the tokenizer and write the token files, where not done before."""
        self._open(check=True)

    def setup(self, stage: str | None = None) -> None:
        """Open the token files (and write them, should `prepare_data` not have run here)."""
        if not self._files:
            self._open(check=False)

    def _open(self, check: bool) -> None:
        texts = self.texts()
        self.tokenizer = self._make_tokenizer(texts["train"])
        for split, text in texts.items():
            # A text of no bytes has no token file: say what is wrong rather than fail to build one.
            count = 0
            if text.size != 0:
                prints = text.fingerprint, self.tokenizer.fingerprint
                self._files[split] = open_or_build(
                    self.cache_dir / f"tokens-{prints[0][:16]}-{prints[1][:16]}.bin",
                    *prints,
                    token_dtype(self.tokenizer.vocab_size),
                    encode_text(text, self.tokenizer),
                    name=text.name,
                    total_bytes=text.size,
                    check=check,
                )
                count = len(self._files[split])
            if count <= self.block_size:
                more = f"give a longer text with data.{split}_files"
                if split == "train":
                    more = "give more training text"
                elif self.val_files is None:
                    more = f"raise data.val_fraction, or {more}"
                raise DataError(
                    f"the {_NAMES[split]} text, {text.name}, has {count} tokens and a block needs "
                    f"{self.block_size + 1}; lower data.block_size or {more}"
                )

    def texts(self) -> dict[Split, Text]:
        """The texts by split, `train` and `val`; without `test`, it is `val` that is tested on."""
        train, val, test = self.files, self.val_files, self.test_files
        if self.dataset is not None:
            found = download(self.dataset, self.cache_dir)
            train, val, test = found["train"], val or found.get("val"), test or found.get("test")
        spans = {"train": self._find(train, "files")}
        names = {"train": "the embedded text" if train is None else str(train)}
        if val is None:
            spans["train"], spans["val"] = split_spans(spans["train"], self.val_fraction)
            names["val"] = f"the last {self.val_fraction:g} of {names['train']}"
        given = {split: own for split, own in (("val", val), ("test", test)) if own is not None}
        for split, own in given.items():
            spans[split], names[split] = self._find(own, f"{split}_files"), str(own)
        texts = {split: text_of_spans(names[split], spans[split]) for split in spans}
        paths = {split: {s.path.resolve() for s in spans[split] if s.path} for split in spans}
        for split, own in given.items():
            equal = texts[split].fingerprint == texts["train"].fingerprint
            if equal or paths[split] & paths["train"]:
                rank_zero_info(
                    f"data.{split}_files: {own} is training text too, at least in part: the loss "
                    f"on it says nothing about new text"
                )
        return texts

    def _find(self, names: list[str] | str | None, key: str) -> list[Span]:
        if names is None:
            return [Span(None, 0, len(embedded_text()))]
        return find_files(names, f"data.{key}", self.column)

    def _make_tokenizer(self, train: Text) -> Tokenizer:
        if self.tokenizer_choice == "bytes":
            return ByteTokenizer()
        if self.tokenizer_choice != "bpe":
            return BPETokenizer.load(self.tokenizer_choice)
        stem = f"bpe-{self.vocab_size}-{train.fingerprint[:16]}"
        for path in sorted(self.cache_dir.glob(f"{stem}-*.json")):
            # A damaged file may well be a tokenizer still, but another one.
            if path.stem == f"{stem}-{zlib.crc32(path.read_bytes()):08x}":
                return BPETokenizer.load(path)
            rank_zero_info(f"{path} is damaged: training the tokenizer again")
        tokenizer = BPETokenizer.train(_first_bytes(train), self.vocab_size)
        content = tokenizer.serialise().encode("utf-8")
        with whole_file(self.cache_dir / f"{stem}-{zlib.crc32(content):08x}.json") as file:
            file.write(content)
        return tokenizer

    def bytes_per_token(self, split: Split = "val") -> float:
        """UTF-8 bytes per token of a split: bits per byte = nats per token / ln 2 / this."""
        return self._split(split).bytes_per_token

    def _split(self, split: Split) -> TokenFile:
        return self._files.get(split, self._files["val"])

    def train_dataloader(self) -> BatchLoader:
        """Shuffled blocks, LongTensor [B, S + 1]."""
        file = self._split("train")
        # One block fewer than would fit leaves room for any offset below block_size.
        blocks = max(1, (len(file) - self.block_size) // self.block_size)
        room = min(self.block_size, len(file) - blocks * self.block_size)

        def make_batch(index: Tensor, local: slice, _: torch.Generator, epoch: int) -> Tensor:
            return self._blocks(file, index[local], self._offset(epoch, room))

        return BatchLoader(
            make_batch,
            blocks,
            self.batch_size,
            shuffle=True,
            seed=self.seed,
            drop_last=blocks >= self.batch_size,
            trainer=self.trainer,
        )

    def val_dataloader(self) -> BatchLoader:
        """Consecutive blocks of the validation text, [B, S + 1], -100 after its end."""
        return self._eval_loader("val")

    def test_dataloader(self) -> BatchLoader:
        """Consecutive blocks of the test text, or of the validation text where there is none."""
        return self._eval_loader("test")

    def _eval_loader(self, split: Split) -> BatchLoader:
        file = self._split(split)
        return BatchLoader(
            lambda index, local, *_: self._blocks(file, index[local], 0),
            -(-(len(file) - 1) // self.block_size),
            self.eval_batch_size,
            trainer=self.trainer,
        )

    def _offset(self, epoch: int, room: int) -> int:
        """Where an epoch's blocks start, below `room`."""
        return int(np.random.default_rng((self.seed, epoch)).integers(room))

    def _blocks(self, file: TokenFile, index_B: Tensor, offset: int) -> Tensor:
        """Blocks `index_B` of a text that starts at `offset`; they share their border tokens."""
        place = index_B.numpy()[:, None] * self.block_size + offset + np.arange(self.block_size + 1)
        tokens = file.tokens_N[np.minimum(place, len(file) - 1)].astype(np.int64)
        return torch.from_numpy(np.where(place < len(file), tokens, IGNORED))


class HuggingFaceText(TextData):
    """Documents of a Hugging Face dataset, streamed once into the same token files as `TextData`.

    Needs the optional `datasets` library and the network. The first `val_documents` documents are
    the validation text, the following ones the training text. Documents are separated by the
    tokenizer's end-of-text token, or by an empty line where it has none.

    Args:
        dataset: name of the dataset; the default is a sample of FineWeb-Edu (Penedo et al. 2024).
        name: its configuration.
        split: its split.
        text_field: the column of the text.
        max_tokens: training tokens to keep.
        val_documents: documents for validation.
        tokenizer: as in `TextData`; a BPE is trained on the first 16 MiB.
        vocab_size: as in `TextData`.
        block_size: as in `TextData`.
        **kwargs: see `TextData`.
    """

    def __init__(
        self,
        dataset: str = "HuggingFaceFW/fineweb-edu",
        name: str | None = "sample-10BT",
        split: str = "train",
        text_field: str = "text",
        max_tokens: int = 100_000_000,
        val_documents: int = 1000,
        tokenizer: str = "bpe",
        vocab_size: int = 32_000,
        block_size: int = 1024,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            files=None,
            val_files=None,
            test_files=None,
            val_fraction=0.1,
            column=text_field,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            block_size=block_size,
            **kwargs,
        )
        check_range(0, val_documents=val_documents)
        check_range(1, max_tokens=max_tokens)
        self.source = (dataset, name, split, text_field)
        self.max_tokens, self.val_documents = max_tokens, val_documents

    def texts(self) -> dict[Split, Text]:
        """The first documents for validation, the others for training."""
        cut = self.val_documents
        return {
            "train": streamed_text(*self.source, cut, None, max_tokens=self.max_tokens),
            "val": streamed_text(*self.source, 0, cut),
        }


def encode_text(text: Text, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Token ids of a text, piece by piece, with the UTF-8 bytes that they stand for.

    Between documents stands the end-of-text token, or an empty line where there is none.
    """
    end = tokenizer.end_of_text
    separator = tokenizer.encode("\n\n") if end is None else np.array([end])
    left = text.max_tokens
    for number, (starts_document, piece) in enumerate(text.chunks()):
        ids, size = tokenizer.encode(piece), len(piece.encode("utf-8"))
        if starts_document and number:
            ids, size = np.concatenate((separator, ids)), size + (2 if end is None else 0)
        if left is not None:
            if len(ids) > left:
                ids = ids[:left]
                size = len(tokenizer.decode(ids).encode("utf-8"))
            left -= len(ids)
        yield ids, size
        if left == 0:
            return


def _first_bytes(text: Text, limit: int = 1 << 24) -> Iterator[str]:
    """The first `limit` bytes or so of a text: enough to train a tokenizer."""
    for _, piece in text.chunks():
        yield piece
        limit -= len(piece)
        if limit <= 0:
            return
