"""Splits a batch file into parts for a service with limits, and merges result files.

`split` copies lines unchanged, and leaves out blank ones. `merge` joins results in the order of the files, or in the
order of an input, and counts missing ones. It refuses two results for one line, because it cannot know which of them
counts. Results are matched with lines in bounded memory.
"""

from __future__ import annotations

import asyncio
import glob
import os
import struct
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from batchline.batch import lines
from batchline.batch.compression import codec_of_name, compressor_for
from batchline.batch.files import refuse_unwritable
from batchline.batch.locations import STDIO, Location, parse_location
from batchline.batch.options import Limits
from batchline.batch.result_files import (
    NO_CUSTOM_ID,
    ResultFile,
    custom_id_hash,
    is_of_duplicate_line,
    numbered_results,
    parsed_result,
)
from batchline.batch.sorting import RowSorter
from batchline.batch.source import refuse_unreadable, stage_input
from batchline.disk import move_into_place, write_lines
from batchline.errors import OutputUnwritable, UsageError

# custom_id hash 16, what it is (see below), then the input position or (file, offset, length)
_MATCH = struct.Struct(">16sBIQQ")
_RESULT = struct.Struct(">QIQQ")  # input position, file number, offset, length
_NAMED = struct.Struct(">16sIQQ")  # custom_id hash, file number, offset, length

_LINE, _ANSWER, _DUPLICATE_ERROR = range(3)
"""Kinds of rows to match. The order matters: a duplicate line's error must not take the first line's turn."""

_SHOWN_DUPLICATES = 5
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".txt")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a file that was split."""

    path: Path
    num_lines: int


@dataclass(frozen=True, slots=True)
class MergeSummary:
    """results: lines written. missing: input lines without a result. unmatched: results that were left out because no
    input line has their `custom_id`. Without an input, nothing is missing or unmatched."""

    results: int
    missing: int = 0
    unmatched: int = 0


def split_file(input_file: str, folder: Path, limits: Limits, *, overwrite: bool = False) -> list[Part]:
    """Cut an input into `<name>-00001.jsonl`, ... in `folder`. Returns the parts, which appear when all are whole.

    overwrite: replace the parts of an earlier split. Raises: UsageError, also for a single line over the limit.
    """
    location = parse_location(input_file)
    refuse_unreadable(location)
    if not os.path.isdir(folder):
        raise OutputUnwritable(str(folder), "the folder does not exist.")
    stem = _stem(location)
    older = sorted(folder.glob(f"{glob.escape(stem)}-{'[0-9]' * 5}.jsonl"))
    if older and not overwrite:
        raise OutputUnwritable(str(older[0]), "it exists. Use another --output-dir, or --overwrite to replace it.")
    parts: list[Part] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchline-")))
        staged = stack.enter_context(_staging_folder(folder))
        path = _plain_bytes(location, scratch / "input")
        for part_lines in _parts(path, limits, location.display):
            name = f"{stem}-{len(parts) + 1:05}.jsonl"
            parts.append(Part(folder / name, write_lines(staged / name, part_lines)))
        for part in parts:
            move_into_place(staged / part.path.name, part.path)
    for path in set(older).difference(part.path for part in parts):
        path.unlink(missing_ok=True)  # of an earlier, longer split
    return parts


@contextmanager
def _staging_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder in `folder`, for files until all of them are whole. Raises: OutputUnwritable."""
    try:
        staged = tempfile.TemporaryDirectory(prefix=".batchline-", dir=folder)
    except OSError as exc:
        raise OutputUnwritable(str(folder), f"{exc.strerror or exc}.") from exc
    with staged as path:
        yield Path(path)


def _stem(location: Location) -> str:
    """The common part of the parts' names: the input's name without its suffixes."""
    name = location.name.removeprefix(STDIO)
    if codec_of_name(name) is not None:
        name = Path(name).stem
    return (Path(name).stem if name.lower().endswith(_SUFFIXES) else name) or "part"


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
            raise UsageError(f"Line {source.line_number} of {display} is longer than {limits.max_file_bytes:,} bytes.")
        is_full = limits.max_requests is not None and count >= limits.max_requests
        if is_full or (limits.max_file_bytes is not None and size + len(line) > limits.max_file_bytes):
            return
        count, size = count + 1, size + len(line)
        source.advance()
        yield line


class _Peekable:
    """Non-blank lines of a file, each with a line end, and a view of the next one.

    Raises: UsageError for a line that is too long.
    """

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
    """Join result files into `output`, in the order of `input_file` if it is given.

    results: files, pipes, or compressed files. The output is compressed if its name says so.
    Raises: UsageError, also if a line has two results.
    """
    refuse_unwritable(Location(str(output), "path", output), source=parse_location(input_file or STDIO))
    for path in results:
        refuse_unreadable(Location(str(path), "path", path))
        if output.exists() and output.samefile(path):
            raise OutputUnwritable(str(output), "it is one of the files to merge.")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchline-")))
        files = []
        for number, path in enumerate(results):
            plain = _plain_bytes(Location(str(path), "path", path), scratch / str(number))
            files.append(ResultFile(str(path), stack.enter_context(plain.open("rb"))))
        if input_file is None:
            return MergeSummary(
                write_lines(output, _lines_without_duplicates(files, scratch), compressor_for(output.name))
            )
        return _merge_in_order(input_file, files, output, scratch)


