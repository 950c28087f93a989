"""Language models from the command line: methods on text, evaluation, resuming, bad input."""

import csv
import math
import re
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.cli import main as cli
from app.commands import generate
from app.tasks import LanguageModeling

CONFIGS = Path(__file__).parents[2] / "configs"
PROSE = "".join(
    f"Line {i}: the {animal} sat on the {place} and looked at number {i * i}.\n"
    for i in range(40)
    for animal, place in (("cat", "mat"), ("dog", "log"), ("owl", "oak"))
)
DYNMOE = f"""
base: [{CONFIGS}/recipes/shakespeare.yaml, {CONFIGS}/methods/topany.yaml]
model:
  init_args:
    network:
      init_args:
        moe:
          init_args: {{num_experts: 4, max_experts: 8}}
trainer:
  callbacks+:
    - class_path: callbacks.AdaptiveExperts
      init_args: {{window_steps: [1, 4, 5], min_load_fraction: MIN_LOAD}}
"""


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(PROSE)
    return path


def command(book: Path, *options: str, subcommand: str = "fit", config: Path | None = None):
    """A command line for a model of width 16 on a text of some 7000 bytes."""
    config = config or CONFIGS / "language" / "shakespeare_topk2.yaml"
    sizes = {"dim": 16, "depth": 2, "num_heads": 2, "max_length": 16, "moe_blocks": "[0,1]"}
    return [
        *(subcommand, "--config", str(config), f"--runs={book.parent / 'runs'}", "--name=run"),
        *(f"--model.network.{key}={value}" for key, value in sizes.items()),
        *("--model.sample_tokens=0", "--data.dataset=null", f"--data.files={book}"),
        *("--data.block_size=16", "--data.batch_size=16", "--data.eval_batch_size=32"),
        *(f"--data.cache_dir={book.parent / 'cache'}", "--trainer.accelerator=cpu"),
        *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
        *("--trainer.val_check_interval=5", "--trainer.log_every_n_steps=1"),
        *("--monitor.every_n_steps=1", "--pictures.enabled=false", *options),
    ]


def fit(book: Path, *options: str, version: int = 0, config: Path | None = None) -> Path:
    """Trains; the folder of the run's version."""
    assert cli.main(command(book, *options, config=config)) == 0
    return book.parent / "runs" / "run" / f"version_{version}"


def last(run: Path) -> Path:
    return run / "checkpoints" / "last.ckpt"


def rows(path: Path) -> list[dict[str, str]]:
    """A table without the column that differs from run to run."""
    with path.open() as file:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(file)]


def scalars(run: Path) -> dict[str, list[float]]:
    """Every TensorBoard scalar of a run, by tag, in the order of the steps."""
    events = EventAccumulator(str(run)).Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# ---- the methods on text


@pytest.mark.parametrize(("min_load", "kinds"), [(0.0, {"birth"}), (0.5, {"birth", "death"})])
def test_experts_are_born_and_die_on_text(book: Path, min_load: float, kinds: set[str]) -> None:
    config = book.parent / "dynmoe.yaml"
    config.write_text(DYNMOE.replace("MIN_LOAD", str(min_load)))
    run = fit(book, "--trainer.max_steps=15", config=config)

    events = rows(run / "expert_events.csv")
    assert {event["event"] for event in events} == kinds
    assert {int(event["step"]) for event in events} <= {4, 9, 14}  # the windows' ends
    task = generate.load_task(last(run))
    logged = scalars(run)
    for layer, block in task.blocks.items():
        mine = [event["event"] for event in events if event["layer"] == layer]
        alive = 4 + mine.count("birth") - mine.count("death")
        assert len(block.active_slots()) == alive
        assert logged[f"routing/{layer}/active_experts"][-1] == alive
    for event in events:
        if event["event"] == "death":
            assert int(event["expert_tokens"]) / int(event["tokens"]) < min_load
        else:
            assert int(event["unrouted_tokens"]) > 0


