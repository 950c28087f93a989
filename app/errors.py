"""What ends a run with one line, as opposed to faults of the program."""

from __future__ import annotations

from collections.abc import Iterator


def causes(error: BaseException | None, hidden: bool = False) -> Iterator[BaseException]:
    """An error, what caused it, and so on; each once, as chains may have cycles.

    Args:
        hidden: whether to look behind `raise ... from None` too.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        shown = hidden or not error.__suppress_context__
        error = error.__cause__ or (error.__context__ if shown else None)


class ConfigError(Exception):
    """A setting, file or combination that can't work: one line that names it and the fix.

    The command line prints the line and exits with status 2.
    """


class DivergedError(Exception):
    """Numbers that stopped being finite: no mistake of the command line, and no fault.

    The command line prints the line and exits with status 1.
    """
