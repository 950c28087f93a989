"""Chains of errors, cycles included: a library that raises what it caught makes one."""

import errno

import pytest

from app.cli.messages import root_cause
from app.errors import causes
from callbacks.common import disk_error


def cycle() -> list[Exception]:
    first, second, third = RuntimeError("a"), OSError(errno.ENOENT, "b"), ValueError("c")
    first.__context__, second.__context__, third.__context__ = second, third, first
    return [first, second, third]


@pytest.mark.timeout(20)
def test_a_cycle_of_causes_ends():
    chain = cycle()
    assert list(causes(chain[0])) == chain
    assert root_cause(chain[0]) is chain[2]
    assert disk_error(chain[0]) is None
    chain[1].errno = errno.ENOSPC
    assert disk_error(chain[0]) is chain[1]


def test_a_suppressed_context_is_no_cause():
    try:
        try:
            raise OSError(errno.ENOSPC, "hidden")
        except OSError:
            raise ValueError("shown") from None
    except ValueError as error:
        assert list(causes(error)) == [error] and root_cause(error) is error
        assert disk_error(error) is error.__context__  # the disk's refusal is looked for everywhere
