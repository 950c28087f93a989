"""`python -m app generate`: continue a text with a trained language model."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.text.tokenizers import StreamDecoder, Tokenizer, tokenizer_from_state

from ..errors import ConfigError
from ..models.sampling import generate
from ..runs.checkpoints import read_checkpoint, rebuild
from ..tasks.language_modeling import LanguageModeling
from .arguments import Parser, find_device, number, write_json


def main(argv: Sequence[str]) -> int:
    """Streams a prompt and its continuation to standard output.

    Returns:
        0; 2 after a mistake of the user's, told in one line on standard error; 130 when stopped by
        Ctrl-C (what was generated until then is kept).
    """
    options = _parser().parse_args(list(argv))
    try:
        task = load_task(options.ckpt_path)
        result = _run(task, options)
        if options.json:
            write_json(options.json, result)
    except (ConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 130 if result["stopped"] == "interrupted" else 0


def load_task(path: str | Path) -> LanguageModeling:
    """A language model with its tokenizer, from a checkpoint alone.

    Args:
        path: a checkpoint written by `python -m app fit`.

    Returns:
        The task in evaluation mode, on the CPU, with `tokenizer` and `block_size` set.

    Raises:
        ConfigError: no such file, no checkpoint of a language model, or a tokenizer that doesn't
            belong to the model.
        DataError: the tokenizer is damaged, or needs a library that is missing.
    """
    path = Path(path)
    checkpoint = read_checkpoint(path)
    state = checkpoint.get("tokenizer")
    if state is None:
        raise ConfigError(
            f"ckpt_path: {path} carries no tokenizer; give a checkpoint of a language model that "
            "`python -m app fit` wrote"
        )
    task = rebuild(path, checkpoint, model=LanguageModeling)["model"]
    task.tokenizer, task.block_size = tokenizer_from_state(state), checkpoint.get("block_size")
    if task.tokenizer.vocab_size > task.network.vocab_size:
        raise ConfigError(
            f"ckpt_path: the tokenizer in {path} has {task.tokenizer.vocab_size} tokens, its model "
            f"only {task.network.vocab_size}; they do not belong together"
        )
    return task.eval()


def _run(task: LanguageModeling, options: argparse.Namespace) -> dict[str, Any]:
    tokenizer, device = task.tokenizer, find_device(options.device)
    task.to(device)
    # A text has to start somewhere: without a prompt, at the start of a line.
    prompt = tokenizer.encode(options.prompt or "\n").tolist()
    context = min(task.network.max_length, task.block_size or task.network.max_length)
    if len(prompt) > context:
        print(
            f"note: the prompt has {len(prompt)} tokens and the model reads {context} at a time; "
            f"the last {context} count",
            file=sys.stderr,
        )
    tokens = generate(
        task.network,
        prompt,
        options.max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=tokenizer.end_of_text,
        vocab_size=tokenizer.vocab_size,
        context=task.block_size,
    )
    start = time.perf_counter()
    pieces, count, stopped = _stream(tokens, tokenizer, prompt, options)
    seconds = time.perf_counter() - start
    settings = ("max_tokens", "temperature", "top_k", "top_p", "seed")
    return {
        "ckpt_path": str(options.ckpt_path),
        "prompt": options.prompt,
        "text": "".join(pieces),
        "tokens": count,
        "stopped": stopped,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(count / seconds, 1),
        **{name: getattr(options, name) for name in settings},
    }


def _stream(
    tokens: Iterator[int], tokenizer: Tokenizer, prompt: list[int], options: argparse.Namespace
) -> tuple[list[str], int, str]:
    """Prints the text while it is made; returns its pieces, the tokens, and why it stopped."""
    decoder = StreamDecoder(tokenizer, prompt)
    pieces: list[str] = []
    count, stopped = 0, "interrupted"
    try:
        _show(options.prompt)
        for token in tokens:
            count += 1
            pieces.append(decoder.feed(token))
            _show(pieces[-1])
        stopped = "max_tokens" if count == options.max_tokens else "end_of_text"
        pieces.append(decoder.flush())
        _show(pieces[-1] + "\n")
    except KeyboardInterrupt:
        print()
    except BrokenPipeError:  # the reader (head, less) has seen enough
        stopped = "closed"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return pieces, count, stopped


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m app generate",
        description="Continue a text with a trained language model.",
    )
    add = parser.add_argument
    add("--ckpt_path", required=True, type=Path, help="checkpoint of a language model")
    add("--prompt", default="", help="text to continue; without it, a new line")
    add("--max_tokens", type=number(int, 1), default=200, help="tokens to generate at most")
    add("--temperature", type=number(float, 0), default=0.8, help="0 takes the likeliest token")
    add("--top_k", type=number(int, 1), help="sample among so many likeliest tokens")
    add("--top_p", type=number(float, 0, 1), help="sample among tokens of so much probability")
    add("--seed", type=number(int, 0), default=0, help="of the sampling")
    add("--device", default="auto", help="cpu, cuda, or auto for a GPU where there is one")
    add("--json", type=Path, metavar="FILE", help="also write the text and figures to this file")
    return parser
