"""Experts that are born and die while training: DynMoE, arXiv 2405.14297, section 3.2."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.table import Table
from torch import Tensor

from app.files import write_csv
from app.moe import MoEBlock, Routing
from app.moe.slots import bound_first_step, forget_slot, read_expert, write_expert

from ..common import (
    find_blocks,
    for_checkpoint,
    from_checkpoint,
    sum_over_ranks,
    widest_float,
)
from .initialization import STRATEGIES, Birth, ExpertBank, on_cpu

COLUMNS = (
    "step",
    "epoch",
    "layer",
    "event",
    "slot",
    "reason",
    "tokens",
    "expert_tokens",
    "unrouted_tokens",
    "active_experts",
    "initialization",
    "source",
)


class WindowRecord:
    """What one layer's router did over a recording window (sums on the device).

    Attributes:
        load_E: R_E, tokens that took each expert.
        unrouted_D: R_S, sum of the router's inputs over tokens that took none.
        counts: number of tokens that took none, number of all tokens.
    """

    def __init__(self, slots: int, dim: int, device: torch.device | str = "cpu") -> None:
        kind = {"dtype": widest_float(device), "device": device}
        self.load_E = torch.zeros(slots, **kind)
        self.unrouted_D = torch.zeros(dim, **kind)
        self.counts = torch.zeros(2, **kind)

    @torch.no_grad()
    def add(self, routing: Routing) -> None:
        """Records one batch."""
        unrouted_T = routing.unrouted_T()
        self.load_E += routing.mask_TE.sum(0)
        self.unrouted_D += unrouted_T.to(routing.features_TD) @ routing.features_TD
        self.counts[0] += unrouted_T.sum()
        self.counts[1] += len(unrouted_T)

    def tensors(self) -> list[Tensor]:
        """All sums, to be reduced over processes or kept in a checkpoint."""
        return [self.load_E, self.unrouted_D, self.counts]

    def move(self, device: torch.device) -> None:
        """Goes on where the routings live."""
        kind = {"dtype": widest_float(device), "device": device}
        self.load_E, self.unrouted_D, self.counts = (each.to(**kind) for each in self.tensors())


@dataclass(frozen=True)
class Plan:
    """The decision for one layer at the end of a window.

    Attributes:
        deaths: slots to be removed, ascending.
        kept: a slot that would have been removed if it were not the last one, or None.
        birth: whether an expert should be added.
        refusal: why it can't be although it should, or None.
    """

    deaths: tuple[int, ...]
    kept: int | None
    birth: bool
    refusal: str | None


def plan_window(
    record: WindowRecord,
    active_E: Tensor,
    min_unrouted_fraction: float = 0.0,
    min_load_fraction: float = 0.0,
) -> Plan:
    """Applies DynMoE's rule to a finished window.

    1. Every active expert with R_E = 0 goes (with `min_load_fraction`: that fewer than this share
       of the tokens took). The last expert stays: the one of largest load, the lowest slot of
       several.
    2. If any token took no expert (and their share reaches `min_unrouted_fraction`), one expert is
       added. That is refused where no slot is free once the deaths are done, or where R_S gives
       no direction.
    """
    unrouted, tokens = record.counts.tolist()
    load, active = record.load_E.tolist(), active_E.nonzero().flatten().tolist()
    if not tokens:
        return Plan((), None, False, None)
    deaths = [e for e in active if load[e] == 0 or load[e] / tokens < min_load_fraction]
    kept = None
    if len(deaths) == len(active):
        kept = max(active, key=lambda e: (load[e], -e))
        deaths.remove(kept)
    wanted = unrouted > 0 and unrouted / tokens >= min_unrouted_fraction
    refusal = None
    if wanted:
        length = float(record.unrouted_D.norm())
        mean_length = length / unrouted
        if len(active) - len(deaths) == len(active_E):
            refusal = "no free slot"
        elif not math.isfinite(length) or mean_length < 1e-6:
            refusal = "the unrouted tokens cancel to zero and give no direction"
    return Plan(tuple(deaths), kept, wanted and refusal is None, refusal)


class AdaptiveExperts(L.Callback):
    """Removes experts that no token takes and adds one where tokens find none.

    Per layer, over a recording window of training batches: R_E = tokens that took each expert, and
    R_S = sum of the router's inputs over the tokens that took none. At the window's end experts
    with R_E = 0 are removed, and if any token took none one expert is added with routing vector
    R_S / ||R_S|| and threshold 0. One decision per layer and window, the same on all processes.

    Args:
        initialization: weights of a new expert: `last_removed`, `average`, `weighted_average`,
            `most_activated` or `random`.
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
        initialization: Literal[
            "last_removed", "average", "weighted_average", "most_activated", "random"
        ] = "weighted_average",
        window: tuple[float, float] = (1 / 3, 2 / 3),
        window_steps: tuple[int, int, int] | None = None,
        every_n_epochs: int = 1,
        first_epoch: int = 0,
        last_epoch: int | None = None,
        min_unrouted_fraction: float = 0.0,
        min_load_fraction: float = 0.0,
        seed: int = 0,
    ) -> None:
        if initialization not in STRATEGIES:
            raise ValueError(
                f"initialization: no strategy {initialization!r}; there are {', '.join(STRATEGIES)}"
            )
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
        self.records: dict[str, WindowRecord] = {}
        self.banks: dict[str, ExpertBank] = {}
        self.events: list[dict[str, Any]] = []
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
            if self.initialization == "last_removed":
                for slot in set(_free_slots(block)) - {e["slot"] for e in bank.discarded}:
                    if slot not in bank.unused:
                        bank.unused[slot] = on_cpu(read_expert(block, slot))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.window_steps is None and trainer.num_training_batches == math.inf:
            raise MisconfigurationException(
                "AdaptiveExperts.window is a share of an epoch and the training data has no known "
                "length: set window_steps"
            )
        for record in self.records.values():  # a checkpoint is read to the CPU
            record.move(pl_module.device)
        if trainer.ckpt_path:  # the table may know events that the checkpoint does not
            self._write_table(trainer)

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
            self.records = {}  # of a window that the end of an epoch cut off
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
            features_TD = block.routing.features_TD
            if name not in self.records:
                self.records[name] = WindowRecord(
                    block.slots, features_TD.shape[1], features_TD.device
                )
            self.records[name].add(block.routing)

    # ------------------------------------------------------------------ the decision

    def _decide(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        before = len(self.events)
        for name, record in self.records.items():
            sum_over_ranks(*record.tensors())
            plan = plan_window(
                record,
                self.blocks[name].active_E,
                self.min_unrouted_fraction,
                self.min_load_fraction,
            )
            self._carry_out(trainer, module, name, record, plan)
        self.records = {}
        if len(self.events) > before:
            self._publish(trainer, self.events[before:])

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
            row = dict.fromkeys(COLUMNS, "") | {
                "step": trainer.global_step,
                "epoch": trainer.current_epoch,
                "layer": name,
                "event": event,
                "slot": "" if slot is None else slot,
                "reason": reason,
                "tokens": tokens,
                "expert_tokens": "" if slot is None else int(load[slot]),
                "unrouted_tokens": unrouted,
                "active_experts": len(block.active_slots()),
            }
            self.events.append(row | more)

        for slot in plan.deaths:
            if self.initialization == "last_removed":
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
        slot = _free_slots(block)[0]
        if self.initialization == "last_removed":
            # The slot of the expert that comes back; else one whose initial weights are known.
            slot = bank.discarded[-1]["slot"] if bank.discarded else min(bank.unused)
        key = f"{self.seed}/{name}/{slot}/{trainer.global_step}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        birth = Birth(block, slot, record.load_E, bank, generator)
        weights, source = STRATEGIES[self.initialization](birth)
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

    # ------------------------------------------------------------------ what is told of it

    def _publish(self, trainer: L.Trainer, events: list[dict[str, Any]]) -> None:
        self._write_table(trainer)
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            for layer in dict.fromkeys(event["layer"] for event in events):
                counts = {
                    f"experts/{layer}/{kind}s": float(self._count(layer, kind))
                    for kind in ("birth", "death", "refusal")
                }
                counts[f"experts/{layer}/active"] = float(len(self.blocks[layer].active_slots()))
                logger.log_metrics(counts, step=trainer.global_step)
            add_text = getattr(logger.experiment, "add_text", None)
            if add_text is not None:
                for event in events:
                    add_text(f"experts/{event['layer']}", _sentence(event), trainer.global_step)

    def _write_table(self, trainer: L.Trainer) -> None:
        folder = trainer.log_dir  # a broadcast: all processes have to ask
        if trainer.is_global_zero and trainer.loggers:
            write_csv(Path(folder) / "expert_events.csv", self.events, COLUMNS)

    def _count(self, layer: str, kind: str) -> int:
        return sum(e["layer"] == layer and e["event"] == kind for e in self.events)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        table = Table(title="Experts born and gone", title_justify="left")
        for column in ("layer", "start", "births", "deaths", "refusals", "end", "last event"):
            table.add_column(
                column, justify="left" if column in ("layer", "last event") else "right"
            )
        for name, block in self.blocks.items():
            mine = [event for event in self.events if event["layer"] == name]
            table.add_row(
                name,
                str(self.start_counts[name]),
                *(str(self._count(name, kind)) for kind in ("birth", "death", "refusal")),
                str(len(block.active_slots())),
                _sentence(mine[-1]) if mine else "-",
            )
        Console().print(table)

    # ------------------------------------------------------------------ resuming

    def state_dict(self) -> dict[str, Any]:
        return {
            "records": {
                name: for_checkpoint(*record.tensors()) for name, record in self.records.items()
            },
            "banks": {
                name: {"discarded": bank.discarded, "unused": bank.unused}
                for name, bank in self.banks.items()
            },
            "events": self.events,
            "newborn": [list(each) for each in self.newborn],
            "start_counts": self.start_counts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, (load_E, unrouted_D, counts) in state["records"].items():
            self.records[name] = WindowRecord(len(load_E), len(unrouted_D), load_E.device)
            for tensor, saved in zip(
                self.records[name].tensors(),
                from_checkpoint(load_E, unrouted_D, counts),
                strict=True,
            ):
                tensor.copy_(saved)
        self.banks = {name: ExpertBank(**bank) for name, bank in state["banks"].items()}
        self.events = list(state["events"])
        self.newborn = [(name, slot) for name, slot in state["newborn"]]
        self.start_counts = dict(state["start_counts"])


def _free_slots(block: MoEBlock) -> list[int]:
    return (~block.active_E).nonzero().flatten().tolist()


def _sentence(event: dict[str, Any]) -> str:
    """One event in words."""
    what = f"{event['event']} of slot {event['slot']}" if event["slot"] != "" else event["event"]
    source = f", {event['source']}" if event["source"] else ""
    return f"step {event['step']}: {what}: {event['reason']}{source}"
