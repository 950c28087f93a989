"""Figures that others published, and what they have to do with a section's runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .summary import Group, Section

FILE = Path(__file__).with_name("published.yaml")


@dataclass(frozen=True)
class Table:
    """A published table.

    Attributes:
        epochs: of the columns.
        rows: `method`, `label`, `k` (experts per token) and `accuracy` in %, a value an epoch.
    """

    title: str
    source: str
    about: str
    data: str
    network: dict[str, int]
    epochs: list[int]
    rows: list[dict[str, Any]]

    def same_network(self, section: Section) -> bool:
        """Whether the section's networks have the published width, depth and MoE layers."""
        networks = [group.runs[0].network for group in section.groups]
        sizes = [(n["dim"], n["depth"]) for n in networks]
        return all(size == (self.network["dim"], self.network["depth"]) for size in sizes)

    def row(self, group: Group) -> dict[str, Any] | None:
        """The published row of a group's method."""
        return next((row for row in self.rows if row["method"] == group.method.label), None)

    def differences(self, section: Section) -> str:
        """What sets the section's runs apart from the published ones, in words."""
        runs = [run for group in section.groups for run in group.runs]
        lengths = sorted({run.end.epochs for run in runs if run.end.epochs})
        parts = []
        if not self.same_network(section):
            network = runs[0].network
            parts.append(
                f"here {network['depth']} blocks of width {network['dim']}, there "
                f"{self.network['depth']} of width {self.network['dim']}"
            )
        if lengths and lengths != [self.epochs[-1]]:
            parts.append(
                f"here {' or '.join(map(str, lengths))} epochs, there {self.epochs[-1]} (with a "
                "schedule that ends after so many epochs, equal epochs do not compare)"
            )
        parts.append("the published recipe is not known, so it can't be the same")
        return "; ".join(parts)


@cache
def tables() -> tuple[Table, ...]:
    """All published tables."""
    return tuple(Table(**each) for each in yaml.safe_load(FILE.read_text(encoding="utf-8")))


def tables_for(section: Section) -> Iterator[Table]:
    """The published tables of a section's data that share a method with it."""
    for table in tables():
        here = {run.data for group in section.groups for run in group.runs}
        if here == {table.data} and section.percent and any(map(table.row, section.groups)):
            yield table
