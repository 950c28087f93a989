"""`python -m app evaluate`: tasks of EleutherAI's lm-evaluation-harness on our checkpoints.

The harness is the optional package `lm-eval`. `CheckpointLM` answers its three kinds of request
with the model and the tokenizer of a checkpoint; what the tasks are, how they prompt and how they
are scored is the harness's.

Shape legend: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from data.errors import DataError
from data.text.tokenizers import StreamDecoder

from ..errors import ConfigError
from ..models.sampling import generate
from ..tasks.language_modeling import LanguageModeling
from .arguments import Parser, find_device, number, write_json
from .generate import load_task

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

try:
    from lm_eval.api.model import LM
except ImportError:  # `main` says so, and --help works without
    LM = object

MAX_NEW_TOKENS = 256
"""What a generation task that sets no `max_gen_toks` gets, as in the harness's own models."""


class CheckpointLM(LM):
    """A language model as the harness sees it: texts in, log-likelihoods (nats) and texts out.

    Log-likelihoods are of the whole vocabulary, as in training. A text starts after the tokenizer's
    end-of-text token, or after a line feed where it has none. A text longer than `context` is cut
    into windows that predict each token once, the last one with full context.

    Args:
        task: a language model with its tokenizer, as `app.generate.load_task` gives it.
        batch_size: windows in one forward pass.
    """

    def __init__(self, task: LanguageModeling, batch_size: int = 8) -> None:
        super().__init__()
        self.task, self.tokenizer, self.batch_size = task, task.tokenizer, batch_size
        longest = task.network.max_length
        self.context = min(longest, task.block_size or longest)
        end = self.tokenizer.end_of_text
        self.start = self.tokenizer.encode("\n").tolist()[-1:] if end is None else [end]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """For each (context, continuation): log p(continuation | context), and whether greedy
        decoding gives the continuation."""
        pairs = [self._encode_pair(*request.args) for request in requests]
        scores = self._score([(before + after, len(before)) for before, after in pairs])
        for request, score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, score)
        return scores

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """For each (text,): log p(text), each text on its own."""
        ids = [self.tokenizer.encode(request.args[0]).tolist() for request in requests]
        scores = [total for total, _ in self._score([(self.start + each, 1) for each in ids])]
        for request, score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, score)
        return scores

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """For each (context, settings): the continuation up to the first of the texts `until`.

        Greedy unless `do_sample` is set; `temperature`, `top_k`, `top_p` and `max_gen_toks` are
        followed, other settings have no meaning here.
        """
        texts = [self._generate(*request.args) for request in requests]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _encode_pair(self, before: str, after: str) -> tuple[list[int], list[int]]:
        """Ids of a context and its continuation, split where the context's own tokens end.

        Spaces at the context's end go with the continuation: they are part of its first word.
        """
        bare = before.rstrip()
        before, after = bare, before[len(bare) :] + after
        if not before:
            return self.start, self.tokenizer.encode(after).tolist()
        context = self.tokenizer.encode(before).tolist()
        whole = self.tokenizer.encode(before + after).tolist()
        if len(whole) <= len(context):  # a merge across the border has swallowed the continuation
            return context, self.tokenizer.encode(after).tolist()
        return whole[: len(context)], whole[len(context) :]

    @torch.inference_mode()
    def _score(self, texts: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Log-likelihood of the ids from a position on, and whether each is the most probable.

        Args:
            texts: (ids, position of the first id to score, at least 1).
        """
        totals, greedy = [0.0] * len(texts), [True] * len(texts)
        jobs = [
            (index, ids[begin : end - 1], ids[first:end])
            for index, (ids, start) in enumerate(texts)
            for begin, first, end in windows(len(ids), start, self.context)
        ]
        jobs.sort(key=lambda job: -len(job[1]))  # windows of about one length share a batch
        for at in range(0, len(jobs), self.batch_size):
            batch = jobs[at : at + self.batch_size]
            logits_BSV = self._logits([read for _, read, _ in batch])
            for logits_SV, (index, read, wanted) in zip(logits_BSV, batch, strict=True):
                log_p_SV = logits_SV[len(read) - len(wanted) : len(read)].float().log_softmax(-1)
                wanted_S = torch.tensor(wanted, device=log_p_SV.device)
                totals[index] += log_p_SV.gather(1, wanted_S[:, None]).double().sum().item()
                greedy[index] &= bool((log_p_SV.argmax(1) == wanted_S).all())
        return list(zip(totals, greedy, strict=True))

    def _logits(self, ids: list[list[int]]) -> Tensor:
        """Logits [B, S, V]; shorter sequences are filled up behind their end, where causality
        keeps the filling from every real token."""
        tokens_BS = torch.zeros(len(ids), max(map(len, ids)), dtype=torch.long)
        for row_S, each in zip(tokens_BS, ids, strict=True):
            row_S[: len(each)] = torch.tensor(each)
        return self.task.network(tokens_BS.to(self.task.device))

    def _generate(self, prompt: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        sampled = settings.get("do_sample", False)
        ids = self.tokenizer.encode(prompt).tolist() or self.start
        tokens = generate(
            self.task.network,
            ids,
            settings.get("max_gen_toks", MAX_NEW_TOKENS),
            temperature=settings.get("temperature", 1.0) if sampled else 0,
            top_k=settings.get("top_k"),
            top_p=settings.get("top_p"),
            stop=self.tokenizer.end_of_text,
            vocab_size=self.tokenizer.vocab_size,
            context=self.context,
        )
        decoder, text = StreamDecoder(self.tokenizer, ids), ""
        for token in tokens:
            text += decoder.feed(token)
            if any(stop in text for stop in until):
                break
        else:
            text += decoder.flush()
        ends = [text.find(stop) for stop in until if stop in text]
        return text[: min(ends)] if ends else text


def windows(length: int, start: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Cuts a sequence so that the ids from `start` on are each predicted once.

    Args:
        length: number of ids.
        start: first id to predict, at least 1.
        context: ids that the model may read at once.

    Yields:
        (begin, first, end): read the ids `begin` to `end` - 2, score `first` to `end` - 1.
    """
    while start < length:
        end = min(length, start + context)
        yield max(0, end - 1 - context), start, end
        start = end


def main(argv: Sequence[str]) -> int:
    """Prints the harness's table of results for a checkpoint.

    Returns:
        0; 2 after a mistake of the user's, told in one line on standard error.
    """
    options = _parser().parse_args(list(argv))
    try:
        if LM is object:
            raise ConfigError("evaluate needs the lm-eval package: pip install -e .[eval]")
        device = find_device(options.device)
        lm = CheckpointLM(load_task(options.ckpt_path).to(device), options.batch_size)
        results = _evaluate(lm, options)
        if options.json:
            write_json(options.json, {"ckpt_path": str(options.ckpt_path)} | _plain(results))
    except (ConfigError, DataError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def _evaluate(lm: CheckpointLM, options: argparse.Namespace) -> dict[str, Any]:
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.utils import make_table

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names = [name for name in options.tasks.split(",") if name]
    manager = _task_manager(names, options.include_path)
    try:
        results = simple_evaluate(
            lm,
            tasks=names,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=1000,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:  # its data can't be had
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"tasks: cannot run {options.tasks} ({type(error).__name__}: {reason}); check the "
            "task's file, its data and the network"
        ) from error
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))
    return results


