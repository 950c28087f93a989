"""What users can get wrong, and the line that each mistake costs: the table of docs/errors.md.

`python -m tests.cli.test_bad_inputs` writes the table anew; a test compares it with these cases.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from app.cli.main import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "errors.md"
VISION, LANGUAGE = "configs/quickstart.yaml", "configs/quickstart_lm.yaml"
QUICK = (
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.max_steps=1",
    "--trainer.limit_val_batches=1",
)
Make = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """A mistake.

    Attributes:
        group: section of the table.
        does: what the user does, in the table's words.
        sees: the line, after "error: "; FOLDER stands for the user's folder, … for anything.
        argv: the command line; FOLDER as above, CHECKPOINT and TEXT_CHECKPOINT for those of a
            short run of each quickstart.
        make: makes the user's files in FOLDER.
        environment: variables to set.
        refuses: error number with which the system refuses every new folder below FOLDER/runs.
        needs: why the case can't be tried on a machine, or None: called with nothing.
    """

    group: str
    does: str
    sees: str
    argv: tuple[str, ...]
    make: Make = lambda folder: None
    environment: dict[str, str] | None = None
    refuses: int | None = None
    needs: Callable[[], str | None] = lambda: None


def fit(config: str, *more: str) -> tuple[str, ...]:
    return ("fit", "--config", config, "--runs=FOLDER/runs", *QUICK, *more)


vision, language = partial(fit, VISION), partial(fit, LANGUAGE, "--data.cache_dir=FOLDER/cache")


def option(text: str, sees: str, *more: str, group: str = "Settings", run=vision, **rest) -> Case:
    """A mistake in one option of `fit`, which is its own description."""
    return Case(group, f"`{text}`", sees, run(*_words(text), *more), **rest)


def _words(text: str) -> list[str]:
    return [word.replace("~", " ") for word in text.split()]


def file(name: str, content: str | bytes) -> Make:
    """Writes a file."""

    def make(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def config(name: str, text: str | bytes, does: str, sees: str) -> Case:
    """A config file that can't be used."""
    argv = (*fit(VISION), "--config", f"FOLDER/{name}")
    return Case("Config files", does, sees, argv, file(name, text))


# ---- files of data


def png(size: int = 32, value: int = 0) -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (size, size), (value, 100, 50)).save(buffer, "PNG")
    return buffer.getvalue()


def class_folders(folder: Path, bad: bytes | None = None) -> None:
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            file(f"images/{split}/{name}/0.png", png())(folder)
            file(f"images/{split}/{name}/1.png", png())(folder)
    if bad is not None:
        file("images/train/dog/1.png", bad)(folder)


def parquet(folder: Path, labels=(0, 1), column: str = "img", cut: int = 0, image=None) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "images").mkdir()
    images = [{"bytes": png() if image is None else image, "path": None} for _ in labels]
    for split in ("train", "test"):
        path = folder / "images" / f"{split}-0.parquet"
        table = pa.table({column: pa.array(images, IMAGE()), "label": pa.array(labels, pa.int64())})
        pq.write_table(table, path)
        if cut:
            path.write_bytes(path.read_bytes()[:-cut])


def twice(folder: Path) -> None:
    parquet(folder)
    path = folder / "images" / "train-0.parquet"
    path.with_name("train-1.parquet").write_bytes(path.read_bytes())


def IMAGE():
    import pyarrow as pa

    return pa.struct({"bytes": pa.binary(), "path": pa.string()})


def images(does: str, sees: str, make: Make, *more: str, data: str = "CIFAR10Data") -> Case:
    root = (f"--data=data.{data}", "--data.root=FOLDER/images", "--data.batch_size=1")
    argv = fit("configs/vision/cifar10_micro_topk2.yaml", *root, *more)
    return Case("Images", does, sees, argv, make)


def text(does: str, sees: str, content: str | bytes | None, *more: str) -> Case:
    make = file("book.txt", content) if content is not None else lambda folder: None
    return Case("Text", does, sees, language("--data.files=FOLDER/book.txt", *more), make)


PROSE = "the cat sat on the mat. " * 60


# ---- checkpoints


def saved(content: object) -> Make:
    return lambda folder: torch.save(content, folder / "my.ckpt")


class Foreign:
    """A class that a pickle may name."""


