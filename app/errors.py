"""Mistakes of the user's, as opposed to faults of the program."""


class ConfigError(Exception):
    """A setting, file or combination that can't work: one line that names it and the fix.

    The command line prints the line and exits with status 2.
    """
