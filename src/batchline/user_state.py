"""The user's state folder: small records that outlive a run, such as which runs are finished.

A record is a convenience. One that is missing, damaged or cannot be written costs time, never a result.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from platformdirs import user_state_path

from batchline.disk import whole_file

STATE_DIR_VARIABLE = "BATCHLINE_STATE_DIR"


def user_state_dir() -> Path | None:
    """`$BATCHLINE_STATE_DIR`, or the platform's folder for a program's state; None for a user without a home folder."""
    if os.environ.get(STATE_DIR_VARIABLE):
        return Path(os.environ[STATE_DIR_VARIABLE])
    try:
        return user_state_path("batchline", appauthor=False)
    except RuntimeError:
        return None


def write_record(path: Path, content: bytes, *, max_records: int) -> None:
    """Write a record atomically, and remove the oldest ones of its folder beyond `max_records`. Raises: OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(content)
    _remove_oldest(path.parent, max_records)


def replace_record(path: Path, content: bytes) -> None:
    """Write a record that is soon replaced: atomically, without waiting for the disk. After a power failure it may be
    damaged. Only one process at a time writes it. Raises: OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    staged = path.with_name(f"{path.name}.incomplete")
    staged.write_bytes(content)
    os.replace(staged, path)


def _remove_oldest(folder: Path, max_records: int) -> None:
    """Remove the oldest records beyond the limit. Another process may do the same at the same time."""
    with suppress(OSError):
        records = [entry for entry in os.scandir(folder) if entry.is_file()]
        if len(records) <= max_records:
            return
        for entry in sorted(records, key=lambda entry: entry.stat().st_mtime_ns)[: len(records) - max_records]:
            os.unlink(entry.path)