def truncated(folder: Path) -> None:
    torch.save({"state_dict": {"x": torch.zeros(999)}, "config": "a: 1"}, folder / "my.ckpt")
    (folder / "my.ckpt").write_bytes((folder / "my.ckpt").read_bytes()[:-500])


def flipped(folder: Path) -> None:
    torch.save({"state_dict": {"x": torch.zeros(9999)}, "config": "a: 1"}, folder / "my.ckpt")
    content = bytearray((folder / "my.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "my.ckpt").write_bytes(content)


def checkpoint(does: str, sees: str, make: Make, *argv: str) -> Case:
    argv = argv or vision("--ckpt_path=FOLDER/my.ckpt")
    return Case("Checkpoints", does, sees, argv, make)


def nothing(folder: Path) -> None:
    """No file to make."""


DAMAGED = "ckpt_path: FOLDER/my.ckpt is damaged or is no checkpoint"
OURS = "ckpt_path: FOLDER/my.ckpt is no checkpoint that `python -m app fit` wrote: it holds no "
GENERATE = ("generate", "--device=cpu", "--ckpt_path")
SUBCOMMANDS = "fit, validate, test, predict, …"
CLASS = "give a name such as TopK or a full path"


def no_gpu() -> str | None:
    return "there is a GPU here" if torch.cuda.is_available() else None


def not_root() -> str | None:
    return "root may write anywhere" if os.geteuid() == 0 else None


def no_full_device() -> str | None:
    return None if Path("/dev/full").exists() else "there is no /dev/full here"


CASES = [
    # ---- the command line
    Case(
        "Command line",
        "`python -m app ftt`",
        f"there is no subcommand ftt; did you mean fit? There are {SUBCOMMANDS}",
        ("ftt",),
    ),
    Case(
        "Command line",
        "`python -m app`",
        f"a subcommand is missing; there are {SUBCOMMANDS}",
        (),
    ),
    Case(
        "Command line",
        "`python -m app fit`",
        "no data and no model given; name a config file with --config",
        ("fit",),
    ),
    Case(
        "Command line", "`fit --config`, and no file", "--config needs a file", ("fit", "--config")
    ),
    Case(
        "Command line",
        "`fit --confg FILE`",
        "unknown option --confg; did you mean --config or --print_config?",
        ("fit", "--confg", "x"),
    ),
    option(
        "--trainer.max_epoch=3",
        "unknown option --trainer.max_epoch; did you mean --trainer.max_epochs or …?",
        group="Command line",
    ),
    option(
        "--model.network.dpth=3",
        "unknown key model.network.dpth (did you mean depth?); VisionTransformer accepts: …",
        group="Command line",
    ),
    Case("Command line", "`generate` without a checkpoint", "missing: --ckpt_path", ("generate",)),
    Case(
        "Command line",
        "`generate --promt TEXT`",
        "unknown argument --promt; did you mean --prompt?",
        (*GENERATE, "x", "--promt", "y"),
    ),
    Case(
        "Command line",
        "`generate --max_tokens 0`",
        "--max_tokens: must be at least 1, got 0",
        (*GENERATE, "x", "--max_tokens", "0"),
    ),
    Case(
        "Command line",
        "`generate --top_k many`",
        "--top_k: invalid int value: 'many'",
        (*GENERATE, "x", "--top_k", "many"),
    ),
    Case("Command line", "`export` without arguments", "missing: --ckpt_path, --out", ("export",)),
    Case(
        "Command line",
        "`export --ckpt_path last`",
        "ckpt_path: last: of which run? Name it with --name",
        ("export", "--ckpt_path=last", "--out=FOLDER/out"),
    ),
    Case(
        "Command line",
        "`export` into a folder that holds something",
        "out: FOLDER is not empty; choose another folder or add --overwrite",
        ("export", "--ckpt_path=CHECKPOINT", "--out=FOLDER"),
        file("thesis.tex", "years of work"),
    ),
    # ---- config files
    Case(
        "Config files",
        "a config file that does not exist",
        "--config: there is no file FOLDER/none.yaml",
        ("fit", "--config=FOLDER/none.yaml"),
    ),
    Case(
        "Config files",
        "a folder in place of a config file",
        "--config: cannot read FOLDER: [Errno 21] Is a directory: 'FOLDER'",
        ("fit", "--config", "FOLDER"),
    ),
    config(
        "my.yaml",
        "",
        "an empty config",
        "FOLDER/my.yaml: this config is empty; start from one in configs/",
    ),
    config(
        "my.yaml", "model: [\n", "a YAML syntax error", "FOLDER/my.yaml line 2: not valid YAML: …"
    ),
    config(
        "my.yaml",
        "model:\n\tlr: 1\n",
        "a tab in YAML",
        "FOLDER/my.yaml line 2: not valid YAML: found character '\\t' that …",
    ),
    config(
        "my.yaml",
        b"name: caf\xe9\n",
        "a config that is not UTF-8",
        "--config: cannot read FOLDER/my.yaml: 'utf-8' codec can't decode byte 0xe9 …",
    ),
    config(
        "my.yaml",
        "- a\n",
        "a list in place of a mapping",
        "FOLDER/my.yaml: a config is a mapping of keys, this is a list",
    ),
    config(
        "my.yaml",
        "trainr: {max_epochs: 1}\n",
        "`trainr:` in a config",
        "unknown key trainr; did you mean trainer?",
    ),
    config(
        "my.yaml",
        "trainer: {max_epochs: '${nowhere}'}\n",
        "a reference to a key that is not there",
        "trainer.max_epochs: Interpolation key 'nowhere' not found",
    ),
    config(
        "my.yaml",
        "base: [none.yaml]\n",
        "a base file that does not exist",
        "FOLDER/my.yaml: its base file none.yaml does not exist",
    ),
    config(
        "my.yaml",
        "base: [my.yaml]\n",
        "a config that builds on itself",
        "FOLDER/my.yaml: builds on itself through `base`",
    ),
    # ---- settings
    option("--trainer.max_epochs=ten", "trainer.max_epochs: expected int or null, got ten"),
    option("--model.network.depth=deep", "model.network.depth: expected int, got deep"),
    option("--model.losses=3", "model.losses: expected dict[str, float] or null, got 3"),
    option("--model.network=MyNet", f"model.network: there is no class MyNet; {CLASS}"),
    option(
        "--model.network=ResNet",
        "model.network: there are several classes ResNet; give one of torchvision.models.ResNet, …",
    ),
    option(
        "--model.network.moe.router=TopKK",
        f"model.network.moe.router: there is no class TopKK; {CLASS}",
    ),
    option(
        "--model.network.moe.router.gates=soft",
        "model.network.moe.router.gates: expected one of 'equal', 'score', got soft",
    ),
    option(
        "--model.network.moe.num_experts=20",
        "num_experts must lie between 1 and max_experts (16), got 20",
    ),
    option("--model.network.moe_blocks=[7]", "moe_blocks: there is no block 7 among 3 (from 0)"),
    option("--model.network.heads=5", "dim 64 is not a multiple of heads 5"),
    option(
        "--model.network.image_size=16",
        "model.network.image_size is 16 but that of the data is 8; set both to one value",
    ),
    option(
        "--data.channels=3",
        "model.network.channels is 1 but that of the data is 3; set both to one value",
    ),
    option(
        "--model.network.num_classes=5",
        "model.network.num_classes is 5 but the data has 10 classes; set num_classes: 10",
    ),
    option(
        "--model.network.moe.default_vectors=ema",
        "default_vectors: ema can't be combined with the router TopAny: thresholds are …",
    ),
    option(
        "--model.losses={reward:~0.1}",
        "losses: loss reward is defined for ternary routing only; blocks.1 has a TopAny router",
    ),
    option("--model.optimizer.lr=-1", "model.optimizer: Invalid learning rate: -1.0"),
    option("--model.mixup=-1", "model.mixup is -1.0; it must be 0 or more"),
    option("--model.label_smoothing=2", "model.label_smoothing is 2.0; it must be between 0 and 1"),
    option(
        "--trainer.callbacks+=callbacks.DefaultVectors",
        "DefaultVectors: no MoE block has default_vectors: ema; set it, or remove the callback",
    ),
    option(
        "--trainer.callbacks+=callbacks.AdaptiveExperts",
        "trainer.callbacks: AdaptiveExperts is listed twice; remove one of them",
    ),
    option(
        "--trainer.accumulate_grad_batches=0",
        "trainer.accumulate_grad_batches is 0; it must be 1 or more",
    ),
    option(
        "--trainer.gradient_clip_val=-1",
        "trainer.gradient_clip_val is -1; it must be 0 or more, or null",
    ),
    option(
        "--trainer.val_check_interval=5000",
        "trainer.val_check_interval is 5000 and an epoch has 22 batches; set it to 22 or less, "
        "or trainer.check_val_every_n_epoch to null",
    ),
    option(
        "--trainer.max_steps=-1 --trainer.max_epochs=-1",
        "model.schedule needs an end: set trainer.max_epochs or trainer.max_steps",
    ),
    option("--trainer.strategy=dpp", "You selected an invalid strategy name: `strategy='dpp'`. …"),
    option("--trainer.devices=0", "trainer.devices must be a number from 1, or auto"),
    option("--seed_everything=-4", "seed_everything is -4; it must lie between 0 and 4294967295"),
    option("--name=../other", "name: '../other' is no name for a folder in FOLDER/runs"),
    option("--data.batch_size=0", "--data.batch_size is 0; it must be 1 or more"),
    option(
        "--data.batch_size=5000",
        "batch_size=5000 is larger than the dataset of 1438 samples: set it to 1438 or less",
    ),
    option(
        "--data.val_fraction=0.0001",
        "--data.val_fraction 0.0001 of 1438 training images leaves 1438 to train on and 0 to "
        "validate on; choose another fraction",
    ),
    # ---- images
    images(
        "a folder of images that does not exist",
        "FOLDER/images/train: no such folder; it must hold a folder of images for each class",
        nothing,
        data="ImageFolderData",
    ),
    images(
        "no CIFAR-10 in the folder, and downloading turned off",
        "FOLDER/images/cifar-10-python.tar.gz: this file is not there, nor is the dataset in "
        "another layout; point --data.root to the dataset, or to an empty folder with "
        "--data.download true",
        nothing,
        "--data.download=false",
    ),
    images(
        "a class folder without images",
        "FOLDER/images/train/cat: no images here; expected files such as .png or .jpg",
        lambda folder: (folder / "images" / "train" / "cat").mkdir(parents=True),
        data="ImageFolderData",
    ),
    images(
        "a truncated PNG",
        "FOLDER/images/train/dog/1.png: this image cannot be decoded (…); replace or remove it",
        partial(class_folders, bad=png()[:60]),
        "--data.image_size=32",
        data="ImageFolderData",
    ),
    images(
        "a PNG with a flipped bit",
        "FOLDER/images/train/dog/1.png: this image cannot be decoded (…); replace or remove it",
        partial(class_folders, bad=png()[:50] + bytes([png()[50] ^ 4]) + png()[51:]),
        "--data.image_size=32",
        data="ImageFolderData",
    ),
    images(
        "a text file named .png",
        "FOLDER/images/train/dog/1.png: this image cannot be decoded (…); replace or remove it",
        partial(class_folders, bad=b"hello"),
        "--data.image_size=32",
        data="ImageFolderData",
    ),
    images(
        "images of another size than the data set's",
        "…: image of shape (3, 16, 16), expected (3, 32, 32); set --data.image_size to resize "
        "all images on loading",
        partial(parquet, image=png(16)),
    ),
    images(
        "a truncated parquet file",
        "FOLDER/images/train-0.parquet: not readable as parquet (…); it may be truncated, "
        "download it again",
        partial(parquet, cut=100),
    ),
    images(
        "a label out of range",
        "FOLDER/images/train-0.parquet row 1: label 10 is outside 0 to 9; the data must have 10 "
        "classes, numbered from 0",
        partial(parquet, labels=(3, 10)),
    ),
    images(
        "other columns in a parquet file",
        "FOLDER/images/train-0.parquet: the columns are picture, label; expected either "
        "'img' or 'image', and 'label'",
        partial(parquet, column="picture"),
    ),
    images(
        "a copy of a parquet file beside it",
        "FOLDER/images/train-1.parquet: the images would count twice, as there is "
        "FOLDER/images/train-0.parquet too; remove one of them",
        twice,
    ),
    images(
        "a parquet file without rows",
        "FOLDER/images/train-0.parquet: this file has no rows; download it again",
        partial(parquet, labels=()),
    ),
    images(
        "a damaged zip of Tiny ImageNet",
        "FOLDER/images/tiny-imagenet-200.zip: this file is damaged, nor is the dataset in "
        "another layout; point --data.root to the dataset, or to an empty folder with "
        "--data.download true",
        file("images/tiny-imagenet-200.zip", b"PK\3\4 broken"),
        "--data.download=false",
        data="TinyImageNetData",
    ),
    # ---- text
    text(
        "a text file that does not exist",
        "data.files: FOLDER/book.txt does not exist; give a text file, a folder of .txt or a "
        "pattern such as docs/**/*.md",
        None,
    ),
    Case(
        "Text",
        "a table without the column of the text",
        "FOLDER/book.jsonl row 1 has no column 'text'; set data.column to the one that has the "
        "text",
        language("--data.files=FOLDER/book.jsonl"),
        file("book.jsonl", '{"body": "word"}\n'),
    ),
    text(
        "an empty text file",
        "data.files: the file FOLDER/book.txt is empty; remove it or give one with text",
        "",
    ),
    text(
        "a text that is not UTF-8",
        "FOLDER/book.txt is not UTF-8 text (near byte 0); convert it to UTF-8, or leave it out",
        b"\xff\xfe" * 400,
    ),
    text(
        "a binary file",
        "FOLDER/book.txt is a binary file, not text; leave it out",
        PROSE.encode() * 9 + b"\0",
    ),
    text(
        "a text shorter than a block",
        "the training text, FOLDER/book.txt, has 21 tokens and a block needs 129; lower "
        "data.block_size or give more training text",
        PROSE[:24],
    ),
    text(
        "blocks longer than the model reads",
        "model.network.max_length is 128 but data.block_size is 256; set max_length: 256",
        PROSE * 9,
        "--data.block_size=256",
    ),
    text(
        "a tokenizer with more tokens than the model",
        "model.network.vocab_size is 100 but the tokenizer has 256 tokens; set vocab_size: 256",
        PROSE * 9,
        "--model.network.vocab_size=100",
    ),
    text(
        "a tokenizer file that does not exist",
        "cannot read the tokenizer file FOLDER/tokenizer.json (…); give the path of a saved "
        'tokenizer.json, or one of "bytes" and "bpe"',
        PROSE * 9,
        "--data.tokenizer=FOLDER/tokenizer.json",
    ),
    # ---- checkpoints
    checkpoint(
        "a checkpoint that does not exist",
        "ckpt_path: there is no checkpoint FOLDER/my.ckpt",
        nothing,
    ),
    checkpoint(
        "a folder in place of a checkpoint",
        "ckpt_path: there is no checkpoint FOLDER/my.ckpt",
        lambda folder: (folder / "my.ckpt").mkdir(),
    ),
    checkpoint(
        "`--ckpt_path last` of a run that has none",
        "ckpt_path: last: there is no complete checkpoint below FOLDER/runs/quickstart; "
        "leave --ckpt_path out to start anew",
        nothing,
        *vision("--ckpt_path=last"),
    ),
    checkpoint("a truncated checkpoint", DAMAGED, truncated),
    checkpoint("a checkpoint with a flipped bit", DAMAGED, flipped),
    checkpoint("a file that is no checkpoint", DAMAGED, file("my.ckpt", "hello")),
    checkpoint(
        "a checkpoint that would run code (a pickled object)",
        DAMAGED,
        lambda folder: torch.save({"state_dict": Foreign()}, folder / "my.ckpt"),
    ),
    checkpoint("a checkpoint of another program", OURS + "weights", saved({"model": {}})),
    checkpoint("a file of weights alone", OURS + "config", saved({"state_dict": {}})),
    checkpoint(
        "a checkpoint of another model",
        "ckpt_path: CHECKPOINT is of another model: model.network.dim is 32 here, 64 there",
        nothing,
        *vision("--ckpt_path=CHECKPOINT", "--model.network.dim=32"),
    ),
    checkpoint(
        "`generate` from an image classifier",
        "ckpt_path: CHECKPOINT carries no tokenizer; give a checkpoint of a language model "
        "that `python -m app fit` wrote",
        nothing,
        *GENERATE,
        "CHECKPOINT",
    ),
    checkpoint(
        "`router_gradients` without default vectors",
        "router gradients are compared with default vectors and a router over a softmax "
        "(TopK, TopP); blocks.1 has default_vectors: none and the router TopAny",
        nothing,
        "router_gradients",
        "--ckpt_path=CHECKPOINT",
    ),
    checkpoint(
        "`export` of a truncated checkpoint",
        DAMAGED,
        truncated,
        "export",
        "--ckpt_path=FOLDER/my.ckpt",
        "--out=FOLDER/out",
    ),
    # ---- the machine
    option(
        "--trainer.accelerator=gpu",
        "trainer.accelerator: there is no such device here; set it to auto or cpu",
        group="Machine",
        needs=no_gpu,
    ),
    option(
        "--trainer.accelerator=cuda",
        "trainer.accelerator: there is no such device here; set it to auto or cpu",
        group="Machine",
        needs=no_gpu,
    ),
    option(
        "--data.device=cuda",
        "--data.device is cuda, and there is no GPU here; set it to auto",
        group="Machine",
        needs=no_gpu,
    ),
    Case(
        "Machine",
        "`generate --device cuda` without a GPU",
        "device: 'cuda' is not available here; try auto or cpu",
        ("generate", "--ckpt_path", "TEXT_CHECKPOINT", "--device=cuda"),
        needs=no_gpu,
    ),
    Case(
        "Machine",
        "`--runs` below a file",
        "cannot use FOLDER/file/…: Not a directory; check the path",
        vision("--runs=FOLDER/file"),
        file("file", ""),
    ),
    Case(
        "Machine",
        "`--runs` in a folder that may not be written",
        "FOLDER/locked/…: Permission denied; mend that, then go on with --ckpt_path last",
        vision("--runs=FOLDER/locked"),
        lambda folder: (folder / "locked").mkdir(mode=0o555),
        needs=not_root,
    ),
    *(
        Case(
            "Machine",
            f"`--runs` {does}",
            f"FOLDER/runs…: {os.strerror(number)}; mend that, then go on with --ckpt_path last",
            vision(),
            refuses=number,
        )
        for does, number in (
            ("on a read-only file system", errno.EROFS),
            ("on a disk that is gone", errno.EIO),
            ("beyond a quota", errno.EDQUOT),
        )
    ),
    Case(
        "Machine",
        "`--data.cache_dir` below a file",
        "cannot write the token file FOLDER/file/…; choose another data.cache_dir",
        language("--data.cache_dir=FOLDER/file"),
        file("file", ""),
    ),
    Case(
        "Machine",
        "`--json` on a full disk",
        "json: cannot write /dev/full ([Errno 28] No space left on device)",
        (*GENERATE, "TEXT_CHECKPOINT", "--max_tokens=2", "--json=/dev/full"),
        needs=no_full_device,
    ),
    Case(
        "Machine",
        "`export` below a file",
        "out: cannot write FOLDER/file/out (…); choose another folder",
        ("export", "--ckpt_path=CHECKPOINT", "--out=FOLDER/file/out"),
        file("file", ""),
    ),
    Case(
        "Machine",
        "DDP with a `MASTER_PORT` that another program uses",
        "MASTER_PORT: port … is in use by another program; set the environment variable to "
        "another port, or leave it out",
        vision("--trainer.strategy=ddp", "--trainer.devices=1"),
        environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "USED"},
    ),
]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, str]:
    """Checkpoints of one step of each quickstart."""
    folder, paths = tmp_path_factory.mktemp("trained"), {}
    for name, argv in (("CHECKPOINT", vision()), ("TEXT_CHECKPOINT", language())):
        more = ["--model.sample_tokens=0"] if name == "TEXT_CHECKPOINT" else []
        runs = folder / name.lower()
        assert main([part.replace("FOLDER", str(runs)) for part in (*argv, *more)]) == 0
        (path,) = runs.rglob("last.ckpt")
        paths[name] = str(path)
    return paths


