"""The load of every expert over a whole run, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class RoutingHistory:
    """One layer's loads, interval after interval.

    When there are `limit` of them, each two neighbours become one, and from then on each is made
    of twice as many: a run of any length is kept as `limit` / 2 to `limit` equal intervals.

    Attributes:
        limit: intervals to keep at most; even.
        stride: how many additions an interval is made of.
        added: how many the last one has.
        steps: optimizer step at which each interval ended, ascending.
        loads: float32 (E,), tokens that took each slot in each interval.
        active: bool (E,), the slots in use at each interval's end.
    """

    limit: int = 200
    stride: int = 1
    added: int = 0
    steps: list[int] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)
    active: list[Tensor] = field(default_factory=list)

    def add(self, step: int, load_E: Tensor, active_E: Tensor) -> None:
        """Adds the loads since the last addition."""
        if self.steps and self.added < self.stride:
            self.added += 1
            self.steps[-1], self.active[-1] = step, active_E.bool()
            self.loads[-1] = self.loads[-1] + load_E.float()
            return
        if len(self.steps) == self.limit:
            pairs = zip(self.loads[::2], self.loads[1::2], strict=True)
            self.loads = [first + second for first, second in pairs]
            self.steps, self.active = self.steps[1::2], self.active[1::2]
            self.stride *= 2
        self.added = 1
        self.steps.append(step)
        self.loads.append(load_E.float())
        self.active.append(active_E.bool())

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain numbers and two tensors."""
        return {
            "stride": self.stride,
            "added": self.added,
            "steps": list(self.steps),
            "loads": torch.stack(self.loads) if self.loads else torch.zeros(0),
            "active": torch.stack(self.active) if self.active else torch.zeros(0),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> RoutingHistory:
        """What `state_dict` returned."""
        lists = {name: list(state[name]) for name in ("steps", "loads", "active")}
        return cls(stride=state["stride"], added=state["added"], **lists)
