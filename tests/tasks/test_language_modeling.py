"""The language task: what it logs, what it refuses, and what its checkpoints carry."""

import math
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint

from app.errors import ConfigError
from app.models.decoder import Decoder
from app.tasks.language_modeling import LanguageModeling
from data.text.module import TextData

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 40


@pytest.fixture
def book(tmp_path: Path) -> Path:
    (tmp_path / "book.txt").write_text(TEXT)
    (tmp_path / "test.txt").write_text("Call me Ishmael. Some years ago, never mind how long.")
    return tmp_path / "book.txt"


def make_data(book: Path, **options) -> TextData:
    defaults = {"block_size": 16, "batch_size": 8, "cache_dir": str(book.parent / "cache")}
    return TextData(str(book), **(defaults | options))


def make_task(network: dict | None = None, **options) -> LanguageModeling:
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 2, "num_heads": 2, "max_length": 32, "moe_blocks": [1]}
    return LanguageModeling(
        Decoder(**(sizes | (network or {}))), **({"sample_tokens": 0} | options)
    )


def make_trainer(folder: Path, **options) -> L.Trainer:
    defaults = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
        "default_root_dir": folder,
    }
    return L.Trainer(**(defaults | options))


def test_evaluation_is_the_mean_over_the_text(tmp_path: Path, book: Path) -> None:
    """Whatever the batches: the last block is short, the last batch as well."""
    task, trainer = make_task(), make_trainer(tmp_path)
    module = make_data(book, test_files=str(book.parent / "test.txt"), eval_batch_size=3)
    logged = trainer.test(task, module, verbose=False)[0]
    text = torch.tensor(list((book.parent / "test.txt").read_bytes()))
    losses = []
    for start in range(0, len(text) - 1, 16):
        block = text[start : start + 17]
        with torch.no_grad():
            logits = task.eval()(block[None, :-1])[0]
        losses.append(F.cross_entropy(logits, block[1:], reduction="none"))
    expected = torch.cat(losses)
    assert len(expected) == len(text) - 1
    assert logged["test/loss"] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert logged["test/perplexity"] == pytest.approx(math.exp(logged["test/loss"]), rel=1e-5)
    assert logged["test/bits_per_byte"] == pytest.approx(logged["test/loss"] / math.log(2))


def test_bits_per_byte_counts_bytes_and_not_tokens(tmp_path: Path, book: Path) -> None:
    pytest.importorskip("tokenizers")
    module = make_data(book, tokenizer="bpe", vocab_size=280, block_size=4)
    trainer = make_trainer(tmp_path)
    logged = trainer.validate(make_task({"vocab_size": 280}), module, verbose=False)[0]
    ratio = logged["val/loss"] / math.log(2) / logged["val/bits_per_byte"]
    assert ratio == pytest.approx(module.bytes_per_token())
    assert ratio > 1.5


def test_the_logged_loss_excludes_the_auxiliary_ones(tmp_path: Path, book: Path) -> None:
    logged = []
    for weight in (0.0, 100.0):
        task = make_task(losses={"load_balance": weight})
        trainer = make_trainer(tmp_path, max_steps=1, limit_val_batches=0)
        trainer.fit(task, make_data(book))
        logged.append(trainer.callback_metrics["train/loss"].item())
        assert trainer.callback_metrics["train/aux/load_balance"] >= 1.0
    assert logged[0] == logged[1] == pytest.approx(math.log(256), rel=0.02)


def test_it_learns(tmp_path: Path, book: Path, capsys) -> None:
    task = make_task(
        {"dim": 32},
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        sample_prompt="It was ",
        sample_tokens=30,
    )
    trainer = make_trainer(tmp_path, max_epochs=8, check_val_every_n_epoch=8)
    trainer.fit(task, make_data(book))
    assert trainer.callback_metrics["val/loss"] < 0.5
    assert "It was the" in capsys.readouterr().out
    assert all(block.routing is None for block in task.blocks.values())


def test_throughput_is_logged(tmp_path: Path, book: Path, monkeypatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    trainer = make_trainer(tmp_path, max_steps=2, limit_val_batches=0)
    trainer.fit(make_task(), make_data(book))
    assert trainer.callback_metrics["tokens_per_second"] == 8 * 16
    assert "tokens_per_second" in trainer.progress_bar_metrics


def test_the_checkpoint_carries_the_tokenizer(tmp_path: Path, book: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1, limit_val_batches=0)
    trainer.fit(make_task(), make_data(book))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert saved["tokenizer"]["kind"] == "bytes" and saved["block_size"] == 16
    again = make_trainer(tmp_path)
    again.validate(make_task(), make_data(book), ckpt_path=tmp_path / "a.ckpt", verbose=False)


def test_another_tokenizer_than_the_checkpoints(tmp_path: Path, book: Path) -> None:
    pytest.importorskip("tokenizers")
    network = {"vocab_size": 280}
    trainer = make_trainer(tmp_path, max_steps=1, limit_val_batches=0)
    trainer.fit(make_task(network), make_data(book))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    bpe = make_data(book, tokenizer="bpe", vocab_size=280)
    with pytest.raises(ConfigError, match=r"another tokenizer.*data\.tokenizer"):
        make_trainer(tmp_path).validate(make_task(network), bpe, ckpt_path=tmp_path / "a.ckpt")


def test_network_and_data_that_do_not_fit(tmp_path: Path, book: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size is 200 .* set vocab_size: 256"):
        make_trainer(tmp_path).fit(make_task({"vocab_size": 200}), make_data(book))
    with pytest.raises(ConfigError, match=r"max_length is 8 .* set max_length: 16"):
        make_trainer(tmp_path).fit(make_task({"max_length": 8}), make_data(book))


def test_resuming_inside_an_epoch_changes_nothing(tmp_path: Path, book: Path) -> None:
    def run(ckpt_path: Path | None) -> torch.Tensor:
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=30, save_top_k=-1)
        trainer = make_trainer(
            tmp_path, max_epochs=2, limit_val_batches=0, enable_checkpointing=True, callbacks=[keep]
        )
        task = make_task()
        trainer.fit(task, make_data(book), ckpt_path=ckpt_path)
        assert trainer.global_step == 44
        return torch.cat([p.detach().flatten() for p in task.parameters()])

    whole = run(None)
    assert torch.equal(run(tmp_path / "step=30.ckpt"), whole)
