"""Text data: blocks, coverage, resuming, the token file, sources, and mistakes of the user's."""

import csv
import gzip
import hashlib
import io
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import DataError
from data.text import corpus
from data.text.corpus import find_files, split_spans, text_of_spans
from data.text.module import IGNORED, HuggingFaceText, TextData
from data.text.tokenizers import ByteTokenizer

WORDS = "".join(f"line {i}: the number {i * i} is a square, äöü\n" for i in range(300))


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(WORDS, encoding="utf-8")
    return path


def make(tmp_path: Path, **options) -> TextData:
    defaults = {"block_size": 16, "batch_size": 8, "cache_dir": str(tmp_path / "cache")}
    module = TextData(**(defaults | options))
    module.prepare_data()
    module.setup("fit")
    return module


def stub_trainer(epoch: int, batch: int, rank: int = 0, world_size: int = 1) -> SimpleNamespace:
    progress = SimpleNamespace(current=SimpleNamespace(ready=batch))
    return SimpleNamespace(
        current_epoch=epoch,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        global_rank=rank,
        world_size=world_size,
    )


def decode(module: TextData, tokens: torch.Tensor) -> str:
    return module.tokenizer.decode(tokens[tokens >= 0])


# Blocks


def test_the_embedded_default(tmp_path: Path) -> None:
    module = make(tmp_path, block_size=128)
    batch = next(iter(module.train_dataloader()))
    assert batch.shape == (8, 129) and batch.dtype == torch.int64
    assert batch.min() >= 0 and batch.max() < module.tokenizer.vocab_size == 256
    assert module.bytes_per_token() == 1.0
    whole = sum(len(f) for f in module._files.values())
    assert whole == len(corpus.embedded_text()) > 300_000
    assert len(module._files["val"]) == pytest.approx(0.1 * whole, abs=4)


def test_an_epoch_takes_each_block_once(tmp_path: Path, book: Path) -> None:
    module = make(tmp_path, files=str(book), batch_size=1)
    loader = module.train_dataloader()
    offsets = set()
    tokens_N = module._files["train"].tokens_N
    for epoch in range(4):
        blocks = torch.cat(list(loader))
        offset = module._offset(epoch, 16)
        offsets.add(offset)
        assert len(blocks) == len(loader) == (len(tokens_N) - 16) // 16
        starts = range(offset, len(tokens_N) - 16, 16)[: len(blocks)]
        assert sorted(blocks.tolist()) == sorted(tokens_N[s : s + 17].tolist() for s in starts)
    assert len(offsets) > 1


def test_batches_depend_on_seed_epoch_and_place_alone(tmp_path: Path, book: Path) -> None:
    def batches(seed: int, epoch: int, first: int) -> list[torch.Tensor]:
        module = make(tmp_path, files=str(book), seed=seed)
        module.trainer = stub_trainer(epoch, first)
        return list(module.train_dataloader())

    whole = batches(3, 2, 0)
    resumed = batches(3, 2, 5)
    assert len(resumed) == len(whole) - 5
    assert all(torch.equal(a, b) for a, b in zip(resumed, whole[5:], strict=True))
    assert not torch.equal(batches(3, 1, 0)[0], whole[0])
    assert not torch.equal(batches(4, 2, 0)[0], whole[0])


def test_processes_share_each_batch(tmp_path: Path, book: Path) -> None:
    parts = []
    for rank in range(2):
        module = make(tmp_path, files=str(book))
        module.trainer = stub_trainer(0, 0, rank, world_size=2)
        parts.append(next(iter(module.train_dataloader())))
    module.trainer = stub_trainer(0, 0)
    assert torch.equal(torch.cat(parts), next(iter(module.train_dataloader())))


@settings(max_examples=20, deadline=None)
@given(length=st.integers(20, 90), block=st.integers(1, 19), size=st.integers(1, 5))
def test_validation_predicts_every_token_once(
    tmp_path_factory: pytest.TempPathFactory, length: int, block: int, size: int
) -> None:
    folder = tmp_path_factory.mktemp("text")
    text = "".join(chr(33 + i) for i in range(length))
    (folder / "val.txt").write_text(text)
    (folder / "train.txt").write_text(WORDS)
    module = make(
        folder,
        files=str(folder / "train.txt"),
        val_files=str(folder / "val.txt"),
        block_size=block,
        eval_batch_size=size,
    )
    targets = torch.cat([batch[:, 1:].flatten() for batch in module.val_dataloader()])
    assert targets[targets != IGNORED].tolist() == list(text.encode())[1:]
    for batch in module.val_dataloader():
        assert batch.shape[1] == block + 1
        assert (batch[:, 0] != IGNORED).all()  # no block is empty