def command(case: Case, folder: Path, checkpoints: dict[str, str]) -> list[str]:
    places = {"TEXT_CHECKPOINT": "", "CHECKPOINT": ""} | checkpoints | {"FOLDER": str(folder)}
    argv = []
    for part in case.argv:
        for name, path in sorted(places.items(), key=lambda item: -len(item[0])):
            part = part.replace(name, path)
        argv.append(part)
    return argv


def pattern(case: Case, folder: Path, checkpoints: dict[str, str]) -> str:
    sees = case.sees.replace("FOLDER", str(folder))
    for name in sorted(checkpoints, key=len, reverse=True):
        sees = sees.replace(name, checkpoints[name])
    return "error: " + re.escape(sees).replace("…", ".*")


def check(case: Case, status: int, error: str, folder: Path, checkpoints: dict[str, str]) -> None:
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert status == 2, error
    assert len(lines) == 1 and "Traceback" not in error, error
    assert error.rstrip("\n").endswith(lines[0])
    assert re.fullmatch(pattern(case, folder, checkpoints), lines[0]), lines[0]
    assert not (folder / "runs").exists(), "a run folder was left behind"
    assert not (folder / "out").exists()
    assert not list(folder.rglob("*.part")) and not list(folder.rglob("*.tmp"))


