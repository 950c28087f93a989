"""The one exception that the user's data can cause."""


class DataError(Exception):
    """A mistake in the user's data, paths or data settings.

    Args:
        message: Names the file or key at fault and the fix. Line breaks, which messages of other
            libraries carry, are folded: the command line prints this as one line.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(part.strip() for part in message.splitlines() if part.strip()))
