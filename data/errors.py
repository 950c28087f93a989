"""The one exception that the user's data can cause, and what raises it."""

from collections.abc import Iterator
from contextlib import contextmanager


class DataError(Exception):
    """A mistake in the user's data, paths or data settings.

    Args:
        message: Names the file or key at fault and the fix. Line breaks, which messages of other
            libraries carry, are folded: the command line prints this as one line.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(part.strip() for part in message.splitlines() if part.strip()))


@contextmanager
def blame(
    what: str, fix: str, kinds: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[None]:
    """Turn errors of these kinds into a DataError `<what> (<error>); <fix>`."""
    try:
        yield
    except DataError:
        raise
    except kinds as error:
        raise DataError(f"{what} ({error}); {fix}") from error


def check_range(low: float, high: float | None = None, /, **settings: float | None) -> None:
    """Refuse settings, other than None, outside `low` to `high`, both included: a DataError."""
    for name, value in settings.items():
        if value is not None and not (low <= value and (high is None or value <= high)):
            expected = f"{low} or more" if high is None else f"{low} to {high}"
            raise DataError(f"--data.{name} is {value}; it must be {expected}")