def refuse_folders(monkeypatch, folder: Path, number: int) -> None:
    """As a file system does that can't be written; root, who may run tests, is refused nothing."""
    mkdir = os.mkdir

    def refuse(path, *args, **kwargs):
        if str(path).startswith(str(folder)):
            raise OSError(number, os.strerror(number), str(path))
        return mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", refuse)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.does)
def test_a_mistake_costs_one_line(case, checkpoints, tmp_path, monkeypatch, capsys) -> None:
    reason = case.needs()
    if reason:
        pytest.skip(reason)
    monkeypatch.chdir(ROOT)
    case.make(tmp_path)
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        for name, value in (case.environment or {}).items():
            monkeypatch.setenv(name, value.replace("USED", str(used.getsockname()[1])))
        if case.refuses:
            refuse_folders(monkeypatch, tmp_path / "runs", case.refuses)
        try:
            status = main(command(case, tmp_path, checkpoints))
        except SystemExit as stop:
            status = stop.code
    check(case, status, capsys.readouterr().err, tmp_path, checkpoints)


@pytest.mark.parametrize("does", ["`--model.network.dpth=3`", "a truncated PNG"])
def test_so_it_is_in_a_process_of_its_own(does: str, tmp_path) -> None:
    (case,) = [case for case in CASES if case.does == does]
    case.make(tmp_path)
    argv = [sys.executable, "-m", "app", *command(case, tmp_path, {})]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, check=False)
    check(case, done.returncode, done.stderr, tmp_path, {})