def _plain_bytes(location: Location, folder: Path) -> Path:
    """A local file with the plain bytes of a location. Pipes and compressed files are copied to a new folder."""
    folder.mkdir()
    return asyncio.run(stage_input(location, folder, should_stop=lambda: False))


def _merge_in_order(input_file: str, files: list[ResultFile], output: Path, scratch: Path) -> MergeSummary:
    location = parse_location(input_file)
    refuse_unreadable(location)
    path = _plain_bytes(location, scratch / "input")
    matches = RowSorter(scratch, "matches", _MATCH.size)
    num_lines = 0
    with path.open("rb") as source:
        for num_lines, line in enumerate(_result_lines(source), 1):
            matches.add(_MATCH.pack(custom_id_hash(lines.readable_custom_id(line)), _LINE, 0, num_lines - 1, 0))
    for number, offset, line in numbered_results(files):
        value = parsed_result(line, files[number].name)
        kind = _DUPLICATE_ERROR if is_of_duplicate_line(value) else _ANSWER
        matches.add(_MATCH.pack(custom_id_hash(lines.custom_id_of(value)), kind, number, offset, len(line)))
    ordered = RowSorter(scratch, "ordered", _RESULT.size)
    duplicates = _Duplicates(files)
    num_unmatched = _match(matches, ordered, duplicates)
    duplicates.refuse()
    count = write_lines(output, _ordered_lines(ordered, files), compressor_for(output.name))
    return MergeSummary(count, missing=num_lines - count, unmatched=num_unmatched)


def _match(matches: RowSorter, ordered: RowSorter, duplicates: _Duplicates) -> int:
    """Match input lines with results; lines with the same `custom_id` get theirs in order.

    duplicates: gets results whose lines all have one already. Returns the number of results that belong to no line.
    """
    current = b""
    is_in_input = False
    positions: deque[int] = deque()
    num_unmatched = 0
    for rows in matches.sorted_blocks():
        for custom_id, kind, number, offset, length in _MATCH.iter_unpack(rows.tobytes()):
            if custom_id != current:
                current, is_in_input = custom_id, False
                positions.clear()
            if kind == _LINE:
                is_in_input = True
                positions.append(offset)
            elif positions:
                ordered.add(_RESULT.pack(positions.popleft(), number, offset, length))
            elif is_in_input and custom_id != NO_CUSTOM_ID:
                duplicates.add(number, offset, length)
            else:
                num_unmatched += 1
    return num_unmatched


def _ordered_lines(ordered: RowSorter, files: list[ResultFile]) -> Iterator[bytes]:
    for rows in ordered.sorted_blocks():
        for _position, number, offset, length in _RESULT.iter_unpack(rows.tobytes()):
            yield files[number].read(offset, length).rstrip(b"\r\n") + b"\n"


def _result_lines(file: BinaryIO) -> Iterator[bytes]:
    return (line.rstrip(b"\r\n") + b"\n" for line in file if not line.isspace())


def _lines_without_duplicates(files: Sequence[ResultFile], scratch: Path) -> Iterator[bytes]:
    """All results in order. Raises: UsageError at the end if a `custom_id` has two results."""
    named = RowSorter(scratch, "results", _NAMED.size)
    for number, offset, line in numbered_results(files):
        value = parsed_result(line, files[number].name)
        custom_id = lines.custom_id_of(value)
        if custom_id is not None and not is_of_duplicate_line(value):
            named.add(_NAMED.pack(custom_id_hash(custom_id), number, offset, len(line)))
        yield line.rstrip(b"\r\n") + b"\n"
    duplicates = _Duplicates(files)
    previous = b""
    for rows in named.sorted_blocks():
        for named_hash, number, offset, length in _NAMED.iter_unpack(rows.tobytes()):
            if named_hash == previous:
                duplicates.add(number, offset, length)
            previous = named_hash
    duplicates.refuse()


class _Duplicates:
    """Results for lines that already have one: their number, and the first few of them."""

    def __init__(self, files: Sequence[ResultFile]) -> None:
        self._files = files
        self._count = 0
        self._shown: list[str] = []

    def add(self, number: int, offset: int, length: int) -> None:
        """Count one. number: the number of its file."""
        self._count += 1
        if len(self._shown) < _SHOWN_DUPLICATES:
            file = self._files[number]
            custom_id = lines.readable_custom_id(file.read(offset, length))
            self._shown.append(f"{custom_id!r} (again in {file.name})")

    def refuse(self) -> None:
        """Raises: UsageError if there are any."""
        if not self._count:
            return
        more = f" and {self._count - len(self._shown):,} more" if self._count > len(self._shown) else ""
        raise UsageError(
            f"These custom_ids have more than one result: {', '.join(self._shown)}{more}. Nothing was written. "
            "Keep one result for each: leave one of the files out, or remove the lines that you do not want."
        )
