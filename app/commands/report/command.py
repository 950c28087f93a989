"""The command line of `python -m app report`."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from ...errors import ConfigError
from ...files import write_csv, write_text
from ..arguments import Parser, number, write_json
from .content import as_data, as_table, main_table, part
from .page import to_html, to_markdown
from .runs import Run, find_runs
from .summary import Section, sections

BEGIN, FINISH = "<!-- report: begin -->", "<!-- report: end -->"
COPIED = ("metrics.csv", "expert_events.csv")


def main(argv: Sequence[str]) -> int:
    """Writes a report of runs.

    Returns:
        0, also where some of the runs could not be read (a line on standard error each).

    Raises:
        ConfigError: if none of them could be read, or a file can't be written.
    """
    options = _parser().parse_args(list(argv))
    runs, problems = find_runs(options.run, options.runs)
    made, more = sections(runs, options.epochs)
    problems += more
    for line in problems:
        print(f"note: {line}", file=sys.stderr)
    if not runs:
        raise ConfigError("report: none of these could be read; give folders of runs")
    try:
        if options.copy:
            _copy(runs, options.copy)
        options.out.mkdir(parents=True, exist_ok=True)
        parts = [part(section, options.out) for section in made]
        content = {"runs": runs, "problems": problems, "parts": parts}
        markdown = options.markdown or options.out / "report.md"
        own = not options.markdown  # the page has a title of its own
        _write_markdown(markdown, to_markdown(content, markdown.parent, title=own), not own)
        html = options.out / "report.html"
        write_text(html, to_html(content, options.out))
        rows = as_table(made)
        columns = dict.fromkeys(key for row in rows for key in row)
        write_csv(options.out / "table.csv", rows, list(columns))
    except OSError as error:
        raise ConfigError(f"out: cannot write {error.filename} ({error.strerror})") from error
    if options.json:
        write_json(options.json, as_data(made, runs, problems))
    for section in made:
        _show(section)
    print(f"wrote {markdown}, {html} and {options.out / 'table.csv'}")
    return 0


def _write_markdown(path: Path, text: str, between_marks: bool) -> None:
    """Writes the page, or the part of an existing page that is between the two marks."""
    text = f"{BEGIN}\n{text}{FINISH}\n" if between_marks else text
    if between_marks and path.exists():
        before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        _, finish, after = rest.partition(FINISH)
        if not begin or not finish:
            raise ConfigError(
                f"markdown: {path} exists and does not say where the report goes; put the lines "
                f"{BEGIN} and {FINISH} into it"
            )
        text = before + text.rstrip("\n") + after
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _copy(runs: Sequence[Run], folder: Path) -> None:
    """Copies what a report is made from, without what tells of the machine: its paths."""
    for run in runs:
        target = folder / run.name
        if target.resolve() == run.folder.resolve():
            continue
        target.mkdir(parents=True, exist_ok=True)
        for name in COPIED:
            if (run.folder / name).is_file():
                shutil.copyfile(run.folder / name, target / name)
        config = run.config | {"runs": "runs", "ckpt_path": None}
        arguments = (config.get("data") or {}).get("init_args") or {}
        for key in ("root", "files"):
            if arguments.get(key):
                name = Path(str(arguments[key])).name
                config["data"] = config["data"] | {"init_args": arguments | {key: name}}
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        (target / "config.yaml").write_text(text, encoding="utf-8")


def _show(section: Section) -> None:
    grid = main_table(section)
    table = Table(title=section.title, title_justify="left")
    for place, name in enumerate(grid.columns):
        table.add_column(name, justify="right" if place else "left", overflow="fold")
    for row in grid.to_numpy().tolist():
        table.add_row(*row)
    # A table in a file is not to be folded to the width of a terminal that is not there.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m app report",
        formatter_class=argparse.HelpFormatter,
        description="A report of runs from their folders alone, finished or not: tables of means "
        "over seeds, convergence, accuracy against compute, experts over time. Writes report.md, "
        "report.html (one file, pictures included), table.csv and PNGs.",
    )
    add = parser.add_argument
    add("run", nargs="+", metavar="RUN", help="run folder, folder of runs (a suite), or run name")
    add("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where names are (runs)")
    add("--out", type=Path, default=Path("report"), metavar="DIR", help="output folder (report)")
    add("--epochs", type=number(int, 1), nargs="+", metavar="N",
        help="epochs of the table (five, spread as 10 50 100 150 200 are over 200)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    add("--markdown", type=Path, metavar="FILE",
        help="write the Markdown here; of an existing file, only what is between its lines "
        f"{BEGIN} and {FINISH} is replaced")  # fmt: skip
    add("--copy", type=Path, metavar="DIR",
        help="keep the small files that a report is made from here, as DIR/NAME")  # fmt: skip
    return parser