def test_a_long_prompt_is_cut_and_said(checkpoints, capsys) -> None:
    argv = [*GENERATE, checkpoints["TEXT_CHECKPOINT"], "--max_tokens=1", "--prompt", "x" * 200]
    assert main(argv) == 0
    assert capsys.readouterr().err == (
        "note: the prompt has 200 tokens and the model reads 128 at a time; the last 128 count\n"
    )


def table() -> str:
    """docs/errors.md."""
    lines = [
        "# What goes wrong, and what it says",
        "",
        "Every mistake below costs one line on standard error, which begins with `error: ` and is",
        "the last one there, and exit status 2. No file of an earlier run is touched, and a run",
        "that did not begin leaves no folder. `FOLDER` and `CHECKPOINT` stand for paths, `…` for",
        "what differs. Each row is a test (`tests/cli/test_bad_inputs.py`, which also",
        "writes this page: `python -m tests.cli.test_bad_inputs`).",
        "",
    ]
    for group in dict.fromkeys(case.group for case in CASES):
        lines += [f"## {group}", "", "| you do | you see |", "| --- | --- |"]
        for case in CASES:
            if case.group == group:
                does = case.does.replace("~", " ").replace("|", "\\|")
                tick = "``" if "`" in case.sees else "`"
                pad = " " if tick == "``" else ""
                sees = case.sees.replace("|", "\\|")
                lines.append(f"| {does} | {tick}{pad}{sees}{pad}{tick} |")
        lines.append("")
    lines += [
        "## What can't be noticed",
        "",
        "Checkpoints, exports, token files, trained tokenizers and PNG images carry checksums, as",
        "does the published CIFAR-10, and damage to them is noticed. Parquet files are checked",
        "where they were written with page checksums. Nothing can tell a flipped bit in a label of",
        "a parquet file without them that stays within the range, in a JPEG, in a letter of a text",
        "or in a digit of a CSV file.",
        "",
    ]
    return "\n".join(lines)


def test_the_table_is_the_tests() -> None:
    assert len(CASES) >= 40
    assert len({case.does for case in CASES}) == len(CASES)
    assert DOCS.read_text(encoding="utf-8") == table()


if __name__ == "__main__":
    DOCS.write_text(table(), encoding="utf-8")
