"""`python -m app generate`: from a checkpoint alone, sampling, stopping, mistakes of the user's."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.cli import main as cli
from app.commands import generate
from app.models import sampling
from app.models.decoder import Decoder
from app.models.sampling import sample

SIZES = ["vocab_size=256", "dim=16", "depth=2", "num_heads=2", "max_length=24", "moe_blocks=[1]"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two training steps, written by the command line."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("the cat sat on the mat. " * 60)
    command = ["fit", "--model=app.tasks.language_modeling.LanguageModeling"]
    command += ["--model.network=app.models.decoder.Decoder"]
    command += [f"--model.network.{size}" for size in SIZES]
    command += ["--model.sample_tokens=5", "--data=data.text.TextData", "--data.block_size=16"]
    command += [f"--data.files={folder / 'text.txt'}", f"--data.cache_dir={folder / 'cache'}"]
    command += ["--trainer.max_epochs=1", "--trainer.limit_train_batches=2"]
    command += ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    command += ["--trainer.enable_model_summary=false", f"--runs={folder / 'runs'}"]
    assert cli.main(command) == 0
    return next((folder / "runs").rglob("last.ckpt"))


def run(path: Path, *options: str) -> int:
    return generate.main(["--ckpt_path", str(path), "--device", "cpu", *options])


def changed(trained: Path, folder: Path, **entries) -> Path:
    checkpoint = torch.load(trained, weights_only=True)
    checkpoint |= entries
    torch.save({k: v for k, v in checkpoint.items() if v is not None}, folder / "changed.ckpt")
    return folder / "changed.ckpt"


def test_text_from_a_checkpoint_alone(trained: Path, tmp_path: Path, capsys) -> None:
    options = ["--prompt", "the cat", "--max_tokens", "60", "--seed", "3"]
    assert run(trained, *options, "--json", str(tmp_path / "out" / "text.json")) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "text.json").read_text())
    assert shown == "the cat" + result["text"] + "\n"
    assert (result["tokens"], result["stopped"], result["seed"]) == (60, "max_tokens", 3)
    assert run(trained, *options) == 0
    assert capsys.readouterr().out == shown
    assert run(trained, *options[:-1], "4") == 0
    assert capsys.readouterr().out != shown


def test_the_trained_weights_are_used(trained: Path) -> None:
    task = generate.load_task(trained)
    state = torch.load(trained, weights_only=True)["state_dict"]
    assert torch.equal(task.network.embed.weight, state["network.embed.weight"])
    assert not task.training
    assert task.block_size == 16


def test_without_a_prompt(trained: Path, capsys) -> None:
    assert run(trained, "--max_tokens", "3") == 0
    assert capsys.readouterr().out.endswith("\n")


def test_interrupted(trained: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def interrupted(*_, **__):
        yield from b"ab"
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "generate", interrupted)
    assert run(trained, "--prompt", "x", "--json", str(tmp_path / "a.json")) == 130
    assert capsys.readouterr().out == "xab\n"
    assert json.loads((tmp_path / "a.json").read_text())["stopped"] == "interrupted"


def one_line(capsys) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_no_such_file_and_no_checkpoint(tmp_path: Path, capsys) -> None:
    assert run(tmp_path / "none.ckpt") == 2
    assert "none.ckpt" in one_line(capsys)
    (tmp_path / "bad.ckpt").write_bytes(b"something else")
    assert run(tmp_path / "bad.ckpt") == 2
    assert "bad.ckpt is damaged" in one_line(capsys)
    torch.save([1, 2], tmp_path / "list.ckpt")
    assert run(tmp_path / "list.ckpt") == 2
    assert "list.ckpt" in one_line(capsys)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"config": None}, "holds no config"),
        ({"tokenizer": None}, "carries no tokenizer"),
        ({"config": "model:\n  class_path: torch.nn.Linear\n"}, "no LanguageModeling"),
        ({"config": "trainer: {}\n"}, "no LanguageModeling"),
        ({"state_dict": {}}, "do not fit its model"),
        ({"tokenizer": {"kind": "words"}}, "unknown kind 'words'"),
    ],
)
def test_an_unfit_checkpoint(trained: Path, tmp_path: Path, entries, message: str, capsys) -> None:
    assert run(changed(trained, tmp_path, **entries)) == 2
    assert message in one_line(capsys)


def test_a_tokenizer_of_another_model(trained: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("tokenizers")
    from data.text.tokenizers import BPETokenizer

    state = BPETokenizer.train(["the cat sat on the mat. " * 9], vocab_size=280).to_state()
    assert run(changed(trained, tmp_path, tokenizer=state)) == 2
    assert "do not belong together" in one_line(capsys)


@pytest.mark.parametrize(
    "options",
    [["--max_tokens", "0"], ["--top_p", "1.5"], ["--temperature", "-1"], ["--top_k", "many"]],
)
def test_options_out_of_range(trained: Path, options: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        run(trained, *options)
    assert stop.value.code == 2
    assert options[0] in capsys.readouterr().err


# Sampling


def tiny() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(vocab_size=40, dim=16, depth=2, num_heads=2, num_kv_heads=1, max_length=32)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def test_cached_generation_equals_uncached_token_for_token() -> None:
    model = tiny()
    prompt = [3, 1, 4, 1, 5]
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(27):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert list(sampling.generate(model, prompt, 27, temperature=0)) == ids[5:]


def test_generation_goes_on_beyond_the_context() -> None:
    model = tiny()
    lengths = []

    def note(_, args) -> None:
        tokens_BS, cache = args
        lengths.append(cache.length + tokens_BS.shape[1])

    model.register_forward_pre_hook(note)
    tokens = list(sampling.generate(model, [1] * 50, 100, context=8))
    assert len(tokens) == 100
    assert max(lengths) == 8 and min(lengths) == 4


def test_the_model_is_left_as_it_was() -> None:
    model = tiny().train()
    state = torch.get_rng_state()
    iterator = sampling.generate(model, [1], 10)
    next(iterator)
    assert not model.training
    iterator.close()
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_stops_at_the_end_of_text() -> None:
    model = tiny()
    tokens = list(sampling.generate(model, [1], 20, temperature=0))
    assert list(sampling.generate(model, [1], 20, temperature=0, stop=tokens[0])) == []
    with pytest.raises(ValueError, match="no token"):
        next(sampling.generate(model, [], 20))


@settings(max_examples=60, deadline=None)
@given(
    # Far enough apart that no two probabilities are equal in float32.
    logits=st.lists(
        st.integers(-500, 500).map(lambda i: i / 100), min_size=2, max_size=12, unique=True
    ),
    top_k=st.none() | st.integers(1, 14),
    top_p=st.none() | st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_sampling_keeps_to_its_limits(logits, top_k, top_p, seed: int) -> None:
    logits_V = torch.tensor(logits)
    generator = torch.Generator().manual_seed(seed)
    token = sample(logits_V, 0.7, top_k, top_p, generator)
    order = logits_V.argsort(descending=True).tolist()
    rank = order.index(token)
    assert rank < (top_k or len(logits))
    if top_p is not None:
        kept = (logits_V[order] / 0.7).softmax(0)[: top_k or len(logits)]
        assert rank == 0 or kept[:rank].sum() / kept.sum() <= top_p + 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-3])
def test_a_low_temperature_takes_the_likeliest(temperature: float) -> None:
    logits_V = torch.tensor([0.1, 3.0, 2.0])
    assert sample(logits_V, temperature, None, None, torch.Generator()) == 1


def test_sampling_follows_the_probabilities() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_V = torch.tensor([0.1, 0.6, 0.3]).log()
    drawn = [sample(logits_V, 1.0, None, None, generator) for _ in range(2000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=3) / 2000
    torch.testing.assert_close(counts, torch.tensor([0.1, 0.6, 0.3]), atol=0.03, rtol=0)