def test_default_vectors_follow_the_experts_on_text(book: Path) -> None:
    config = CONFIGS / "language" / "shakespeare_default.yaml"
    vectors = []
    for version, steps in enumerate((5, 10)):
        run = fit(book, f"--trainer.max_steps={steps}", version=version, config=config)
        blocks = generate.load_task(last(run)).blocks
        assert all(block.default_seen_E.all() for block in blocks.values())
        vectors.append(torch.stack([block.default_ED for block in blocks.values()]))
    assert (vectors[1].norm(dim=-1) > 0).all()
    assert not torch.isclose(vectors[0], vectors[1]).any(-1).all()

    # Evaluation moves nothing: validating more often leaves the same vectors behind.
    often = fit(
        book, "--trainer.max_steps=10", "--trainer.val_check_interval=1", version=2, config=config
    )
    blocks = generate.load_task(last(often)).blocks
    assert torch.equal(torch.stack([b.default_ED for b in blocks.values()]), vectors[1])


@pytest.mark.parametrize("method", ["topk2", "tcmoe", "default", "dense"])
def test_what_is_logged(book: Path, method: str) -> None:
    run = fit(
        book,
        *(
            ["--trainer.max_steps=6"]
            + (["--model.network.moe_blocks=[]"] if method == "dense" else [])
            # Nulls from the start: the method's shift keeps them out of so short a run.
            + (["--model.network.moe.router.null_shift=0"] if method == "tcmoe" else [])
        ),
        config=CONFIGS / "language" / f"shakespeare_{method}.yaml",
    )
    logged = scalars(run)
    assert len(logged["train/loss"]) == 6
    layers = [] if method == "dense" else ["blocks.0", "blocks.1"]
    for layer in layers:
        for name in ("active_experts", "experts_per_token", "load_cv", "router_entropy"):
            values = logged[f"routing/{layer}/{name}"]
            assert len(values) == 6 and all(map(math.isfinite, values))
        assert logged[f"routing/{layer}/active_experts"] == [8.0] * 6
        k = logged[f"routing/{layer}/experts_per_token"]
        assert all(v < 2.0 for v in k) if method == "tcmoe" else k == [2.0] * 6
    assert not [tag for tag in logged if tag.startswith("routing/") and not layers]
    (row,) = rows(run / "metrics.csv")
    loss = float(row["val/loss"])
    assert float(row["val/perplexity"]) == pytest.approx(math.exp(loss), rel=1e-4)
    assert float(row["val/bits_per_byte"]) == pytest.approx(loss / math.log(2), rel=1e-4)


# ---- first run, evaluation, generation


def test_quickstart_lm_trains_and_prints_a_sample(tmp_path: Path, capsys) -> None:
    options = ["--model.network.dim=16", "--model.network.num_heads=2", "--trainer.max_steps=4"]
    options += ["--trainer.limit_val_batches=2", "--trainer.val_check_interval=4"]
    options += [f"--runs={tmp_path / 'runs'}", f"--data.cache_dir={tmp_path / 'cache'}"]
    options += ["--model.sample_tokens=40", "--trainer.accelerator=cpu"]
    assert cli.main(["fit", "--config", str(CONFIGS / "quickstart_lm.yaml"), *options]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^The .{20,}", shown, re.DOTALL | re.MULTILINE)
    (row,) = rows(tmp_path / "runs" / "quickstart_lm" / "version_0" / "metrics.csv")
    assert (row["step"], float(row["val/bits_per_byte"]) < 8.5) == ("4", True)


def measured(shown: str, name: str) -> float:
    """A value of the table that Lightning prints after an evaluation."""
    return float(re.search(rf"{re.escape(name)}\W+([\d.]+)", shown)[1])


def test_validate_test_and_generate_from_a_checkpoint(book: Path, capsys) -> None:
    run = fit(book, "--trainer.max_steps=20")
    loss = float(rows(run / "metrics.csv")[-1]["val/loss"])
    capsys.readouterr()

    path = f"--ckpt_path={last(run)}"
    assert cli.main(command(book, path, subcommand="validate")) == 0
    assert measured(capsys.readouterr().out, "val/loss") == pytest.approx(loss, rel=1e-4)
    assert cli.main(command(book, path, subcommand="test")) == 0  # no test text: the validation's
    assert measured(capsys.readouterr().out, "test/loss") == pytest.approx(loss, rel=1e-4)

    held_out = book.parent / "held_out.txt"
    held_out.write_text(PROSE[:400])
    assert cli.main(command(book, path, f"--data.test_files={held_out}", subcommand="test")) == 0
    shown = capsys.readouterr().out
    other = measured(shown, "test/loss")
    assert other != pytest.approx(loss, rel=1e-4)
    assert measured(shown, "test/perplexity") == pytest.approx(math.exp(other), rel=1e-4)
    assert measured(shown, "test/bits_per_byte") == pytest.approx(other / math.log(2), rel=1e-4)

    moved = book.parent / "elsewhere.ckpt"
    last(run).rename(moved)
    book.unlink()
    assert cli.main(["generate", f"--ckpt_path={moved}", "--prompt=The cat", "--max_tokens=9"]) == 0
    assert re.fullmatch(r"The cat.+\n", capsys.readouterr().out, re.DOTALL)


# ---- resuming


@pytest.fixture
def seen(monkeypatch) -> list[tuple[int, int, int, int]]:
    """(step, epoch, batch, checksum of the tokens) of every training batch."""
    notes: list[tuple[int, int, int, int]] = []
    step = LanguageModeling.training_step

    def noting(self, batch, batch_idx):
        weights = torch.arange(1, batch.numel() + 1).reshape(batch.shape)
        trainer = self.trainer
        at = (trainer.global_step, trainer.current_epoch, batch_idx)
        notes.append((*at, int((batch * weights).sum())))
        return step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModeling, "training_step", noting)
    return notes


