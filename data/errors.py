"""The one exception that the user's data can cause, and a check that raises it."""


class DataError(Exception):
    """A mistake in the user's data, paths or data settings.

    Args:
        message: Names the file or key at fault and the fix. Line breaks, which messages of other
            libraries carry, are folded: the command line prints this as one line.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(part.strip() for part in message.splitlines() if part.strip()))


def check_range(low: float, high: float | None = None, /, **settings: float | None) -> None:
    """Refuse settings outside `low` to `high`, both included; None is let through.

    Raises:
        DataError: Names the key, its value and the range.
    """
    for name, value in settings.items():
        if value is not None and not (low <= value and (high is None or value <= high)):
            expected = f"{low} or more" if high is None else f"{low} to {high}"
            raise DataError(f"--data.{name} is {value}; it must be {expected}")
