"""The most frequent error messages of a finished run, read from the result lines in its journal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from batchline.batch.index import LineIndex, PositionSet
from batchline.batch.journal import Journal, JournalEntry
from batchline.batch.summary import FailureMessage

_SHOWN_MESSAGES = 3
_SHOWN_LINES = 5
_MAX_MESSAGES = 1000
_MAX_MESSAGE_CHARS = 300
_MAX_LINE_BYTES = 1 << 20
"""Result lines longer than this are not read."""

_DETAILS = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
"""The parts that may differ between messages of the same fault: quoted values and numbers."""


def frequent_failures(journal: Journal, index: LineIndex) -> tuple[FailureMessage, ...]:
    """The most frequent messages, most frequent first. Messages that differ only in values count as one.

    Raises: OSError.
    """
    counts: dict[tuple[str, str], int] = {}
    firsts: dict[tuple[str, str], tuple[str, list[int]]] = {}
    for entry in _failures(journal):
        code = entry.outcome.status
        message = _message(journal, entry)
        kind = (code, _DETAILS.sub("", message))
        if kind not in firsts and len(firsts) >= _MAX_MESSAGES:
            continue
        counts[kind] = counts.get(kind, 0) + 1
        _, positions = firsts.setdefault(kind, (message, []))
        positions.append(entry.outcome.position)
        if len(positions) > _SHOWN_LINES:
            positions.remove(max(positions))
    return tuple(
        FailureMessage(
            code=kind[0],
            message=firsts[kind][0],
            count=counts[kind],
            line_numbers=tuple(index.span(position)[0].line_number for position in sorted(firsts[kind][1])),
        )
        for kind in sorted(counts, key=lambda kind: (-counts[kind], min(firsts[kind][1])))[:_SHOWN_MESSAGES]
    )


def _failures(journal: Journal) -> Iterator[JournalEntry]:
    """The first record of each failed position."""
    seen = PositionSet()
    for entry in journal.entries():
        if entry.outcome.is_failure and seen.add(entry.outcome.position):
            yield entry


def _message(journal: Journal, entry: JournalEntry) -> str:
    """The error's message on one line, or nothing where the result line has none."""
    if entry.length > _MAX_LINE_BYTES:
        return ""
    result: Any = orjson.loads(journal.read(entry.offset, entry.length))
    error = result["error"] or result["response"]["body"].get("error")
    message = error.get("message") if isinstance(error, dict) else None
    text = " ".join(message.split())[:_MAX_MESSAGE_CHARS] if isinstance(message, str) else ""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