def test_short_text_gives_one_block(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijklmnopqrst")
    module = make(
        tmp_path, files=str(tmp_path / "a.txt"), val_files=str(tmp_path / "a.txt"), block_size=15
    )
    for batch in module.train_dataloader():
        assert batch.shape == (1, 16)
        assert decode(module, batch) in "abcdefghijklmnopqrst"


# Tokenizers and bits per byte


def test_bpe_is_trained_once_and_counts_bytes(tmp_path: Path, book: Path) -> None:
    pytest.importorskip("tokenizers")
    module = make(tmp_path, files=str(book), tokenizer="bpe", vocab_size=300)
    val = module._files["val"]
    text = module.tokenizer.decode(val.tokens_N)
    assert WORDS.endswith(text)
    assert module.bytes_per_token() == pytest.approx(len(text.encode()) / len(val))
    assert module.bytes_per_token() > 1.3
    saved = list((tmp_path / "cache").glob("bpe-300-*.json"))
    assert len(saved) == 1
    again = make(tmp_path, files=str(book), tokenizer=str(saved[0]))
    assert again.tokenizer.fingerprint == module.tokenizer.fingerprint
    saved[0].write_text("damaged")
    third = make(tmp_path, files=str(book), tokenizer="bpe", vocab_size=300)
    assert third.tokenizer.fingerprint == module.tokenizer.fingerprint


def test_bits_per_byte_of_a_uniform_model(tmp_path: Path, book: Path) -> None:
    module = make(tmp_path, files=str(book))
    assert math.log(256) / math.log(2) / module.bytes_per_token() == 8.0


# The token file


def token_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("tokens-*.bin"))


def test_the_token_file_is_reused(tmp_path: Path, book: Path, monkeypatch) -> None:
    make(tmp_path, files=str(book))
    before = {p: p.stat().st_mtime_ns for p in token_files(tmp_path)}
    assert len(before) == 2
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *_: pytest.fail("tokenised again"))
    make(tmp_path, files=str(book))
    assert {p: p.stat().st_mtime_ns for p in token_files(tmp_path)} == before
    assert not list((tmp_path / "cache").glob("*.part"))


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        lambda path: path.unlink(),
        lambda path: path.with_suffix(".json").write_text("{"),
        lambda path: path.with_suffix(".json").write_text('{"count": "many"}'),
        lambda path: path.with_suffix(".json").unlink(),
    ],
)
def test_a_damaged_token_file_is_rebuilt(tmp_path: Path, book: Path, damage, caplog) -> None:
    make(tmp_path, files=str(book))
    sound = [p.read_bytes() for p in token_files(tmp_path)]
    damage(token_files(tmp_path)[0])
    make(tmp_path, files=str(book))
    assert [p.read_bytes() for p in token_files(tmp_path)] == sound


def test_changed_text_gets_its_own_file(tmp_path: Path, book: Path) -> None:
    make(tmp_path, files=str(book))
    book.write_text(WORDS.replace("square", "SQUARE"), encoding="utf-8")
    module = make(tmp_path, files=str(book))
    assert "SQUARE" in module.tokenizer.decode(module._files["train"].tokens_N)


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, book: Path, monkeypatch) -> None:
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, files=str(book))
    assert not list((tmp_path / "cache").glob("*"))
    make(tmp_path, files=str(book))


def test_header(tmp_path: Path, book: Path) -> None:
    make(tmp_path, files=str(book))
    headers = [json.loads(p.with_suffix(".json").read_text()) for p in token_files(tmp_path)]
    assert sum(h["text_bytes"] for h in headers) == len(WORDS.encode())
    assert {h["dtype"] for h in headers} == {"uint16"}


def test_a_folder_that_cannot_be_written(tmp_path: Path, book: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"data\.cache_dir"):
        make(tmp_path, files=str(book))


# Files


