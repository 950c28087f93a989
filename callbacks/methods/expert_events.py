"""What happened to experts, as a table, as text and curves in TensorBoard, and as a summary."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from rich.table import Table

from app.files import write_csv

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
FILE = "expert_events.csv"
KINDS = ("birth", "death", "refusal")


class ExpertEvents:
    """The events of a run, in the order in which they happened.

    Attributes:
        rows: of expert_events.csv, by column.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def note(self, **values: Any) -> None:
        """Adds an event; columns that it lacks stay empty."""
        self.rows.append(dict.fromkeys(COLUMNS, "") | values)

    def publish(
        self, trainer: L.Trainer, new: Sequence[dict[str, Any]], active: Mapping[str, int]
    ) -> None:
        """Writes the table, and tells the loggers of new events.

        Args:
            trainer: whose step it is; all processes have to call.
            new: the events.
            active: number of experts after them, by layer.
        """
        self.write(trainer)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            for layer in dict.fromkeys(event["layer"] for event in new):
                counts = {f"{kind}s": self._count(layer, kind) for kind in KINDS}
                counts["active"] = active[layer]
                tags = {f"experts/{layer}/{key}": float(v) for key, v in counts.items()}
                logger.log_metrics(tags, step=trainer.global_step)
            add_text = getattr(logger.experiment, "add_text", None)
            for event in new if add_text else ():
                add_text(f"experts/{event['layer']}", sentence(event), trainer.global_step)

    def write(self, trainer: L.Trainer) -> None:
        """Writes expert_events.csv into the run's folder, if the run has one."""
        folder = trainer.log_dir  # a broadcast: all processes have to ask
        if trainer.is_global_zero and trainer.loggers:
            write_csv(Path(folder) / FILE, self.rows, COLUMNS)

    def summary(self, start: Mapping[str, int], end: Mapping[str, int]) -> Table:
        """Births, deaths and refusals of each layer, from so many experts to so many."""
        table = Table(title="Experts born and gone", title_justify="left")
        for column in ("layer", "start", "births", "deaths", "refusals", "end", "last event"):
            words = column in ("layer", "last event")
            table.add_column(column, justify="left" if words else "right")
        for layer, count in end.items():
            mine = [event for event in self.rows if event["layer"] == layer]
            counts = (start[layer], *(self._count(layer, kind) for kind in KINDS), count)
            table.add_row(layer, *map(str, counts), sentence(mine[-1]) if mine else "-")
        return table

    def _count(self, layer: str, kind: str) -> int:
        return sum(e["layer"] == layer and e["event"] == kind for e in self.rows)


def sentence(event: Mapping[str, Any]) -> str:
    """One event in words."""
    what = f"{event['event']} of slot {event['slot']}" if event["slot"] != "" else event["event"]
    source = f", {event['source']}" if event["source"] else ""
    return f"step {event['step']}: {what}: {event['reason']}{source}"


def births_and_deaths(folder: Path, layer: str) -> list[dict[str, Any]]:
    """The births and deaths of a layer that a run's table tells of: event, slot and step."""
    path = folder / FILE
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {"event": row["event"], "slot": int(row["slot"]), "step": int(row["step"])}
            for row in csv.DictReader(file)
            if row["layer"] == layer and row["event"] in ("birth", "death")
        ]
