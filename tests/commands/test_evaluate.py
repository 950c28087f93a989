"""`python -m app evaluate`: the harness's requests against sums taken by hand, and its own runs."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from app.cli import main as cli
from app.commands import evaluate as lm_eval_adapter
from app.commands.evaluate import CheckpointLM, windows
from app.models import Decoder
from app.tasks import LanguageModeling
from data.text.tokenizers import BPETokenizer, ByteTokenizer

needs_harness = pytest.mark.skipif(
    lm_eval_adapter.LM is object, reason="the optional package lm-eval is not installed"
)
CONTEXT = 12


def make_task(tokenizer=None, block_size: int | None = CONTEXT) -> LanguageModeling:
    """An untrained model whose logits are far from uniform."""
    torch.manual_seed(0)
    tokenizer = tokenizer or ByteTokenizer()
    network = Decoder(tokenizer.vocab_size, 16, 2, 2, max_length=24, moe_blocks=[1])
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim > 1:
                weight.mul_(8.0)
    task = LanguageModeling(network).eval()
    task.tokenizer, task.block_size = tokenizer, block_size
    return task


def requests(*arguments) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=each) for each in arguments]


@torch.no_grad()
def log_p(task: LanguageModeling, read: bytes, wanted: int) -> float:
    """log p of one byte after those read, alone in its batch."""
    logits_V = task.network(torch.tensor([list(read)]))[0, -1]
    return logits_V.double().log_softmax(0)[wanted].item()


# ---- windows


@pytest.mark.parametrize("length", range(1, 16))
@pytest.mark.parametrize("start", [1, 3])
def test_windows_predict_each_id_once_with_all_the_context(length: int, start: int) -> None:
    scored = []
    for begin, first, end in windows(length, start, 4):
        assert 0 <= begin < first < end <= length
        assert end - 1 - begin <= 4
        assert begin == 0 or end - 1 - begin == 4  # never less context than fits
        scored += range(first, end)
    assert scored == list(range(start, length))


# ---- log-likelihoods


@needs_harness
def test_loglikelihood_is_the_sum_over_the_continuation() -> None:
    task = make_task()
    pairs = [("ab", "cde"), ("", "xy"), ("a", "b"), ("abc ", "d"), ("abc", " d")]
    results = CheckpointLM(task, batch_size=2).loglikelihood(requests(*pairs))
    for (before, after), (total, _) in zip(pairs, results, strict=True):
        bare = before.rstrip()
        text = (bare or "\n") + before[len(bare) :] + after
        start = len(bare or "\n")
        expected = sum(
            log_p(task, text[:i].encode(), ord(text[i])) for i in range(start, len(text))
        )
        assert total == pytest.approx(expected, abs=1e-4)
    assert results[3] == pytest.approx(results[4])
    assert results[0][0] != pytest.approx(results[1][0])


@needs_harness
def test_greedy_is_told_from_not_greedy() -> None:
    task = make_task()
    read = b"ab"
    for _ in range(3):
        with torch.no_grad():
            read += bytes([int(task.network(torch.tensor([list(read)]))[0, -1].argmax())])
    # Bytes rather than text: the greedy continuation need not be UTF-8.
    lm = CheckpointLM(task)
    other = read[:4] + bytes([(read[4] + 1) % 256])
    (_, yes), (_, no) = lm._score([(list(read), 2), (list(other), 2)])
    assert yes and not no


@needs_harness
def test_a_long_context_is_cut_on_the_left() -> None:
    task = make_task()
    lm = CheckpointLM(task)
    kept = "mnopqrstuvw"  # with the byte that is scored, CONTEXT + 1 bytes less one
    long, short = lm.loglikelihood(requests(("abc" + "l" + kept, "x"), ("zzz" + "l" + kept, "x")))
    assert long == short
    assert long[0] == pytest.approx(log_p(task, ("l" + kept).encode(), ord("x")), abs=1e-4)
    lm.context = CONTEXT - 1
    assert lm.loglikelihood(requests(("l" + kept, "x")))[0] != pytest.approx(long)


@needs_harness
def test_rolling_agrees_with_the_harness_own_windows() -> None:
    from lm_eval.utils import get_rolling_token_windows

    task, text = make_task(), "The cat sat on the mat, and the dog looked on from afar."
    expected, ids = 0.0, list(text.encode())
    for read, wanted in get_rolling_token_windows(ids, ord("\n"), CONTEXT, 1):
        for i, each in enumerate(wanted):
            upto = len(read) - len(wanted) + 1 + i
            expected += log_p(task, bytes(read[:upto]), each)
    (total,) = CheckpointLM(task, batch_size=3).loglikelihood_rolling(requests((text,)))
    assert total == pytest.approx(expected, abs=1e-3)
    assert CheckpointLM(task).loglikelihood_rolling(requests(("",))) == [0.0]


@needs_harness
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_batches_change_nothing(batch_size: int) -> None:
    texts = [("word " * n + str(n),) for n in range(6)]
    alone = CheckpointLM(make_task(), 1).loglikelihood_rolling(requests(*texts))
    together = CheckpointLM(make_task(), batch_size).loglikelihood_rolling(requests(*texts))
    assert together == pytest.approx(alone, abs=1e-4)


@needs_harness
def test_a_bpe_starts_after_its_end_of_text_and_splits_at_the_words() -> None:
    pytest.importorskip("tokenizers")
    tokenizer = BPETokenizer.train(["the cat sat on the mat " * 20], 290)
    lm = CheckpointLM(make_task(tokenizer))
    assert lm.start == [tokenizer.end_of_text]
    before, after = lm._encode_pair("the cat ", "sat")
    assert tokenizer.decode(before) == "the cat" and tokenizer.decode(after) == " sat"
    before, after = lm._encode_pair("the ca", "t")  # merged over the border in the whole text
    assert after and tokenizer.decode(before) == "the ca" and tokenizer.decode(after) == "t"


# ---- generation


class Cycle(torch.nn.Module):
    """Predicts the byte after the last one, whatever came before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, 1)
        self.max_length, self.vocab_size = 24, 256

    def new_cache(self):
        return SimpleNamespace(length=0)

    def forward(self, tokens_BS, cache=None):
        return 50.0 * torch.nn.functional.one_hot((tokens_BS + 1) % 256, 256).float()


