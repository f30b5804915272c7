"""Collects what the parsers find: content, and calls piece by piece.

It also decides when a piece is shown. White space next to a call is markup and is dropped; other white space is
content. A call is held back until it is complete and its arguments are a JSON object, so that a malformed one can still
become content. An eager sink shows a call while it is written, once its name is known to be a tool's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from batchline.text.text_cursor import TextCursor, UnexpectedText
from batchline.text.tool_parsers.calls import ContentDelta, Delta, ToolCallDelta
from batchline.text.tool_parsers.json_text import strict_loads


@dataclass(frozen=True, slots=True)
class Callees:
    """The functions that may be called, and whether their calls are shown while they are written.

    names: the tools' names; empty if they are unknown. is_eager: whether to show their calls while they are written.
    only_these: whether only these functions can be called; a call of any other is content.
    """

    names: frozenset[str] = frozenset()
    is_eager: bool = False
    only_these: bool = False

    def allow(self, name: str) -> bool:
        """Whether a function of that name may be called."""
        return not self.only_these or name in self.names

    def show_at_once(self, name: str) -> bool:
        """Whether a call of it is shown before it is complete."""
        return self.is_eager and (not self.names or name in self.names)


class CallSink:
    """Turns content and calls into deltas. Sets the cursor's mark after text that is final. One per stream."""

    def __init__(self, cursor: TextCursor, callees: Callees) -> None:
        self._cursor = cursor
        self._callees = callees
        self._is_shown = False  # the open call, as it grows
        self._shown: list[Delta] = []
        self._space: list[str] = []
        self._open: list[ToolCallDelta] | None = None
        self._num_calls = 0

    def content(self, text: str) -> None:
        """Add text that belongs to no call."""
        visible = text.rstrip()
        if visible:
            self._shown.append(ContentDelta("".join(self._space) + visible))
            self._space.clear()
        self._space.append(text[len(visible) :])

    def open_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call. Raises: UnexpectedText if `name` is not a possible function name."""
        if not name or not name.isprintable() or not self._callees.allow(name):
            raise UnexpectedText("not a function's name")
        self._open = []
        self._is_shown = self._callees.show_at_once(name)
        if self._is_shown:
            self._space.clear()
        self._add(ToolCallDelta(self._num_calls, name, call_id))

    def arguments(self, fragment: str) -> None:
        """Add to the open call's arguments."""
        self._add(ToolCallDelta(self._num_calls, arguments_fragment=fragment))

    def close_call(self) -> None:
        """End the open call. Raises: UnexpectedText if it was held back and its arguments are not a JSON object."""
        assert self._open is not None
        if not self._is_shown:
            if not isinstance(strict_loads("".join(delta.arguments_fragment for delta in self._open)), dict):
                raise UnexpectedText("the arguments are not an object")
            self._shown += self._open
            self._space.clear()
        self._open = None
        self._num_calls += 1
        self._cursor.set_mark()

    def abandon_call(self) -> bool:
        """Break the open call off, if there is one. True if it was shown, and so stays a call."""
        was_shown = self._open is not None and self._is_shown
        self._open = None
        self._num_calls += was_shown
        return was_shown

    def finish(self) -> None:
        """End the text."""
        space = "".join(self._space)
        if space and not self._num_calls:
            self._shown.append(ContentDelta(space))

    def drain(self) -> list[Delta]:
        """Deltas not yet drained, with neighbours that belong together merged."""
        merged = [_merged(list(group)) for _, group in groupby(self._shown, key=_belongs_to)]
        self._shown.clear()
        return merged

    def _add(self, delta: ToolCallDelta) -> None:
        if self._is_shown:
            self._shown.append(delta)
            self._cursor.set_mark()
        elif self._open is not None:
            self._open.append(delta)


def _belongs_to(delta: Delta) -> int | None:
    return delta.index if isinstance(delta, ToolCallDelta) else None


def _merged(deltas: list[Delta]) -> Delta:
    head = deltas[0]
    if len(deltas) == 1:
        return head
    if isinstance(head, ContentDelta):
        return ContentDelta("".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)))
    fragments = [delta.arguments_fragment for delta in deltas if isinstance(delta, ToolCallDelta)]
    return ToolCallDelta(head.index, head.name, head.id, "".join(fragments))