def test_a_folder_in_sorted_order(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "sub/c.txt", "ignored.md"):
        (folder / name).write_text(f"text of {name} " * 10)
    module = make(tmp_path, files=str(folder), val_files=[str(folder / "sub")], block_size=8)
    text = module.tokenizer.decode(module._files["train"].tokens_N)
    assert text == "\n\n".join(f"text of {n} " * 10 for n in ("a.txt", "b.txt", "sub/c.txt"))
    assert module._files["train"].text_bytes == len(text)


@settings(max_examples=30, deadline=None)
@given(
    texts=st.lists(st.text("aé日🙂", min_size=1, max_size=8), min_size=1, max_size=4),
    fraction=st.floats(0.01, 0.99),
)
def test_a_split_never_cuts_a_character(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], fraction: float
) -> None:
    folder = tmp_path_factory.mktemp("split")
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    parts = split_spans(find_files(str(folder), "data.files"), fraction)
    read = ["".join(t for _, t in text_of_spans("x", part).chunks()) for part in parts]
    whole = "".join(texts)
    assert "".join(read) == whole
    assert abs(len(read[1].encode()) - fraction * len(whole.encode())) <= 4


def test_large_files_are_read_in_pieces(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(corpus, "_CHUNK", 5)
    (tmp_path / "a.txt").write_text("日本語日本語\n🙂🙂🙂 abc\n" * 5, encoding="utf-8")
    spans = find_files(str(tmp_path), "data.files")
    pieces = list(text_of_spans("x", spans).chunks())
    assert "".join(t for _, t in pieces) == (tmp_path / "a.txt").read_text(encoding="utf-8")
    assert [first for first, _ in pieces] == [True] + [False] * (len(pieces) - 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"caf\xe9 " * 100, r"not UTF-8 text \(near byte 3\)"),
        (b"\x7fELF\x00\x00" * 100, "binary file"),
        (b"fine until the end" * 50 + b"\xf0\x9f", "not UTF-8"),
    ],
)
@pytest.mark.parametrize("key", ["files", "val_files", "test_files"])
def test_a_bad_file(tmp_path: Path, book: Path, content: bytes, message: str, key: str) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        make(tmp_path, **({"files": str(book)} | {key: str(bad)}))
    assert str(bad) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_path_and_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.files: .*nowhere does not exist"):
        make(tmp_path, files=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \.txt file"):
        make(tmp_path, files=[str(tmp_path / "empty")])
    with pytest.raises(DataError, match="list is empty"):
        make(tmp_path, files=[])


ROWS = [f"document {i}, which is about äöü\nand {i * i}" for i in range(40)]


def write_table(path: Path, column: str = "text", rows: list = ROWS) -> Path:
    """A table of each kind, with a second column and an empty row."""
    rows, kind = [*rows, ""], path.suffixes[0]
    cells = [{column: row, "number": i} for i, row in enumerate(rows)]
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist(cells), path, row_group_size=7)
        return path
    if kind == ".jsonl":
        content = "".join(json.dumps(cell) + "\n\n" for cell in cells)
    else:
        table = io.StringIO()
        writer = csv.DictWriter(
            table, [column, "number"], delimiter="\t" if kind == ".tsv" else ","
        )
        writer.writeheader()
        writer.writerows(cells)
        content = "\ufeff" + table.getvalue()
    whole = content.encode()
    path.write_bytes(gzip.compress(whole) if path.suffix == ".gz" else whole)
    return path


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.jsonl.gz", "a.CSV.gz"]
)
@pytest.mark.parametrize("column", ["text", "body"])
def test_the_rows_of_a_table_are_documents(tmp_path: Path, name: str, column: str) -> None:
    path = write_table(tmp_path / name.lower(), column)
    path = path.rename(tmp_path / name)
    module = make(tmp_path, files=str(path), column=column, val_fraction=0.25, block_size=4)
    parts = [module.tokenizer.decode(module._files[s].tokens_N) for s in ("train", "val")]
    assert "\n\n".join(parts) == "\n\n".join(ROWS)
    assert 8 <= parts[1].count("document") <= 12
    text = text_of_spans("x", find_files(str(path), "data.files", column))
    assert [row for _, row in text.chunks()] == ROWS


