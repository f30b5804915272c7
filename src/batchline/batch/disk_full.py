"""Distinguishes a full disk from other errors while the input is read.

Reading an input also writes: staged copies, indexes, keys. If that fails for lack of space, the input is fine, and the
same command works once there is space.
"""

from __future__ import annotations

import errno

from batchline.errors import BatchlineError, InputUnreadable, RunFailed

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_disk_full(exc: BaseException) -> bool:
    """Whether the exception says that the disk is full."""
    return isinstance(exc, OSError) and exc.errno in _FULL


def input_failure(location: str, exc: OSError) -> BatchlineError:
    """What to raise for an error while an input was read into working files. location: as messages show it."""
    reason = exc.strerror or str(exc)
    if is_disk_full(exc):
        return RunFailed(f"The working files cannot be written: {reason}.")
    return InputUnreadable(location, f"{reason}.")
