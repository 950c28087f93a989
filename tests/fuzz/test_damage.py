"""Damaged files: the right content or one clear error, never another content."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from PIL import Image

import app
from app.commands.export import export
from app.commands.report.runs import read_run
from app.errors import ConfigError
from app.files import write_csv
from app.models import VisionTransformer
from app.models.exported import CONFIG, WEIGHTS
from app.runs.checkpoints import read_checkpoint
from app.runs.progress import evaluated, read_rows
from data.errors import DataError
from data.images.reading import decode_images, read_parquet
from data.text.module import TextData
from data.text.token_file import TokenFile, open_or_build

from .damage import Damage, damages


def few(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def one_line(error: Exception, path: Path) -> None:
    """An error of ours: one line that names the file."""
    assert isinstance(error, ConfigError | DataError)
    assert "\n" not in str(error) and path.name in str(error)


def png(value: int, kind: str = "PNG") -> bytes:
    generator = np.random.default_rng(value)
    pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@few(150)
@given(damage=damages)
def test_png(damage: Damage) -> None:
    whole = png(1)
    expected = decode_images([whole], ["a.png"], None)
    damaged = damage(whole)
    try:
        got = decode_images([damaged], ["a.png"], None)
    except DataError as error:
        one_line(error, Path("a.png"))
    else:
        assert torch.equal(got, expected)


def flips(content: bytes) -> Iterator[bytes]:
    """A content with one bit wrong, at every byte; which bit changes by place."""
    for at in range(len(content)):
        bit = (5 * at + at // 8) % 8  # another one at the same byte of neighbouring numbers
        yield content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def test_every_byte_of_a_png() -> None:
    """A smooth image: few bytes, each of which says much."""
    pixels = np.add.outer(np.arange(32), np.arange(32)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert("RGB").save(buffer, "PNG")
    expected = decode_images([buffer.getvalue()], ["a.png"], None)
    for turn in range(8):
        for damaged in flips(bytes(turn) + buffer.getvalue()):
            try:
                got = decode_images([damaged[turn:]], ["a.png"], None)
            except DataError:
                continue
            assert torch.equal(got, expected)


def test_every_byte_of_labels(tmp_path: Path) -> None:
    path = tmp_path / "train-0.parquet"
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, "PNG")
    images = [{"bytes": buffer.getvalue(), "path": None}] * 16
    table = pa.table({"img": images, "label": list(range(4)) * 4})
    options = {"write_page_checksum": True, "use_dictionary": ["img.bytes"], "compression": "none"}
    pq.write_table(table, path, **options)
    expected = read_parquet([path], 10, None)
    for damaged in flips(path.read_bytes()):
        path.write_bytes(damaged)
        try:
            got = read_parquet([path], 10, None)
        except DataError:
            continue
        assert torch.equal(got.labels, expected.labels)


def write_parquet(path: Path, checksums: bool) -> None:
    images = [{"bytes": png(row), "path": f"{row}.png"} for row in range(6)]
    table = pa.table({"img": images, "label": [0, 1, 2, 3, 4, 5]})
    pq.write_table(table, path, write_page_checksum=checksums, compression="snappy")


@pytest.mark.parametrize("checksums", [True, False])
@few(150)
@given(damage=damages)
def test_parquet(checksums: bool, damage: Damage, tmp_path: Path) -> None:
    """With page checksums: nothing else than the content. Without, labels may change, but images
    do not, and a file that can be read has labels in the range."""
    path = tmp_path / "train-0.parquet"
    write_parquet(path, checksums)
    expected = read_parquet([path], 10, None)
    path.write_bytes(damage(path.read_bytes()))
    try:
        got = read_parquet([path], 10, None)
    except DataError as error:
        one_line(error, path)
        return
    if checksums:
        assert torch.equal(got.labels, expected.labels)
        assert torch.equal(got.images, expected.images)
    assert got.images.dtype == torch.uint8 and got.images.ndim == 4
    assert ((got.labels >= 0) & (got.labels < 10)).all()


@pytest.mark.parametrize("suffix", [".bin", ".json"])
@few(120)
@given(damage=damages)
def test_token_file(suffix: str, damage: Damage, tmp_path: Path) -> None:
    """Damage is noticed, and the file built again."""
    path = tmp_path / "tokens.bin"
    ids = np.arange(500, dtype=np.uint16) * 7

    def tokens():
        dtype = np.dtype(np.uint16)
        return open_or_build(path, "text", "bytes", dtype, iter([(ids, 612)]), name="a text")

    tokens()
    file = path.with_suffix(suffix)
    file.write_bytes(damage(file.read_bytes()))
    got = tokens()
    assert np.array_equal(got.tokens_N, ids) and got.text_bytes == 612


def test_every_byte_of_a_token_header(tmp_path: Path) -> None:
    ids = np.arange(500, dtype=np.uint16)
    path, dtype = tmp_path / "tokens.bin", np.dtype(np.uint16)
    header = path.with_suffix(".json")

    def opened() -> TokenFile:
        return open_or_build(path, "text", "bytes", dtype, iter([(ids, 612)]), name="a text")

    opened()
    identity, numbers = header.read_bytes().split(b'"count"')  # another identity is noticed anyhow
    for turn in range(8):
        for damaged in flips(bytes(turn) + numbers):
            header.write_bytes(identity + b'"count"' + damaged[turn:])
            got = opened()
            assert np.array_equal(got.tokens_N, ids) and got.text_bytes == 612


@few(25)
@given(damage=damages)
def test_trained_tokenizer(damage: Damage, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    book = tmp_path / "book.txt"
    book.write_text("the cat sat on the mat, and the bat. " * 30)

    def fingerprint() -> str:
        options = {"tokenizer": "bpe", "vocab_size": 270, "block_size": 8}
        data = TextData(files=str(book), cache_dir=str(tmp_path / "cache"), **options)
        data.prepare_data()
        return data.tokenizer.fingerprint

    expected = fingerprint()
    for path in (tmp_path / "cache").glob("bpe-*.json"):
        path.write_bytes(damage(path.read_bytes()))
    assert fingerprint() == expected


@few(150)
@given(damage=damages)
def test_metrics_table(damage: Damage, tmp_path: Path) -> None:
    """A CSV file has no checksums: what is read has the form of a row, whatever its digits, and
    what has not is said."""
    path = tmp_path / "metrics.csv"
    rows = [{"epoch": epoch, "step": 22 * epoch, "val/accuracy": 0.5} for epoch in range(5)]
    write_csv(path, rows, list(rows[0]))
    path.write_bytes(damage(path.read_bytes()))
    sound, problem = read_rows(path)
    assert "\n" not in problem
    assert all(len(row) == len(sound[0]) for row in sound)
    epochs, steps = evaluated(sound)
    assert isinstance(epochs, int) and isinstance(steps, int)


SCORES = {step: {"val/accuracy": step / 64, "val/loss": 64 / step} for step in (8, 16, 24, 32)}


def write_run(folder: Path) -> None:
    rows = [{"epoch": step // 8 - 1, "step": step} | scores for step, scores in SCORES.items()]
    write_csv(folder / "metrics.csv", rows, list(rows[0]))
    (folder / "config.yaml").write_text("name: mine\ntrainer: {max_epochs: 4}\n")


@few(80)
@given(damage=damages)
def test_run_with_a_damaged_table(damage: Damage, tmp_path: Path) -> None:
    """A table without checksums: whatever is left of it has the form of rows."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    write_run(folder)
    path = folder / "metrics.csv"
    path.write_bytes(damage(path.read_bytes()))
    run, problems = read_run(folder)
    assert all(isinstance(row.step, int) for row in run.rows)
    assert all("\n" not in problem for problem in problems)


