"""Files are written whole: a reader, a kill or a full disk never leaves half of one."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Lets `write` fill a temporary file beside `path`, which then takes its place.

    Makes the folder. What was at `path` stays as it was if anything fails.

    Args:
        path: of the file; a pipe or a terminal, as /dev/stdout, is written to directly.
        write: takes the path to write to.

    Raises:
        OSError: if the disk does not let it.
    """
    if path.exists() and not path.is_file():
        write(path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")  # one name: kills don't pile up files
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a whole text in UTF-8."""
    write_whole(path, lambda file: file.write_text(text, encoding="utf-8"))


def write_csv(path: Path, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Writes a whole table; cells that a row lacks stay empty. No rows: no file."""
    if not rows:
        path.unlink(missing_ok=True)
        return

    def write(file: Path) -> None:
        with file.open("w", newline="", encoding="utf-8") as text:
            writer = csv.DictWriter(text, columns, restval="")
            writer.writeheader()
            writer.writerows(rows)

    write_whole(path, write)
