"""The output of reasoning parsers: deltas, and the sink that collects them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from batchline.text.text_cursor import TextCursor


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the content, which a tool-call parser reads next."""

    text: str


Delta = ReasoningDelta | ContentDelta


class ReasoningSink:
    """Turns reasoning and content into deltas. Mutable, one per stream."""

    def __init__(self, cursor: TextCursor) -> None:
        self._cursor = cursor
        self._deltas: list[Delta] = []
        self._space: list[str] = []
        self._has_reasoning = False
        self.reasoning_end = 0

    def reasoning(self, text: str) -> None:
        """Add reasoning. Leading white space is dropped; other white space is held back until more text follows."""
        visible = text.rstrip()
        space = text[len(visible) :]
        if visible:
            joined = "".join(self._space) + visible
            self._deltas.append(ReasoningDelta(joined if self._has_reasoning else joined.lstrip()))
            self._has_reasoning = True
            self._space.clear()
        self._space.append(space)
        self.reasoning_end = self._cursor.offset

    def end_reasoning(self) -> None:
        """Note that the cursor has passed the reasoning and its end marker."""
        self.reasoning_end = self._cursor.offset

    def content(self, text: str) -> None:
        """More of the content."""
        if text:
            self._deltas.append(ContentDelta(text))

    def drain(self) -> list[Delta]:
        """Deltas not yet drained, with neighbours of the same kind merged."""
        groups = groupby(self._deltas, key=type)
        merged: list[Delta] = [kind("".join(delta.text for delta in group)) for kind, group in groups]
        self._deltas.clear()
        return merged
