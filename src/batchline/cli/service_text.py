"""Shows files and batches of a service to people: as tables that fit the terminal, and one by one.

Ids are never cut, because people copy them. Where the terminal is narrow, the columns that matter least are left out.
Into a pipe, a table goes with all its columns, separated by tabs.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from batchline.cli.messages import show, show_row
from batchline.cli.progress_text import duration, short_number
from batchline.printable import printable

if TYPE_CHECKING:
    from batchline.client.objects import BatchObject, FileObject

GAP = 2
_MIN_CUT = 8


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. rank: columns with a higher one are left out first; 0 is always shown.

    is_number: aligned to the right. may_be_cut: its texts may lose their middle.
    """

    name: str
    rank: int = 0
    is_number: bool = False
    may_be_cut: bool = False


_BATCH_COLUMNS = (
    Column("BATCH"),
    Column("STATUS"),
    Column("DONE", is_number=True),
    Column("FAILED", rank=2, is_number=True),
    Column("CREATED", rank=1),
    Column("ENDPOINT", rank=3),
    Column("MODEL", rank=4, may_be_cut=True),
)
_FILE_COLUMNS = (
    Column("FILE"),
    Column("SIZE", is_number=True),
    Column("NAME", rank=1, may_be_cut=True),
    Column("PURPOSE", rank=3),
    Column("CREATED", rank=2),
)


def show_batches(batches: Sequence[BatchObject]) -> None:
    """A table of batches, on standard output."""
    rows = [
        [
            batch.id,
            batch.status,
            f"{short_number(_over(batch))}/{short_number(batch.counts.total)}",
            short_number(batch.counts.failed) if batch.counts.failed else "",
            _short_time(batch.created_at),
            batch.endpoint,
            batch.model or "",
        ]
        for batch in batches
    ]
    _show_table(_BATCH_COLUMNS, rows)


def show_files(files: Sequence[FileObject]) -> None:
    """A table of files, on standard output."""
    rows = [
        [file.id, size_text(file.bytes), file.filename, file.purpose, _short_time(file.created_at)] for file in files
    ]
    _show_table(_FILE_COLUMNS, rows)


def show_batch(batch: BatchObject) -> None:
    """All that people want to know of a batch, on standard output."""
    counts = batch.counts
    failed = f", {counts.failed:,} failed" if counts.failed else ""
    ended_at, began_at = batch.ended_at, batch.in_progress_at or batch.created_at
    took = duration(max(0, ended_at - began_at)) if ended_at is not None and began_at is not None else ""
    usage = batch.usage or {}
    fields = [
        ("Batch", batch.id),
        ("Status", batch.status),
        ("Requests", f"{_over(batch):,} of {counts.total:,} done{failed}" if counts.total else ""),
        ("Endpoint", batch.endpoint),
        ("Model", batch.model),
        ("Input", batch.input_file_id),
        ("Output", batch.output_file_id),
        ("Failed lines", batch.error_file_id),
        ("Tokens", _tokens(usage)),
        ("Created", time_text(batch.created_at)),
        ("Ended", time_text(ended_at)),
        ("Took", took),
        ("Must end by", "" if batch.is_over else time_text(batch.expires_at)),
        ("Metadata", ", ".join(f"{name}={value}" for name, value in (batch.metadata or {}).items())),
    ]
    _show_fields(fields)
    errors = batch.errors.data if batch.errors else []
    for error in errors[:10]:
        where = f"line {error.line}: " if error.line is not None else ""
        show(printable(f"- {where}{error.message or error.code or 'an error without a message'}"))
    num_errors = max(len(errors), (batch.errors.total or 0) if batch.errors else 0)
    if num_errors > 10:
        show(f"- and {num_errors - 10:,} more; --json shows all that the service lists")


def show_file(file: FileObject) -> None:
    """All that people want to know of a file, on standard output."""
    _show_fields(
        [
            ("File", file.id),
            ("Name", file.filename),
            ("Size", "" if file.bytes is None else f"{size_text(file.bytes)} ({file.bytes:,} bytes)"),
            ("Purpose", file.purpose),
            ("Status", file.status),
            ("Created", time_text(file.created_at)),
            ("Expires", time_text(file.expires_at)),
        ]
    )


def time_text(seconds: int | None) -> str:
    """`2026-11-22 21:05`, in local time."""
    if not seconds:
        return ""
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, OSError, ValueError):
        return ""


def _short_time(seconds: int | None) -> str:
    """`11-22 21:05` of this year, `2025-11-22` of another."""
    text = time_text(seconds)
    return text.removeprefix(f"{datetime.now().year}-") if text.startswith(f"{datetime.now().year}-") else text[:10]


def size_text(num_bytes: int | None) -> str:
    """`999 B`, `12.3 kB`, `1.2 GB`."""
    if num_bytes is None:
        return ""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes} B"


def _over(batch: BatchObject) -> int:
    return batch.counts.completed + batch.counts.failed


def _tokens(usage: dict[str, Any]) -> str:
    given, made = usage.get("input_tokens"), usage.get("output_tokens")
    if not isinstance(given, int) or not isinstance(made, int) or not given + made:
        return ""
    return f"{given:,} in, {made:,} out"


def _show_fields(fields: Sequence[tuple[str, str | None]]) -> None:
    for name, value in fields:
        if value:
            show(f"{name:<14}{printable(value)}")


def _show_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    rows = [[printable(text) for text in row] for row in rows]
    if sys.stdout is None or not sys.stdout.isatty():
        for row in ([column.name for column in columns], *rows):
            show_row(row)
        return
    for line in table_lines(columns, rows, shutil.get_terminal_size().columns):
        show(line, is_whole=True)


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The lines of a table that is at most `width` wide, unless the columns that are always shown are wider."""
    from rich.cells import cell_len  # only needed on a terminal

    widths = [max(map(cell_len, (column.name, *(row[n] for row in rows)))) for n, column in enumerate(columns)]
    shown = list(range(len(columns)))
    for number in sorted(shown, key=lambda n: -columns[n].rank):
        excess = sum(widths[n] + GAP for n in shown) - GAP - width
        if excess <= 0 or columns[number].rank == 0:
            break
        if columns[number].may_be_cut and widths[number] - excess >= _MIN_CUT:
            widths[number] -= excess
            break
        shown.remove(number)
    lines = []
    for row in ([column.name for column in columns], *rows):
        cells = [_cell(row[n], widths[n], columns[n]) for n in shown]
        lines.append((" " * GAP).join(cells).rstrip())
    return lines


def _cell(text: str, width: int, column: Column) -> str:
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) > width:
        end = set_cell_size(text[::-1], (width - 1) // 2)[::-1]  # names often differ at their ends only
        text = set_cell_size(text, width - 1 - cell_len(end)).rstrip() + "…" + end.lstrip()
    padding = " " * (width - cell_len(text))
    return padding + text if column.is_number else text + padding
