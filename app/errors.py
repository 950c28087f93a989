"""What ends a run with one line, as opposed to faults of the program."""


class ConfigError(Exception):
    """A setting, file or combination that can't work: one line that names it and the fix.

    The command line prints the line and exits with status 2.
    """


class DivergedError(Exception):
    """Numbers that stopped being finite: no mistake of the command line, and no fault.

    The command line prints the line and exits with status 1.
    """
