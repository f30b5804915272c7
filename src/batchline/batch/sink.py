"""From the journal to the result file: in order, whole, and only then at its place.

`write_results` writes complete local files from a complete journal; `deliver` brings one to where the user wants it: a
path by rename (an older file there stays untouched until then), standard output, one PUT, or a multipart upload.
Order is restored through offsets, sorted in bounded memory; results themselves are never held.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import os
import select
import shutil
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from batchline.batch.compression import Codec, codec_of_name, compressing_writer
from batchline.batch.durable import move_into_place
from batchline.batch.index import PositionSet
from batchline.batch.journal import Journal
from batchline.batch.locations import Location
from batchline.batch.options import OutputOrder
from batchline.batch.remote import file_system, refuse_unknown_host
from batchline.batch.sorting import RecordSorter
from batchline.batch.upload import upload_file
from batchline.batch.workspace import RESULTS_PREFIX, is_special
from batchline.errors import OutputUnwritable, RunFailed, RunInterrupted

if sys.platform != "win32":
    import fcntl
    import termios

_ENTRY = struct.Struct(">QQI?")
"""Position, offset, length and whether it failed; big-endian, so that its bytes sort by position."""

_STOP_CHECK_RESULTS = 4096
_READER_WAIT_MS = 2000

STAGED_NAME_CHARS = 40
"""Of an output's name, its beginning names the staged file: no file system may find that name too long."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A local file that holds results, or will, and the location they are for."""

    path: Path
    location: Location

    @classmethod
    def for_location(cls, location: Location, workspace: Path) -> StagedFile:
        """Beside the file it will become, so that a rename brings it there; for all else in the run's workspace.

        The name has the workspace in it: runs with other workspaces may be writing the same output.
        """
        if location.path is not None and not is_special(location.path):
            target = location.path.resolve()
            owner = hashlib.sha256(os.fsencode(workspace.resolve() / target.name)).hexdigest()[:8]
            return cls(target.with_name(f"{target.name[:STAGED_NAME_CHARS]}.{owner}.incomplete"), location)
        return cls(workspace / f"{RESULTS_PREFIX}{location.tag}{''.join(Path(location.name).suffixes[-2:])}", location)

    @property
    def codec(self) -> Codec | None:
        """How the results are compressed, by the location's name."""
        return codec_of_name(self.location.name)


def refuse_unwritable(location: Location, source: Location) -> None:
    """Refuse at once an output that could never be written. Raises: OutputUnwritable, UsageError."""
    if location.kind == "http":
        refuse_unknown_host(location)
    elif location.kind == "fsspec":
        file_system(location)
    elif location.kind == "stdio" and sys.stdout is None:
        raise OutputUnwritable(location.text, "standard output is closed.")
    if location.is_remote and location.place == source.place:
        raise OutputUnwritable(location.display, "it is the same place as the input.")
    if location.path is None:
        return
    try:
        _refuse_unwritable_path(location, location.path, source)
    except OSError as exc:  # a name that is too long, or a folder that may not be looked into
        raise OutputUnwritable(location.text, f"{exc.strerror or exc}.") from exc


def _refuse_unwritable_path(location: Location, path: Path, source: Location) -> None:
    folder = path.parent
    if path.is_dir():
        raise OutputUnwritable(location.text, "it is a folder; give a file name in it.")
    if not folder.is_dir():
        raise OutputUnwritable(location.text, f"the folder {str(folder)!r} does not exist.")
    if not os.access(path if is_special(path) else folder, os.W_OK):
        raise OutputUnwritable(location.text, "permission denied.")
    if source.path is not None and path.exists() and source.path.exists() and path.samefile(source.path):
        raise OutputUnwritable(location.text, "it is the same file as the input.")