CONSTANT = ("--model.schedule=constant", "--model.warmup=0")  # else max_steps sets the rates


def same_checkpoint(one: Path, other: Path) -> None:
    a, b = (torch.load(path, weights_only=True) for path in (one, other))
    assert a["global_step"] == b["global_step"]
    assert a["state_dict"].keys() == b["state_dict"].keys()
    assert all(torch.equal(value, b["state_dict"][name]) for name, value in a["state_dict"].items())


@pytest.mark.parametrize(
    ("stop", "every"),
    [(7, 5), (10, 5), (24, 5), (24, 6), (47, 6)],  # 6 divides an epoch: it ends with a validation
)
def test_a_longer_max_steps_goes_on_where_the_run_ended(
    book: Path, seen: list, stop: int, every: int
) -> None:
    """`last.ckpt` of a run that `max_steps` ended, in the middle of an epoch of 24 batches or at
    its end, resumed with a larger one: the next batch, not the next epoch."""
    options = [*CONSTANT, f"--trainer.val_check_interval={every}"]
    whole = fit(book, "--trainer.max_steps=51", *options)
    expected, seen[:] = list(seen), []
    assert [at[1] for at in expected] == [0] * 24 + [1] * 24 + [2] * 3

    run = fit(book, f"--trainer.max_steps={stop}", *options, version=1)
    assert torch.load(last(run), weights_only=True)["global_step"] == stop
    resumed = [f"--ckpt_path={last(run)}", "--trainer.max_steps=51", *options]
    fit(book, *resumed, version=1)
    assert seen == expected
    same_checkpoint(last(whole), last(run))
    assert rows(run / "metrics.csv") == rows(whole / "metrics.csv")
    steps = [
        [event.step for event in EventAccumulator(str(each)).Reload().Scalars("train/loss")]
        for each in (whole, run)
    ]
    assert sorted(steps[1]) == sorted(steps[0])


def test_a_longer_max_epochs_goes_on_where_max_steps_ended(book: Path, seen: list) -> None:
    epochs = ["--trainer.max_steps=-1", "--trainer.max_epochs=2", *CONSTANT]
    whole = fit(book, *epochs)
    expected, seen[:] = list(seen), []
    run = fit(book, "--trainer.max_steps=30", *CONSTANT, version=1)
    fit(book, f"--ckpt_path={last(run)}", *epochs, version=1)
    assert seen == expected
    same_checkpoint(last(whole), last(run))


class Killed(BaseException):
    """Ends the process as far as the run is concerned."""


@pytest.mark.parametrize(
    ("options", "saved"),
    [([], 48), (["--checkpoint.every_n_train_steps=7"], 56), (["--checkpoint.save_top_k=1"], 48)],
)
def test_a_killed_run_goes_on_from_its_last_checkpoint(
    book: Path, seen: list, monkeypatch, options: list[str], saved: int
) -> None:
    options = ["--trainer.max_steps=-1", "--trainer.max_epochs=3", *options]
    whole = fit(book, *options)
    expected, seen[:] = list(seen), []
    step = LanguageModeling.training_step

    def killed(self, batch, batch_idx):
        if self.trainer.global_step == 60:
            raise Killed
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageModeling, "training_step", killed)
        with pytest.raises(Killed):
            cli.main(command(book, *options))
    run = book.parent / "runs" / "run" / "version_1"
    assert torch.load(last(run), weights_only=True)["global_step"] == saved
    seen[:] = seen[:saved]
    fit(book, "--ckpt_path=last", *options, version=1)
    assert seen == expected
    same_checkpoint(last(whole), last(run))