def test_end_of_text_between_rows(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = write_table(tmp_path / "a.jsonl")
    module = make(tmp_path, files=str(path), tokenizer="bpe", vocab_size=270, block_size=4)
    ends = [(f.tokens_N == module.tokenizer.end_of_text).sum() for f in module._files.values()]
    assert sum(ends) == len(ROWS) - 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "row 2 has no column 'text'.*data.column"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "row 2 cannot be read"),
        ("a.jsonl", b'{"text": "a"}\n["text"]\n', "row 2 cannot be read"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', "row 2 has no text in column 'text'"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "row 1 cannot be read"),
        ("a.csv", b"body,n\na,1\n", "row 1 has no column 'text'"),
        ("a.csv", b"n,text\n1,a\n2\n", "row 2 has no text"),
        ("a.csv", b'text,n\n"a,1\n', "row 1 cannot be read"),
        ("a.csv", b"text,n\n", "is empty"),
        ("a.csv", b"", "is empty"),
        ("a.parquet", b"text", "row 1 cannot be read"),
        ("a.txt.gz", b"no gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}' * 99)[:-9], "cannot be read"),
    ],
)
def test_a_bad_table(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        make(tmp_path, files=str(tmp_path / name))
    assert str(tmp_path / name) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pattern_compressed_text_and_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_bytes(b"\xef\xbb\xbf" + WORDS.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + WORDS.encode()))
    plain = tmp_path / "plain.txt"
    plain.write_text(WORDS, encoding="utf-8")
    expected = make(tmp_path, files=str(plain))._files
    for name in ("**/*.md", "a.txt.*"):
        got = make(tmp_path, files=str(tmp_path / name))._files
        for split, file in expected.items():
            assert got[split].tokens_N.tolist() == file.tokens_N.tolist()
    with pytest.raises(DataError, match=r"data\.files: .*\.rst does not exist"):
        make(tmp_path, files=str(tmp_path / "*.rst"))


def test_training_text_as_validation_text_is_said(tmp_path: Path, book: Path, caplog) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_bytes(book.read_bytes())
    other = tmp_path / "other.txt"
    other.write_text(WORDS[::-1])
    with caplog.at_level("INFO"):
        make(tmp_path, files=str(book), val_files=str(other), test_files=str(other))
        make(tmp_path, files=str(book))
        assert "training text too" not in caplog.text
        make(tmp_path, files=[str(book), str(other)], val_files=str(other))
        assert "data.val_files: " in caplog.messages[-1]
        make(tmp_path, files=str(book), val_files=str(other), test_files=str(copy))
        assert "data.test_files: " in caplog.messages[-1]
    assert caplog.text.count("training text too") == 2