def write_results(
    journal: Journal,
    *,
    num_lines: int,
    order: OutputOrder,
    output: StagedFile,
    error_file: StagedFile | None,
    scratch: Path,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Write every result line once, failed ones to `error_file` where there is one, and sync both files.

    Raises: RunFailed when the disk fails, RunInterrupted when `should_stop`.
    """
    try:
        with ExitStack() as stack:
            write_ok = stack.enter_context(_synced_writer(output)).write
            write_failed = stack.enter_context(_synced_writer(error_file)).write if error_file else write_ok
            entries = _in_input_order(journal, scratch) if order == "input" else _in_completion_order(journal)
            count = 0
            for offset, length, is_failure in entries:
                (write_failed if is_failure else write_ok)(journal.read(offset, length) + b"\n")
                count += 1
                if count % _STOP_CHECK_RESULTS == 0 and should_stop():
                    raise RunInterrupted("Interrupted while writing the output.")
    except OSError as exc:
        reason = exc.strerror or str(exc)
        kept = "All results are saved; fix the problem and run the same command again."
        lost = "The journal with all results is gone: was its folder removed?"
        raise RunFailed(
            f"Cannot write the results to {output.path}: {reason}. {kept if journal.is_in_place() else lost}"
        ) from exc
    if count != num_lines:
        raise RunFailed(f"The journal holds {count} results for {num_lines} lines; pass --no-resume to start over.")


async def deliver(staged: StagedFile) -> None:
    """Bring a complete staged file to its location. Raises: RunFailed; then the staged file stays where it is."""
    location = staged.location
    try:
        if location.path is not None and not is_special(location.path):
            move_into_place(staged.path, location.path.resolve())
        elif location.kind in ("path", "stdio"):
            await asyncio.to_thread(_copy_out, staged)
        else:
            await upload_file(staged.path, location)
    except OSError as exc:
        reason = exc.strerror or str(exc)
        raise RunFailed(
            f"The results cannot be written to {location.display}: {reason}. They are complete in {staged.path}."
        ) from exc


def _copy_out(staged: StagedFile) -> None:
    """Raises: OSError, also where a pipe's reader has left before it had read everything."""
    with ExitStack() as stack:
        file = stack.enter_context(staged.path.open("rb"))
        path = staged.location.path
        target = sys.stdout.buffer if path is None else stack.enter_context(path.open("wb"))
        shutil.copyfileobj(file, target, 1 << 20)
        target.flush()
        with suppress(io.UnsupportedOperation):  # a stream that is no file, put in the place of standard output
            _refuse_lost_tail(target.fileno())


def _refuse_lost_tail(fd: int) -> None:
    """Give a pipe's reader a moment to read what is still in the pipe. Raises: BrokenPipeError if it leaves instead.

    A reader that only takes its time is trusted to go on.
    """
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        return
    poll = select.poll()
    poll.register(fd, 0)
    for _ in range(_READER_WAIT_MS // 10):
        if not int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder):
            return
        if poll.poll(10):
            raise BrokenPipeError(errno.EPIPE, "its reader has left before it had read everything")


@contextmanager
def _synced_writer(staged: StagedFile) -> Iterator[BinaryIO]:
    """A writer into a staged file, compressed by its location's name; after a clean exit the file is on disk."""
    with staged.path.open("wb", buffering=1 << 20) as file:
        with compressing_writer(file, staged.codec) as writer:
            yield writer
        file.flush()
        os.fsync(file.fileno())


def _in_input_order(journal: Journal, scratch: Path) -> Iterator[tuple[int, int, bool]]:
    """(offset, length, is_failure) of each position's first record, by position."""
    sorter = RecordSorter(scratch, "result-order", _ENTRY.size)
    try:
        for entry in journal.entries():
            outcome = entry.outcome
            sorter.add(_ENTRY.pack(outcome.position, entry.offset, entry.length, outcome.is_failure))
        previous = -1
        for rows in sorter.sorted_blocks():
            for position, offset, length, is_failure in _ENTRY.iter_unpack(rows.tobytes()):
                if position != previous:
                    yield offset, length, is_failure
                previous = position
    finally:
        sorter.close()


def _in_completion_order(journal: Journal) -> Iterator[tuple[int, int, bool]]:
    seen = PositionSet()
    for entry in journal.entries():
        if seen.add(entry.outcome.position):
            yield entry.offset, entry.length, entry.outcome.is_failure