def test_the_last_steps_of_a_run_are_saved(book: Path) -> None:
    run = fit(book, "--trainer.max_steps=13", "--checkpoint.every_n_train_steps=5")
    assert torch.load(last(run), weights_only=True)["global_step"] == 13


# ---- bad input


def refused(capsys, argv: list[str]) -> str:
    """Status 2 and one line that says why; nothing of it twice, no traceback."""
    capsys.readouterr()
    try:
        status = cli.main(argv)
    except SystemExit as stopped:
        status = stopped.code
    error = capsys.readouterr().err
    assert status == 2
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in error, error
    assert error.rstrip().endswith(lines[0])
    return lines[0]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", [], r"book\.txt is empty"),
        (b" ", [], r"has \d tokens? and a block needs 17"),
        (PROSE.encode() + b"\0\1\2", [], r"book\.txt is a binary file"),
        (b"\xff\xfe" * 400, [], r"book\.txt is not UTF-8 text .*convert it to UTF-8"),
        (
            PROSE.encode(),
            ["--data.val_fraction=0.001"],
            r"the validation text, .* has \d+ tokens and a block needs 17; .*data\.val_fraction",
        ),
        (PROSE.encode(), ["--data.val_files=SHORT"], r"the validation text, .*short\.txt"),
        (PROSE.encode(), ["--data.test_files=SHORT"], r"the test text, .*short\.txt"),
        (PROSE.encode(), ["--data.val_files=/no/such.txt"], r"data\.val_files.*/no/such\.txt"),
        (PROSE.encode(), ["--data.tokenizer=/no/tokenizer.json"], r"/no/tokenizer\.json"),
        (PROSE.encode(), ["--data.block_size=32"], r"max_length is 16 .*block_size is 32"),
        (PROSE.encode(), ["--model.network.vocab_size=100"], r"set vocab_size: 256"),
        (PROSE.encode(), ["--data.batch_size=0"], r"batch_size"),
    ],
)
def test_bad_input(book: Path, content: bytes, options: list[str], message: str, capsys) -> None:
    book.write_bytes(content)
    short = book.parent / "short.txt"
    short.write_text("too short")
    options = [option.replace("SHORT", str(short)) for option in options]
    line = refused(capsys, command(book, "--trainer.max_steps=1", *options))
    assert re.search(message, line), line


@pytest.mark.parametrize("subcommand", ["fit", "validate", "test"])
def test_a_tokenizer_that_does_not_match_the_checkpoint(
    book: Path, subcommand: str, capsys
) -> None:
    pytest.importorskip("tokenizers")
    run = fit(book, "--trainer.max_steps=1", "--model.network.vocab_size=300")
    other = ["--data.tokenizer=bpe", "--data.vocab_size=300", "--model.network.vocab_size=300"]
    argv = command(book, *other, f"--ckpt_path={last(run)}", subcommand=subcommand)
    assert "trained with another tokenizer (bytes)" in refused(capsys, argv)


@pytest.mark.parametrize(
    ("library", "options"),
    [
        ("tokenizers", ["--data.tokenizer=bpe"]),
        ("datasets", ["--data=HuggingFaceText", "--data.tokenizer=bytes"]),
        ("tokenizers", ["--data=HuggingFaceText"]),
    ],
)
def test_a_missing_library_names_its_extra(
    book: Path, library: str, options: list[str], monkeypatch, capsys
) -> None:
    monkeypatch.setitem(__import__("sys").modules, library, None)  # import fails
    argv = command(book, "--trainer.max_steps=1")
    if "--data=HuggingFaceText" in options:
        argv = [each for each in argv if not each.startswith(("--data.dataset", "--data.files"))]
    line = refused(capsys, [*argv, *options])
    assert f"{library} library: pip install -e .[language]" in line