@pytest.mark.parametrize("size", [1, 12, 100])
def test_too_short_a_validation_text(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.txt").write_text("x" * size + "y" * 100)
    with pytest.raises(DataError, match=r"data\.block_size.*data\.val_fraction") as error:
        make(tmp_path, files=str(tmp_path / "a.txt"), val_fraction=0.004)
    assert "the validation text" in str(error.value)
    (tmp_path / "b.txt").write_text("short")
    with pytest.raises(DataError, match=r"b\.txt, has 5 tokens and a block needs 17"):
        make(tmp_path, files=str(tmp_path / "a.txt"), val_files=str(tmp_path / "b.txt"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": "a", "dataset": "wikitext2"}, "exclude each other"),
        ({"val_fraction": 1.0}, "--data.val_fraction is 1.0; it must lie between 0 and 1"),
        ({"block_size": 0}, "--data.block_size is 0; it must be 1 or more"),
        ({"batch_size": 0}, "--data.batch_size is 0; it must be 1 or more"),
        ({"eval_batch_size": -1}, "--data.eval_batch_size is -1; it must be 1 or more"),
        ({"seed": -1}, "--data.seed is -1; it must be 0 or more"),
    ],
)
def test_options_that_cannot_work(options: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TextData(**options)


# Downloads and streams


def serve(monkeypatch, files: dict[str, bytes], name: str) -> list[str]:
    """Answers downloads from memory, and expects exactly these files, in the order of splits."""
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(files[url.rsplit("/", 1)[1]])

    expected = {
        split: (f"https://host/{file}", hashlib.sha1(b"blob %d\0" % len(c) + c).hexdigest())
        for split, (file, c) in zip(("train", "val", "test"), files.items(), strict=False)
    }
    monkeypatch.setitem(corpus.DOWNLOADS, name, expected)
    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    return asked


def test_a_download_happens_once(tmp_path: Path, monkeypatch) -> None:
    asked = serve(monkeypatch, {"input.txt": WORDS.encode()}, "tinyshakespeare")
    for _ in range(2):
        module = make(tmp_path, dataset="tinyshakespeare")
    assert len(asked) == 1
    assert WORDS.startswith(module.tokenizer.decode(module._files["train"].tokens_N))


def test_wikitext_has_three_files(tmp_path: Path, monkeypatch) -> None:
    parts = {f"{n}.txt": f"{n} text ".encode() * 40 for n in ("train", "valid", "test")}
    serve(monkeypatch, parts, "wikitext2")
    module = make(tmp_path, dataset="wikitext2")
    starts = {
        split: decode(module, next(iter(loader))[0])[:5]
        for split, loader in (("val", module.val_dataloader()), ("test", module.test_dataloader()))
    }
    assert starts == {"val": "valid", "test": "test "}


def test_a_wrong_or_failing_download(tmp_path: Path, monkeypatch) -> None:
    serve(monkeypatch, {"input.txt": b"something else"}, "tinyshakespeare")
    url, _ = corpus.DOWNLOADS["tinyshakespeare"]["train"]
    monkeypatch.setitem(corpus.DOWNLOADS, "tinyshakespeare", {"train": (url, "0" * 40)})
    with pytest.raises(DataError, match="did not give the expected file"):
        make(tmp_path, dataset="tinyshakespeare")

    def offline(url: str, timeout: float) -> None:
        raise OSError("no network")

    monkeypatch.setattr("urllib.request.urlopen", offline)
    with pytest.raises(DataError, match=r"no network.*by hand to .*input\.txt"):
        make(tmp_path, dataset="tinyshakespeare")


def fake_datasets(monkeypatch, rows: list[dict[str, str]]) -> None:
    module = ModuleType("datasets")
    module.load_dataset = lambda *_, **__: iter(rows)
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hugging_face_stream(tmp_path: Path, monkeypatch) -> None:
    documents = [f"document {i} is about {i * 7}. " * 3 for i in range(60)]
    fake_datasets(monkeypatch, [{"text": d} for d in documents])
    module = HuggingFaceText(
        max_tokens=500,
        val_documents=5,
        tokenizer="bytes",
        block_size=16,
        batch_size=4,
        cache_dir=str(tmp_path),
    )
    module.prepare_data()
    module.setup()
    assert module.tokenizer.decode(module._files["val"].tokens_N) == "\n\n".join(documents[:5])
    train = module._files["train"]
    assert len(train) == train.text_bytes == 500
    assert "\n\n".join(documents[5:]).startswith(module.tokenizer.decode(train.tokens_N))
    # Once built, the stream is not needed any more.
    monkeypatch.delitem(sys.modules, "datasets")
    again = HuggingFaceText(
        max_tokens=500,
        val_documents=5,
        tokenizer="bytes",
        block_size=16,
        batch_size=4,
        cache_dir=str(tmp_path),
    )
    again.setup()
    assert next(iter(again.train_dataloader())).shape == (4, 17)


def test_end_of_text_between_documents(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("tokenizers")
    fake_datasets(monkeypatch, [{"text": f"document {i} of many"} for i in range(40)])
    module = HuggingFaceText(
        vocab_size=270, val_documents=10, block_size=8, batch_size=2, cache_dir=str(tmp_path)
    )
    module.setup()
    ends = (module._files["val"].tokens_N == module.tokenizer.end_of_text).sum()
    assert ends == 9
    assert module._files["val"].text_bytes == sum(len(f"document {i} of many") for i in range(10))


def test_streams_that_cannot_be_read(tmp_path: Path, monkeypatch) -> None:
    options = {"tokenizer": "bytes", "block_size": 8, "cache_dir": str(tmp_path)}
    fake_datasets(monkeypatch, [{"text": "few"}])
    with pytest.raises(DataError, match="HuggingFaceFW/fineweb-edu has no text"):
        HuggingFaceText(val_documents=1, **options).setup()
    fake_datasets(monkeypatch, [{"content": "x"}])
    with pytest.raises(DataError, match=r"no field 'text'; set data\.text_field"):
        HuggingFaceText(val_documents=0, **options).setup()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install -e \.\[language\]"):
        HuggingFaceText(**options).setup()
