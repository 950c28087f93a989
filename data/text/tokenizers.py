"""Text to token ids and back: bytes, or a byte-level BPE of the optional `tokenizers` library.

Every tokenizer has the same small interface: `vocab_size`, `end_of_text` (an id or None), `encode`,
`decode`, `fingerprint` and `to_state`. The state is a plain dictionary of strings, so that a
checkpoint can carry the tokenizer and still be read with `torch.load(weights_only=True)`;
`tokenizer_from_state` turns it back into a tokenizer.

Shape legend: N tokens.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, blame

END_OF_TEXT = "<|endoftext|>"
# What saved tokenizers of the common model families call their end-of-text token.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest of the two token types that holds every id below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class ByteTokenizer:
    """UTF-8 bytes as tokens: 256 ids, no training, no dependency, one byte per token."""

    vocab_size = 256
    end_of_text: int | None = None

    def encode(self, text: str) -> np.ndarray:
        """Ids of the UTF-8 bytes of `text`, uint16 [N]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the bytes `ids`; an incomplete or invalid character becomes U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what defines the tokenizer (hexadecimal)."""
        return hashlib.sha256(b"bytes").hexdigest()

    def to_state(self) -> dict[str, str]:
        """Plain dictionary for a checkpoint, read back by `tokenizer_from_state`."""
        return {"kind": "bytes", "fingerprint": self.fingerprint}


class BPETokenizer:
    """A tokenizer of the `tokenizers` library: trained here, or any saved `tokenizer.json`.

    Args:
        serialised: the contents of a `tokenizer.json`.
        source: where it came from, for the error message.

    Raises:
        DataError: the `tokenizers` library is missing or cannot read `serialised`.
    """

    def __init__(self, serialised: str, source: str = "the tokenizer") -> None:
        library = _library()
        fix = "save it again with Tokenizer.save, or choose another file"
        with blame(f"{source} is not a tokenizer.json of the tokenizers library", fix):
            self._tokenizer = library.Tokenizer.from_str(serialised)
        # Kept as given: another version of the library may write the same tokenizer differently.
        self._serialised = serialised
        # Text that happens to contain the name of a special token must stay text.
        self._tokenizer.encode_special_tokens = True
        # What a saved file may set for batching of sentences would corrupt a running text.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        ids = (self._tokenizer.token_to_id(name) for name in _END_NAMES)
        self.end_of_text: int | None = next((i for i in ids if i is not None), None)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BPETokenizer":
        """Train a byte-level BPE (Sennrich et al. 2016, over bytes as in GPT-2).

        Args:
            texts: pieces of the training text.
            vocab_size: at most this many tokens, the 256 bytes and the end-of-text token
                included; a short text may give fewer.

        Raises:
            DataError: `vocab_size` is below 257, or the `tokenizers` library is missing.
        """
        if vocab_size < 257:
            raise DataError(f"vocab_size is {vocab_size}; a byte-level BPE needs at least 257")
        library = _library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[END_OF_TEXT],
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer=trainer)
        return cls(tokenizer.to_str())

    @classmethod
    def load(cls, path: str | Path) -> "BPETokenizer":
        """Read a saved `tokenizer.json`; DataError when it is missing or not readable."""
        fix = 'give the path of a saved tokenizer.json, or one of "bytes" and "bpe"'
        with blame(f"cannot read the tokenizer file {path}", fix):
            serialised = Path(path).read_text(encoding="utf-8")
        return cls(serialised, source=str(path))

    def serialise(self) -> str:
        """The contents of a `tokenizer.json`."""
        return self._serialised

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, uint16 or uint32 [N]; no special token is added."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return np.asarray(ids, dtype=token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; special tokens are left out, invalid bytes become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the serialised tokenizer, whatever its white space (hexadecimal)."""
        canonical = json.dumps(json.loads(self._serialised), sort_keys=True)
        return hashlib.sha256(canonical.encode("utf-8")).hexdigest()

    def to_state(self) -> dict[str, str]:
        """Plain dictionary for a checkpoint, read back by `tokenizer_from_state`."""
        return {"kind": "bpe", "fingerprint": self.fingerprint, "json": self.serialise()}


Tokenizer = ByteTokenizer | BPETokenizer


def tokenizer_from_state(state: dict[str, str]) -> Tokenizer:
    """Rebuild a tokenizer from what its `to_state` returned.

    Raises:
        DataError: the state is of no known kind or was damaged.
    """
    kind = state.get("kind")
    if kind == "bytes":
        return ByteTokenizer()
    if kind != "bpe" or "json" not in state:
        raise DataError(
            f"the tokenizer state is of an unknown kind {kind!r}; expected 'bytes' or 'bpe'"
        )
    tokenizer = BPETokenizer(state["json"], source="the checkpoint's tokenizer")
    if tokenizer.fingerprint != state.get("fingerprint"):
        raise DataError("the checkpoint's tokenizer is damaged: its fingerprint does not match")
    return tokenizer


class StreamDecoder:
    """Text of a growing sequence of tokens, piece by piece, never half a character.

    Args:
        tokenizer: what decodes.
        prefix: ids that precede the stream and whose text is not repeated.
    """

    # Enough tokens that what lies before them cannot change how the next one reads.
    _WINDOW = 16

    def __init__(self, tokenizer: Tokenizer, prefix: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = [int(i) for i in prefix][-self._WINDOW :]
        self._shown = tokenizer.decode(self._ids)

    def feed(self, token: int) -> str:
        """The text that `token` completes: empty in the middle of a multi-byte character."""
        self._ids.append(int(token))
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith("\ufffd") else self._emit(text)

    def flush(self) -> str:
        """The rest: what is still pending when the stream ends."""
        return self._emit(self._tokenizer.decode(self._ids))

    def _emit(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._ids = self._ids[-self._WINDOW :]
        self._shown = self._tokenizer.decode(self._ids)
        return new


def _library() -> Any:
    """The optional `tokenizers` library, or one sentence that says how to get it."""
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            "BPE tokenizers need the tokenizers library: pip install -e .[language]"
        ) from error
    return tokenizers