def generated(**settings) -> str:
    task = make_task()
    task.network = Cycle()
    return CheckpointLM(task).generate_until(requests(("ab", settings)))[0]


@needs_harness
def test_generation_stops_before_the_first_of_its_ends() -> None:
    assert generated(until=["g"]) == "cdef"
    assert generated(until=["z", "fg", "efg"]) == "cd"
    assert generated(until="e", max_gen_toks=50) == "cd"
    assert generated(until=["z"], max_gen_toks=4) == "cdef"
    assert generated(max_gen_toks=3) == "cde"
    assert generated(until=["e"], do_sample=True, temperature=0.5, top_k=3) == "cd"


# ---- whole runs of the harness


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint written by the command line."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("the cat sat on the mat. the dog sat on the log. " * 40)
    command = ["fit", "--model=LanguageModeling", "--model.network=Decoder"]
    sizes = {"dim": 16, "depth": 2, "num_heads": 2, "max_length": 32, "moe_blocks": "[1]"}
    command += [f"--model.network.{name}={value}" for name, value in sizes.items()]
    command += ["--model.sample_tokens=0", "--data=TextData", "--data.block_size=32"]
    command += [f"--data.files={folder / 'text.txt'}", f"--data.cache_dir={folder / 'cache'}"]
    command += ["--trainer.max_steps=30", "--trainer.accelerator=cpu"]
    command += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    command += ["--model.optimizer=torch.optim.AdamW", "--model.optimizer.lr=0.02"]
    assert cli.main([*command, f"--runs={folder / 'runs'}"]) == 0
    return next((folder / "runs").rglob("last.ckpt"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three small tasks, one for each kind of request."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": "the cat sat on the", "choices": [" mat.", " qqqq"], "answer": 0},
        {"question": "the dog sat on the", "choices": [" zxzx", " log."], "answer": 1},
        {"question": "the cat", "choices": [" sat on", " jjjjjj"], "answer": 0},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"""
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder / "rows.jsonl"}}}
  cache_dir: {folder / "cache"}
test_split: test
"""
    (folder / "choice.yaml").write_text(
        common + "task: local_choice\noutput_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\n'
        'target_delimiter: ""\nmetric_list: [{metric: acc}]\n'
    )
    (folder / "rolling.yaml").write_text(
        common + "task: local_rolling\noutput_type: loglikelihood_rolling\n"
        'doc_to_text: ""\ndoc_to_target: "{{question}}"\n'
        "metric_list: [{metric: bits_per_byte}]\n"
    )
    (folder / "text.yaml").write_text(
        common + "task: local_text\noutput_type: generate_until\n"
        'doc_to_text: "{{question}}"\ndoc_to_target: "{{choices[answer]}}"\n'
        'generation_kwargs: {until: ["."], max_gen_toks: 8}\n'
        "metric_list: [{metric: exact_match}]\n"
    )
    return folder


def evaluate(*options: str) -> int:
    return cli.main(["evaluate", "--device", "cpu", *options])


@needs_harness
def test_the_harness_runs_its_tasks_on_a_checkpoint(
    trained: Path, tasks: Path, tmp_path: Path, capsys
) -> None:
    names = "local_choice,local_rolling,local_text"
    where = ["--ckpt_path", str(trained), "--tasks", names, "--include_path", str(tasks)]
    assert evaluate(*where, "--json", str(tmp_path / "out" / "results.json")) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names.split(","))
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    results = content["results"]
    # Thirty steps are enough to prefer words of the text to letters that are not in it.
    assert results["local_choice"]["acc,none"] == 1.0
    bits = results["local_rolling"]["bits_per_byte,none"]
    lm = CheckpointLM(lm_eval_adapter.load_task(trained))
    questions = ["the cat sat on the", "the dog sat on the", "the cat"]
    nats = sum(lm.loglikelihood_rolling(requests(*((q,) for q in questions))))
    assert bits == pytest.approx(-nats / math.log(2) / sum(map(len, questions)), rel=1e-4)
    assert content["n-samples"]["local_choice"]["effective"] == 3
    assert content["ckpt_path"] == str(trained)


