"""Causal language modelling."""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torchmetrics import MeanMetric

from ..errors import ConfigError
from ..models.sampling import generate
from .base import MoETask
from .samples import TextSamples, spread


class LanguageModeling(MoETask):
    """Next-token cross-entropy; perplexity and bits per byte.

    A batch is LongTensor [B, S + 1]: `batch[:, :-1]` is read, `batch[:, 1:]` predicted; -100 marks
    places that are no token. Logged losses are the cross-entropy alone, in nats per token: the
    auxiliary losses are added for the gradient only. `val/perplexity` is its exponential;
    `val/bits_per_byte` divides it by ln 2 and the bytes per token of the text, and so compares
    tokenizers.

    The checkpoint carries the tokenizer, so that text can be generated from it alone.

    Args:
        network: maps token ids (B, S) to logits (B, S, V); has `vocab_size` and `max_length`.
        optimizer: optimizer class; weight decay applies to matrices only.
        schedule: `cosine` down to 1 % of the learning rate, or `constant`; both after `warmup`.
        warmup: share of all optimizer steps over which the learning rate rises linearly.
        losses: weights of auxiliary losses, by name, summed over the MoE layers.
        balance_over: what the load of the load-balance loss is counted over: the `batch` of one
            process, the batches of all `ranks`, or all micro-batches of a `step` on all ranks.
        sample_prompt: what the text printed at the end of training starts with.
        sample_tokens: how many tokens of it to generate; 0 for no such text.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        schedule: Literal["cosine", "constant"] = "cosine",
        warmup: float = 0.05,
        losses: dict[str, float] | None = None,
        balance_over: Literal["batch", "ranks", "step"] = "batch",
        sample_prompt: str = "The ",
        sample_tokens: int = 300,
    ) -> None:
        super().__init__(network, optimizer, schedule, warmup, losses, balance_over)
        self.sample_prompt, self.sample_tokens = sample_prompt, sample_tokens
        self.eval_loss = nn.ModuleDict({"val_loss": MeanMetric(), "test_loss": MeanMetric()})
        self.tokenizer: Any = None
        self.block_size: int | None = None
        self._tokens, self._since = 0, 0.0

    def setup(self, stage: str) -> None:
        """Checks that network and data agree on the tokens and the length of a sequence."""
        data = getattr(self.trainer, "datamodule", None)
        self.tokenizer = getattr(data, "tokenizer", None)
        self.block_size = getattr(data, "block_size", None)
        if self.tokenizer is not None and self.tokenizer.vocab_size > self.network.vocab_size:
            raise ConfigError(
                f"model.network.vocab_size is {self.network.vocab_size} but the tokenizer has "
                f"{self.tokenizer.vocab_size} tokens; set vocab_size: {self.tokenizer.vocab_size}"
            )
        if self.block_size is not None and self.block_size > self.network.max_length:
            raise ConfigError(
                f"model.network.max_length is {self.network.max_length} but data.block_size is "
                f"{self.block_size}; set max_length: {self.block_size}"
            )

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Token ids (B, S) to logits (B, S, V)."""
        return self.network(tokens_BS)

    def _loss(self, batch: Tensor) -> Tensor:
        # A place that is no token is read as token 0: causality keeps it from all real ones.
        logits_BSV = self(batch[:, :-1].clamp_min(0))
        return F.cross_entropy(logits_BSV.flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        self._log_throughput(batch[:, 1:].numel() * self.trainer.world_size)
        return loss + self.auxiliary_loss(batch_idx)

    def _log_throughput(self, tokens: int) -> None:
        """Tokens per second over all processes, as a mean over a second or more."""
        self._tokens += tokens
        elapsed = time.perf_counter() - self._since
        if elapsed >= 1.0:
            self.log("tokens_per_second", self._tokens / elapsed, prog_bar=True)
            self._start_clock()

    def _start_clock(self) -> None:
        self._tokens, self._since = 0, time.perf_counter()

    def on_train_start(self) -> None:  # a run resumed within an epoch has no epoch start
        super().on_train_start()
        self._start_clock()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._start_clock()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, split: str, batch: Tensor) -> None:
        # Weighted by its tokens: the mean over the text does not depend on how it was batched.
        self.eval_loss[f"{split}_loss"].update(self._loss(batch), (batch[:, 1:] >= 0).sum())

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _log_evaluation(self, split: Literal["val", "test"]) -> None:
        metric = self.eval_loss[f"{split}_loss"]
        loss = metric.compute()
        metric.reset()
        values = {"loss": loss, "perplexity": loss.exp()}
        data = getattr(self.trainer, "datamodule", None)
        bytes_per_token = getattr(data, "bytes_per_token", None)
        if bytes_per_token is not None:
            values["bits_per_byte"] = loss / (math.log(2) * bytes_per_token(split))
        for name, value in values.items():
            # The metric has been reduced over the processes already: they all log the same.
            self.log(f"{split}/{name}", value, prog_bar=True, sync_dist=True)

    def samples(self, batch: Tensor, count: int) -> TextSamples:
        """Texts, token by token."""
        rows = spread(len(batch), count)

        def piece(token: int) -> str:
            if self.tokenizer is None or token < 0:
                return str(token) if token >= 0 else ""
            return self.tokenizer.decode([token]) or "␄"  # a special token, as the end of a text

        texts = batch[rows, :-1].tolist()
        return TextSamples(rows, [[piece(token) for token in text] for text in texts])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.tokenizer is not None:
            checkpoint["tokenizer"] = self.tokenizer.to_state()
            checkpoint["block_size"] = self.block_size

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("tokenizer")
        if saved and self.tokenizer and saved["fingerprint"] != self.tokenizer.fingerprint:
            raise ConfigError(
                f"the checkpoint was trained with another tokenizer ({saved['kind']}) than "
                "data.tokenizer gives now; use the same tokenizer and training text"
            )

    def on_fit_end(self) -> None:
        """Prints a text. All processes generate it, as sharded weights need, and one prints."""
        if self.tokenizer is None or not self.sample_tokens:
            return
        prompt = self.tokenizer.encode(self.sample_prompt or "\n")
        tokens = generate(
            self.network,
            prompt,
            self.sample_tokens,
            temperature=0.5,  # a young model's likelier half
            stop=self.tokenizer.end_of_text,
            vocab_size=self.tokenizer.vocab_size,
            context=self.block_size,
        )
        text = self.tokenizer.decode([*prompt, *tokens])
        for block in self.blocks.values():
            block.forget()
        rank_zero_only(print)(f"\n{text}\n")
