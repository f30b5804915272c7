"""Makes file names survive power loss: a file's bytes are durable after its own sync, its name after its folder's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from batchline.errors import UsageError


def refuse_windows() -> None:
    """Raises: UsageError on a system without what a run's files need: locks, reads at a position, synced folders."""
    if sys.platform == "win32":
        raise UsageError("Batch files are processed on Linux and macOS only. On Windows, use WSL.")


def sync_folder(folder: Path, fsync: Callable[[int], None] = os.fsync) -> None:
    """Make new, renamed and removed names in `folder` durable. Raises: OSError."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fsync(fd)
    finally:
        os.close(fd)


def move_into_place(staged: Path, target: Path) -> None:
    """Rename a synced file to `target`, durably; an older file there is replaced in the same instant."""
    os.replace(staged, target)
    sync_folder(target.parent)