@needs_harness
def test_limit(trained: Path, tasks: Path, tmp_path: Path) -> None:
    where = ["--ckpt_path", str(trained), "--tasks", "local_choice", "--include_path", str(tasks)]
    assert evaluate(*where, "--limit", "2", "--json", str(tmp_path / "a.json")) == 0
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["n-samples"]["local_choice"] == {"original": 3, "effective": 2}


# ---- mistakes of the user's


def one_line(capsys) -> str:
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


def test_without_the_package(trained: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(lm_eval_adapter, "LM", object)
    assert evaluate("--ckpt_path", str(trained), "--tasks", "x") == 2
    assert "pip install -e .[eval]" in one_line(capsys)


@needs_harness
def test_a_missing_checkpoint_folder_task_or_file(
    trained: Path, tasks: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    assert evaluate("--ckpt_path", str(tmp_path / "no.ckpt"), "--tasks", "x") == 2
    assert "no.ckpt" in one_line(capsys)
    base = ["--ckpt_path", str(trained), "--tasks"]
    assert evaluate(*base, "x", "--include_path", str(tmp_path / "none")) == 2
    assert "there is no folder" in one_line(capsys)

    import lm_eval.tasks

    real = lm_eval.tasks.TaskManager  # without the thousands of files of the harness's own tasks
    monkeypatch.setattr(
        lm_eval.tasks,
        "TaskManager",
        lambda **options: real(**options | {"include_defaults": False}),
    )
    assert evaluate(*base, "local_chioce", "--include_path", str(tasks)) == 2
    assert "no task 'local_chioce'" in one_line(capsys)
    (tmp_path / "broken.yaml").write_text(
        (tasks / "choice.yaml").read_text().replace("rows.jsonl", "gone.jsonl")
    )
    assert evaluate(*base, "local_choice", "--include_path", str(tmp_path)) == 2
    assert "cannot run local_choice" in one_line(capsys)


@pytest.mark.parametrize("option", [["--limit", "0"], ["--batch_size", "0"], ["--num_fewshot=-1"]])
def test_numbers_out_of_range(option: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        evaluate("--ckpt_path", "x", "--tasks", "x", *option)
    assert caught.value.code == 2
    assert "must be at least" in capsys.readouterr().err
