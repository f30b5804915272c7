"""Cutting a batch file into parts within limits, and joining result files: for services that take only so much.

`split` copies lines as they are, blank ones left out. `merge` joins results as they come, or in the order of an input
and with what is missing counted; results are matched by 128-bit hashes of `custom_id`, sorted in bounded memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from batchline.batch import lines
from batchline.batch.durable import move_into_place
from batchline.batch.locations import STDIO, Location, parse_location
from batchline.batch.options import Limits
from batchline.batch.sink import STAGED_NAME_CHARS, refuse_unwritable
from batchline.batch.sorting import RecordSorter
from batchline.batch.source import refuse_unreadable, stage_input
from batchline.errors import InputUnreadable, LineError, OutputUnwritable, UsageError

# custom_id hash 16, 0 for an input line and 1 for a result, then the input position or (file, offset, length)
_MATCH = struct.Struct(">16sBIQQ")
_RESULT = struct.Struct(">QIQQ")  # input position, file number, offset, length


@dataclass(frozen=True, slots=True)
class MergeSummary:
    """results: lines written. missing: input lines without a result. unmatched: results left out, because no input line
    is left for them. Without an input nothing is missing or unmatched."""

    results: int
    missing: int = 0
    unmatched: int = 0


def split_file(input_file: str, folder: Path, limits: Limits) -> list[Path]:
    """Cut an input into `<name>-00001.jsonl`, ... in `folder`. Returns the parts.

    Raises: UsageError, also for a single line over the limit.
    """
    location = parse_location(input_file)
    refuse_unreadable(location)
    if not os.path.isdir(folder):
        raise OutputUnwritable(str(folder), "the folder does not exist.")
    stem = location.name.partition(".")[0].removeprefix(STDIO) or "part"
    parts: list[Path] = []
    with tempfile.TemporaryDirectory(prefix="batchline-") as scratch:
        path = asyncio.run(stage_input(location, Path(scratch), should_stop=lambda: False))
        for part_lines in _parts(path, limits, location.display):
            target = folder / f"{stem}-{len(parts) + 1:05}.jsonl"
            write_whole(target, part_lines)
            parts.append(target)
    return parts


def _parts(path: Path, limits: Limits, display: str) -> Iterator[Iterator[bytes]]:
    """One iterator of lines for each part; each must be exhausted before the next is taken."""
    with path.open("rb", buffering=1 << 20) as file:
        numbered = _Peekable(file, display)
        while numbered.peek() is not None:
            yield _part(numbered, limits, display)


def _part(source: _Peekable, limits: Limits, display: str) -> Iterator[bytes]:
    count = size = 0
    while (line := source.peek()) is not None:
        if limits.max_file_bytes is not None and len(line) > limits.max_file_bytes:
            raise UsageError(f"Line {source.line_number} of {display} alone is over {limits.max_file_bytes:,} bytes.")
        is_full = limits.max_requests is not None and count >= limits.max_requests
        if is_full or (limits.max_file_bytes is not None and size + len(line) > limits.max_file_bytes):
            return
        count, size = count + 1, size + len(line)
        source.advance()
        yield line


class _Peekable:
    """Non-blank lines of a file, each ending in a line end, with the next one visible. Raises: UsageError for a line
    that is too long to be held."""

    def __init__(self, file: BinaryIO, display: str) -> None:
        self._file = file
        self._display = display
        self._line: bytes | None = None
        self.line_number = 0
        self.advance()

    def peek(self) -> bytes | None:
        """The next line; None at the end."""
        return self._line

    def advance(self) -> None:
        """Move on to the next line that is not blank."""
        while line := self._file.readline(lines.MAX_LINE_BYTES):
            self.line_number += 1
            if len(line) == lines.MAX_LINE_BYTES and not line.endswith(b"\n"):
                raise UsageError(f"Line {self.line_number} of {self._display}: {lines.too_long_error().message}")
            if not line.isspace():
                self._line = line.rstrip(b"\r\n") + b"\n"
                return
        self._line = None


def merge_files(results: Sequence[Path], output: Path, input_file: str | None = None) -> MergeSummary:
    """Join result files into `output`, in the order of `input_file` where it is given. Raises: UsageError."""
    refuse_unwritable(Location(str(output), "path", output), source=parse_location(input_file or STDIO))
    for path in results:
        refuse_unreadable(Location(str(path), "path", path))
        if output.exists() and output.samefile(path):
            raise OutputUnwritable(str(output), "it is one of the files to merge.")
    with ExitStack() as stack:
        files: list[BinaryIO] = [stack.enter_context(path.open("rb")) for path in results]
        if input_file is None:
            return MergeSummary(write_whole(output, (line for file in files for line in _result_lines(file))))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchline-")))
        return _merge_in_order(input_file, files, output, scratch)


def _merge_in_order(input_file: str, files: list[BinaryIO], output: Path, scratch: Path) -> MergeSummary:
    location = parse_location(input_file)
    refuse_unreadable(location)
    path = asyncio.run(stage_input(location, scratch, should_stop=lambda: False))
    matches = RecordSorter(scratch, "matches", _MATCH.size)
    num_lines = 0
    with path.open("rb") as source:
        for num_lines, line in enumerate(_result_lines(source), 1):
            matches.add(_MATCH.pack(_hash(lines.readable_custom_id(line)), 0, 0, num_lines - 1, 0))
    for number, file in enumerate(files):
        offset = 0
        for line in file:
            if not line.isspace():
                matches.add(_MATCH.pack(_hash(_result_custom_id(line, file.name)), 1, number, offset, len(line)))
            offset += len(line)
    ordered = RecordSorter(scratch, "ordered", _RESULT.size)
    num_unmatched = _match(matches, ordered)
    count = write_whole(output, _ordered_lines(ordered, files))
    return MergeSummary(count, missing=num_lines - count, unmatched=num_unmatched)


def _match(matches: RecordSorter, ordered: RecordSorter) -> int:
    """Give each input line a result, those of one `custom_id` in order. Returns the number of results left over."""
    current = b""
    positions: deque[int] = deque()
    num_unmatched = 0
    for rows in matches.sorted_blocks():
        for custom_id, is_result, number, offset, length in _MATCH.iter_unpack(rows.tobytes()):
            if custom_id != current:
                current = custom_id
                positions.clear()
            if not is_result:
                positions.append(offset)
            elif positions:
                ordered.add(_RESULT.pack(positions.popleft(), number, offset, length))
            else:
                num_unmatched += 1
    return num_unmatched


def _ordered_lines(ordered: RecordSorter, files: list[BinaryIO]) -> Iterator[bytes]:
    for rows in ordered.sorted_blocks():
        for _position, number, offset, length in _RESULT.iter_unpack(rows.tobytes()):
            yield os.pread(files[number].fileno(), length, offset).rstrip(b"\r\n") + b"\n"


def _result_lines(file: BinaryIO) -> Iterator[bytes]:
    return (line.rstrip(b"\r\n") + b"\n" for line in file if not line.isspace())


def _result_custom_id(line: bytes, name: object) -> str | None:
    try:
        return lines.custom_id_of(lines.load_json(line))
    except LineError as exc:
        raise InputUnreadable(str(name), f"a line is not JSON: {exc.message}") from exc


def _hash(custom_id: str | None) -> bytes:
    """What a line is matched by; lines without a readable `custom_id` are matched with results that have none."""
    return hashlib.blake2b((custom_id or "").encode(), digest_size=16).digest()


def write_whole(target: Path, content: Iterator[bytes]) -> int:
    """Write lines to `target` by way of a rename, or nothing at all. Returns how many."""
    incomplete = target.with_name(f"{target.name[:STAGED_NAME_CHARS]}.{os.urandom(4).hex()}.incomplete")
    count = 0
    try:
        with incomplete.open("xb", buffering=1 << 20) as file:
            for line in content:
                file.write(line)
                count += 1
            file.flush()
            os.fsync(file.fileno())
        move_into_place(incomplete, target)
    except OSError as exc:
        raise OutputUnwritable(str(target), f"{exc.strerror or exc}.") from exc
    finally:
        incomplete.unlink(missing_ok=True)
    return count