def network() -> tuple[VisionTransformer, str]:
    sizes = {"image_size": 8, "patch_size": 4, "channels": 1, "dim": 8, "depth": 1, "heads": 1}
    torch.manual_seed(0)
    return VisionTransformer(moe_blocks=[0], **sizes), (
        "model: {init_args: {network: {class_path: app.models.VisionTransformer, init_args: "
        f"{{moe_blocks: [0], {', '.join(f'{k}: {v}' for k, v in sizes.items())}}}}}}}}}"
    )


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A checkpoint and its export."""
    folder = tmp_path_factory.mktemp("sound")
    model, config = network()
    state = {f"network.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, "config": config, "epoch": 3}, folder / "last.ckpt")
    export(folder / "last.ckpt", folder / "out")
    return folder


@few(150)
@given(damage=damages)
def test_checkpoint(damage: Damage, sound: Path, tmp_path: Path) -> None:
    expected = read_checkpoint(sound / "last.ckpt")
    path = tmp_path / "last.ckpt"
    path.write_bytes(damage((sound / "last.ckpt").read_bytes()))
    try:
        got = read_checkpoint(path)
    except ConfigError as error:
        one_line(error, path)
        return
    assert got.keys() == expected.keys()
    assert (got["config"], got["epoch"]) == (expected["config"], expected["epoch"])
    assert got["state_dict"].keys() == expected["state_dict"].keys()
    for name, value in expected["state_dict"].items():
        assert torch.equal(got["state_dict"][name], value), name


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@few(60)
@given(damage=damages)
def test_export(name: str, damage: Damage, sound: Path, tmp_path: Path) -> None:
    for each in (CONFIG, WEIGHTS):
        content = (sound / "out" / each).read_bytes()
        (tmp_path / each).write_bytes(damage(content) if each == name else content)
    try:
        got = app.load_model(tmp_path)
    except ConfigError as error:
        one_line(error, tmp_path / name)
        return
    expected = app.load_model(sound / "out")
    x = torch.ones(1, 1, 8, 8)
    assert torch.equal(got(x), expected(x))
