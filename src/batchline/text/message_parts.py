"""The parts of a model's message (reasoning, content, tool calls), and the stream in which parsers find them.

A parser is a reader of text that arrives in pieces (`text_cursor`). It reports what it finds to a sink, which decides
when a part is certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from batchline.text.text_cursor import Reading, TextCursor


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the call at `index`. Its first delta has the name, later ones only more of the arguments' JSON text."""

    index: int
    name: str | None = None
    id: str | None = None
    arguments_fragment: str = ""


MessagePart = ReasoningDelta | ContentDelta | ToolCallDelta


class PartSink:
    """Collects the parts that a parser finds in one text. Mutable."""

    def __init__(self, cursor: TextCursor) -> None:
        self._cursor = cursor
        self._parts: list[MessagePart] = []

    def finish(self) -> None:
        """Called after the whole text has been read."""

    def drain(self) -> list[MessagePart]:
        """Parts not yet drained. Neighbours that belong together are merged."""
        parts, self._parts = self._parts, []
        return parts if len(parts) < 2 else [_merged(list(group)) for _, group in groupby(parts, key=_belongs_to)]


def _belongs_to(part: MessagePart) -> type[MessagePart] | int:
    return part.index if isinstance(part, ToolCallDelta) else type(part)


def _merged(parts: Sequence[MessagePart]) -> MessagePart:
    head = parts[0]
    text = "".join(part.arguments_fragment if isinstance(part, ToolCallDelta) else part.text for part in parts)
    return ToolCallDelta(head.index, head.name, head.id, text) if isinstance(head, ToolCallDelta) else type(head)(text)


class PartStream:
    """Finds the parts of one text that arrives in pieces. Mutable, one per text."""

    def __init__(self, cursor: TextCursor, sink: PartSink, reading: Reading[None]) -> None:
        """reading: a parser that reads from the cursor and reports to the sink."""
        self._cursor = cursor
        self._sink = sink
        self._reading = reading

    def push(self, text: str) -> list[MessagePart]:
        """Add text. Returns the parts that are now certain."""
        self._cursor.push(text)
        next(self._reading, None)
        return self._sink.drain()

    def finish(self) -> list[MessagePart]:
        """End the text. Returns the parts that were held back."""
        self._cursor.end()
        next(self._reading, None)
        self._sink.finish()
        return self._sink.drain()