def _task_manager(names: list[str], include_path: Path | None) -> Any:
    """The tasks of a folder; with those of the harness where the folder lacks one, as reading
    its thousands of files takes seconds."""
    from lm_eval.tasks import TaskManager

    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"include_path: there is no folder {include_path}")
    if include_path is not None:
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if all(manager.match_tasks([name]) for name in names):
            return manager
    manager = TaskManager(include_path=include_path)
    missing = [name for name in names if not manager.match_tasks([name])]
    if missing or not names:
        raise ConfigError(
            f"tasks: the harness has no task {missing[0] if missing else ''!r}; see `lm_eval ls "
            "tasks`, or name the folder of your own task files with --include_path"
        )
    return manager


def _plain(results: dict[str, Any]) -> dict[str, Any]:
    """What of the harness's results a file keeps; a standard error that it has not is a text."""
    kept = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
    return {key: results[key] for key in kept if key in results}


def _parser() -> Parser:
    parser = Parser(
        prog="python -m app evaluate",
        description="Run tasks of the lm-evaluation-harness on a language model's checkpoint.",
    )
    add = parser.add_argument
    add("--ckpt_path", required=True, type=Path, help="checkpoint of a language model")
    add("--tasks", required=True, help="names of tasks or groups, with commas between")
    add("--include_path", type=Path, metavar="DIR", help="folder of your own task files")
    add("--num_fewshot", type=number(int, 0), help="worked examples, in place of the task's own")
    add("--limit", type=number(int, 1), help="examples of each task at most, for a quick look")
    add("--batch_size", type=number(int, 1), default=8, help="sequences in one forward pass")
    add("--device", default="auto", help="cpu, cuda, or auto for a GPU where there is one")
    add("--json", type=Path, metavar="FILE", help="also write the results to this file")
    return parser
