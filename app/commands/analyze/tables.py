"""What `python -m app analyze` prints: tables that stay readable on a narrow terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

BEST = 4  # classes or tokens on the screen for each expert
FREQUENT = 32  # tokens of a text that are frequent enough to tell an expert by
GAP = 2  # spaces between columns


def print_result(result: dict[str, Any], console: Console) -> None:
    """Prints the result as tables, each with a line that says what it shows."""
    of, step = result["affinity"]["of"], result["step"]
    what = "images" if of == "class" else "sequences"
    console.print(
        f"{result['ckpt_path']}\nstep {step}, loss {result['loss']:.4f} on {result['samples']} "
        f"validation {what}\n",
        soft_wrap=True,  # a path stays one word
    )
    if result["saturation"]:
        print_table(
            console,
            f"Router saturation: share of a token's experts of step {step} that it took before "
            "(random: of as many experts at random; random loads: at the loads of before)",
            ("layer", "step", "saturation", "random", "random loads"),
            _saturation_rows(result),
            keys=2,
        )
    with_vectors = any("distance_own" in e for rows in result["experts"].values() for e in rows)
    more = "; own, others: distance of its outputs from its default vector, relative to that, "
    more += "over the tokens that take it and that do not"
    print_table(
        console,
        "Experts (load: share of the tokens that take it; contribution: change of the loss when it "
        f"is masked, and its standard error{more if with_vectors else ''})",
        ("layer", "expert", "load", "contribution", "error")
        + (("own", "others") if with_vectors else ()),
        _expert_rows(result, with_vectors),
        keys=2,
    )
    kind = {"class": "classes", "token": f"{FREQUENT} most frequent tokens"}[of]
    print_table(
        console,
        f"Affinity: of the {kind}, those that take an expert the most, with the share that does",
        ("layer", "expert", *(f"{i + 1}." for i in range(BEST))),
        _affinity_rows(result["affinity"]),
        keys=2,
    )


def _saturation_rows(result: dict[str, Any]) -> list[list[str]]:
    return [
        [layer, str(each["step"])]
        + [_number(each["layers"][layer][key]) for key in ("saturation", "random", "random_loads")]
        for layer in result["experts"]
        for each in result["saturation"]
    ]


def _expert_rows(result: dict[str, Any], with_vectors: bool) -> list[list[str]]:
    shown: dict[str, Callable[[float | None], str]] = {
        "load": _number,
        "contribution": lambda value: _number(value, "+z.5f"),
        "contribution_error": lambda value: _number(value, ".5f"),
    }
    if with_vectors:
        shown |= {"distance_own": _number, "distance_others": _number}
    return [
        [layer, str(expert["expert"])] + [show(expert.get(key)) for key, show in shown.items()]
        for layer, experts in result["experts"].items()
        for expert in experts
    ]


def _affinity_rows(affinity: dict[str, Any]) -> list[list[str]]:
    names, rows = affinity["names"], []
    count = len(names) if affinity["of"] == "class" else min(FREQUENT, len(names))
    for layer, found in affinity["layers"].items():
        for column, expert in enumerate(found["experts"]):
            share = [row[column] for row in found["share"][:count]]
            best = sorted(range(count), key=lambda i: -share[i])[:BEST]
            cells = [f"{_clipped(names[i])} {share[i]:.2f}" if share[i] else "-" for i in best]
            rows.append([layer, str(expert), *cells, *["-"] * (BEST - len(cells))])
    return rows


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else f"{value:{form}}"


def _clipped(name: str) -> str:
    return name if len(name) <= 20 else name[:17] + "..."


def print_table(
    console: Console,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    keys: int,
) -> None:
    """Prints a table; what is too wide goes on in a second one below, and so on.

    No cell is cut or folded, but on a terminal too narrow for the keys and one column more.

    Args:
        console: where to.
        title: a line above it, folded by words.
        header: names of the columns.
        rows: the cells, as texts.
        keys: how many first columns say what a row is; every part repeats them. The first of them
            is left out where it is as in the row above.
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    console.print(title, style="bold")
    left = list(range(keys, len(header)))
    while left:
        part = list(range(keys))
        while left and (
            len(part) == keys
            or sum(widths[i] + GAP for i in (*part, left[0])) - GAP <= console.width
        ):
            part.append(left.pop(0))
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
        for i in part:
            table.add_column(header[i], justify="left" if i == 0 else "right", no_wrap=True)
        for above, row in zip((None, *rows), rows, strict=False):
            again = above is not None and row[0] == above[0]
            table.add_row("" if again else row[0], *(row[i] for i in part[1:]))
        console.print(table)
    console.print()
