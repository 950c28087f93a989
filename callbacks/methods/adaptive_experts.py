"""Experts that are born and die while training: DynMoE, arXiv 2405.14297, section 3.2."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from app.moe import MoEBlock
from app.moe.slots import bound_first_step, forget_slot, write_expert

from ..common import RankSums, find_blocks
from .birth_rule import Plan, WindowRecord, plan_window
from .expert_events import ExpertEvents
from .initialization import Birth, ExpertBank, find_strategy


class AdaptiveExperts(L.Callback):
    """Removes experts that no token takes and adds one where tokens find none.

    Per layer, over a recording window of training batches: R_E = tokens that took each expert, and
    R_S = sum of the router's inputs over the tokens that took none. At the window's end experts
    with R_E = 0 are removed, and if any token took none one expert is added with routing vector
    R_S / ||R_S|| and threshold 0. One decision per layer and window, the same on all processes.

    Args:
        initialization: weights of a new expert: `last_removed`, `average`, `weighted_average`,
            `most_activated`, `random`, or the import path of a function of your own.
        window: start and end of the window as fractions of every epoch, snapped to whole optimizer
            steps.
        window_steps: [start, end, period] in optimizer steps instead: record steps start to end of
            every period (the authors' DeepSpeed code: [300, 600, 900]).
        every_n_epochs: windows in every n-th epoch only, counted from `first_epoch`.
        first_epoch: first epoch (from 0) with a window.
        last_epoch: last epoch with a window; null for all.
        min_unrouted_fraction: smallest share of tokens without an expert that adds one; 0 is the
            published rule, under which a single token does.
        min_load_fraction: smallest share of tokens that keeps an expert; 0 is the published rule,
            under which a single token does.
        seed: of the `random` initialization.
    """

    def __init__(
        self,
        initialization: str = "weighted_average",
        window: tuple[float, float] = (1 / 3, 2 / 3),
        window_steps: tuple[int, int, int] | None = None,
        every_n_epochs: int = 1,
        first_epoch: int = 0,
        last_epoch: int | None = None,
        min_unrouted_fraction: float = 0.0,
        min_load_fraction: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._strategy = find_strategy(initialization)
        self._keeps_removed = getattr(self._strategy, "keeps_removed", False)
        if not 0.0 <= window[0] < window[1] <= 1.0:
            raise ValueError(f"window must be two rising fractions of an epoch, got {window}")
        if (
            window_steps is not None
            and not 0 <= window_steps[0] < window_steps[1] <= window_steps[2]
        ):
            raise ValueError(f"window_steps must be [start < end <= period], got {window_steps}")
        if every_n_epochs < 1:
            raise ValueError(f"every_n_epochs must be at least 1, got {every_n_epochs}")
        for name, value in (
            ("min_unrouted_fraction", min_unrouted_fraction),
            ("min_load_fraction", min_load_fraction),
        ):
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name} must lie in [0, 1), got {value}")
        self.initialization, self.window, self.window_steps = initialization, window, window_steps
        self.every_n_epochs, self.first_epoch, self.last_epoch = (
            every_n_epochs,
            first_epoch,
            last_epoch,
        )
        self.min_unrouted_fraction = min_unrouted_fraction
        self.min_load_fraction = min_load_fraction
        self.seed = seed
        self.blocks: dict[str, MoEBlock] = {}
        self.records = RankSums()
        self.banks: dict[str, ExpertBank] = {}
        self.event_log = ExpertEvents()
        self.newborn: list[tuple[str, int]] = []
        self.start_counts: dict[str, int] = {}
        self._step_before = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.blocks = find_blocks(self, pl_module)
        for name, block in self.blocks.items():
            reason = block.router.why_not_adaptive
            if reason:
                raise MisconfigurationException(
                    f"AdaptiveExperts can't be combined with the router "
                    f"{type(block.router).__name__} of {name}: {reason}"
                )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, block in self.blocks.items():
            self.start_counts.setdefault(name, len(block.active_slots()))
            bank = self.banks.setdefault(name, ExpertBank())  # or as restored from a checkpoint
            if self._keeps_removed:
                bank.fill(block)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.window_steps is None and trainer.num_training_batches == math.inf:
            raise MisconfigurationException(
                "AdaptiveExperts.window is a share of an epoch and the training data has no known "
                "length: set window_steps"
            )
        self.records.to(pl_module.device)
        if trainer.ckpt_path:  # the table may know events that the checkpoint does not
            self.event_log.write(trainer)

    # ------------------------------------------------------------------ the window

    def _window_batches(self, trainer: L.Trainer) -> tuple[int, int]:
        """First batch of the window and the one after its last, in whole optimizer steps."""
        batches, every = int(trainer.num_training_batches), trainer.accumulate_grad_batches
        start = int(batches * self.window[0]) // every * every
        end = max(start + 1, int(batches * self.window[1]))
        return start, min(batches, math.ceil(end / every) * every)

    def _epoch_counts(self, epoch: int) -> bool:
        past = epoch - self.first_epoch
        last = math.inf if self.last_epoch is None else self.last_epoch
        return past >= 0 and epoch <= last and past % self.every_n_epochs == 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step_before = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self._epoch_counts(trainer.current_epoch):
            self.records.clear()  # of a window that the end of an epoch cut off
            return
        if self.window_steps is not None:
            start, end, period = self.window_steps
            recording = start <= self._step_before % period < end
            stepped = trainer.global_step > self._step_before
            over = recording and stepped and self._step_before % period == end - 1
        else:
            start, end = self._window_batches(trainer)
            recording = start <= batch_idx < end
            over = batch_idx == end - 1
        if recording:
            self._record()
        if over:
            self._decide(trainer, pl_module)

    def _record(self) -> None:
        for name, block in self.blocks.items():
            self.records.add(name, *WindowRecord.of(block.routing).tensors())

    # ------------------------------------------------------------------ the decision

    def _decide(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        before = len(self.event_log.rows)
        for name, sums in self.records.take().items():
            record, active_E = WindowRecord(*sums), self.blocks[name].active_E
            plan = plan_window(record, active_E, self.min_unrouted_fraction, self.min_load_fraction)
            self._carry_out(trainer, module, name, record, plan)
        if len(self.event_log.rows) > before:
            active = {name: len(block.active_slots()) for name, block in self.blocks.items()}
            self.event_log.publish(trainer, self.event_log.rows[before:], active)

    def _carry_out(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        name: str,
        record: WindowRecord,
        plan: Plan,
    ) -> None:
        block, bank, load = self.blocks[name], self.banks[name], record.load_E.tolist()
        unrouted, tokens = (int(value) for value in record.counts.tolist())

        def note(event: str, slot: int | None, reason: str, **more: str) -> None:
            self.event_log.note(
                step=trainer.global_step,
                epoch=trainer.current_epoch,
                layer=name,
                event=event,
                slot="" if slot is None else slot,
                reason=reason,
                tokens=tokens,
                expert_tokens="" if slot is None else int(load[slot]),
                unrouted_tokens=unrouted,
                active_experts=len(block.active_slots()),
                **more,
            )

        for slot in plan.deaths:
            if self._keeps_removed:
                bank.discard(block, slot, trainer.global_step)
            block.deactivate(slot)
            self.newborn = [each for each in self.newborn if each != (name, slot)]
            note("death", slot, "no token took it" if not load[slot] else "too few tokens took it")
        if plan.kept is not None:
            note("refusal", plan.kept, "the last expert is never removed")
        if plan.refusal is not None:
            note("refusal", None, f"no birth: {plan.refusal}")
        if plan.birth:
            slot, source = self._give_birth(trainer, module, name, record)
            note(
                "birth",
                slot,
                "tokens took no expert",
                initialization=self.initialization,
                source=source,
            )

    def _give_birth(
        self, trainer: L.Trainer, module: L.LightningModule, name: str, record: WindowRecord
    ) -> tuple[int, str]:
        block, bank = self.blocks[name], self.banks[name]
        slot = bank.next_slot() if self._keeps_removed else block.free_slots()[0]
        key = f"{self.seed}/{name}/{slot}/{trainer.global_step}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        birth = Birth(block, slot, record.load_E, bank, generator)
        weights, source = self._strategy(birth)
        write_expert(block, slot, weights)
        block.router.aim(slot, record.unrouted_D / record.unrouted_D.norm())
        block.activate(slot)
        for optimizer in trainer.optimizers:
            forget_slot(optimizer, block, slot)
        self.newborn.append((name, slot))
        return slot, source

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        if self.newborn:
            self.newborn = [
                (name, slot)
                for name, slot in self.newborn
                if not bound_first_step(optimizer, self.blocks[name], slot)
            ]

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened since the run's first step, in rows of expert_events.csv."""
        return self.event_log.rows

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            active = {name: len(block.active_slots()) for name, block in self.blocks.items()}
            Console().print(self.event_log.summary(self.start_counts, active))

    # ------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        return {
            "records": self.records.state_dict(),
            "banks": {
                name: {"discarded": bank.discarded, "unused": bank.unused}
                for name, bank in self.banks.items()
            },
            "events": self.events,
            "newborn": [list(each) for each in self.newborn],
            "start_counts": self.start_counts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.records.load_state_dict(state["records"])
        self.banks = {name: ExpertBank(**bank) for name, bank in state["banks"].items()}
        self.event_log.rows = list(state["events"])
        self.newborn = [(name, slot) for name, slot in state["newborn"]]
        self.start_counts = dict(state["start_counts"])
