"""Round trips, state in a checkpoint, streaming, and mistakes of the user's."""

import builtins
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.text.tokenizers import (
    END_OF_TEXT,
    BPETokenizer,
    ByteTokenizer,
    StreamDecoder,
    Tokenizer,
    token_dtype,
    tokenizer_from_state,
)

TEXT = "The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen. 日本語 🙂\n" * 20


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    pytest.importorskip("tokenizers")
    return BPETokenizer.train([TEXT], vocab_size=320)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return ByteTokenizer() if request.param == "bytes" else request.getfixturevalue("bpe")


# Surrogates have no UTF-8 form, so no text file holds them.
unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=50, deadline=None)
@given(text=unicode_text)
def test_round_trip(bpe: BPETokenizer, text: str) -> None:
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16 and ids.ndim == 1
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.decode(ids) == text


@settings(max_examples=50, deadline=None)
@given(text=unicode_text, cut=st.integers(0, 5))
def test_streaming_gives_the_same_text(bpe: BPETokenizer, text: str, cut: int) -> None:
    for tokenizer in (ByteTokenizer(), bpe):
        decoder = StreamDecoder(tokenizer, prefix=tokenizer.encode(text[:cut]))
        rest = tokenizer.encode(text[cut:])
        pieces = [decoder.feed(i) for i in rest] + [decoder.flush()]
        assert text[:cut] + "".join(pieces) == text


def test_streaming_waits_for_a_whole_character() -> None:
    decoder = StreamDecoder(ByteTokenizer())
    pieces = [decoder.feed(byte) for byte in "a🙂b".encode()]
    assert pieces == ["a", "", "", "", "🙂", "b"]
    assert decoder.feed(0xFF) == ""
    assert decoder.flush() == "\ufffd"


def test_state_survives_a_checkpoint(tokenizer: Tokenizer, tmp_path: Path) -> None:
    torch.save({"tokenizer": tokenizer.to_state()}, tmp_path / "x.ckpt")
    state = torch.load(tmp_path / "x.ckpt", weights_only=True)["tokenizer"]
    again = tokenizer_from_state(state)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.vocab_size == tokenizer.vocab_size
    assert np.array_equal(again.encode(TEXT), tokenizer.encode(TEXT))


def test_a_damaged_state_is_refused(bpe: BPETokenizer) -> None:
    state = bpe.to_state()
    with pytest.raises(DataError, match="fingerprint"):
        tokenizer_from_state(state | {"fingerprint": "0"})
    with pytest.raises(DataError, match="unknown kind"):
        tokenizer_from_state({"kind": "words"})


def test_bpe_shortens_the_text_and_has_all_bytes(bpe: BPETokenizer) -> None:
    assert 257 <= bpe.vocab_size <= 320
    assert len(bpe.encode(TEXT)) < 0.7 * len(TEXT.encode())
    assert bpe.end_of_text is not None
    assert bpe.decode([bpe.end_of_text]) == ""


def test_training_is_deterministic(bpe: BPETokenizer) -> None:
    assert BPETokenizer.train([TEXT], vocab_size=320).fingerprint == bpe.fingerprint


def test_special_tokens_in_a_text_stay_text(bpe: BPETokenizer) -> None:
    ids = bpe.encode(f"a{END_OF_TEXT}b")
    assert bpe.end_of_text not in ids
    assert bpe.decode(ids) == f"a{END_OF_TEXT}b"


def test_a_saved_tokenizer_file(bpe: BPETokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe.serialise(), encoding="utf-8")
    assert BPETokenizer.load(path).fingerprint == bpe.fingerprint


def test_a_foreign_tokenizer_file(tmp_path: Path) -> None:
    """A file of another kind that also sets padding, truncation and a start token."""
    library = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "[CLS]": 1, "</s>": 2, "a": 3, "b": 4}
    foreign = library.Tokenizer(library.models.WordLevel(words, unk_token="[UNK]"))
    foreign.pre_tokenizer = library.pre_tokenizers.Whitespace()
    foreign.post_processor = library.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 1)]
    )
    foreign.enable_padding(length=8)
    foreign.enable_truncation(2)
    foreign.save(str(tmp_path / "tokenizer.json"))
    tokenizer = BPETokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.encode("a b a b c").tolist() == [3, 4, 3, 4, 0]
    assert tokenizer.end_of_text == 2
    assert tokenizer_from_state(tokenizer.to_state()).encode("a b a").tolist() == [3, 4, 3]


@pytest.mark.parametrize("content", [None, b"{}", b"not json", b"\xff\xfe\x00"])
def test_a_bad_tokenizer_file(tmp_path: Path, content: bytes | None) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json") as error:
        BPETokenizer.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fake(name: str, *args, **kwargs):
        if name.startswith("tokenizers"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(DataError, match=r"pip install -e \.\[language\]"):
        BPETokenizer.train([TEXT], 300)


def test_too_small_a_vocabulary() -> None:
    with pytest.raises(DataError, match="at least 257"):
        BPETokenizer.train([TEXT], 256)


def test_token_types() -> None:
    assert token_dtype(65_536) == np.uint16
    assert token_dtype(65_537) == np.uint32
