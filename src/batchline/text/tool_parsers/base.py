"""The base class of tool-call parsers, and the stream that one runs in.

A format is implemented once, as a reader of text that arrives in pieces; a complete text is one piece. So the deltas of
a stream always add up to the result for the whole text. Anything that is not a complete call becomes content: no text
is lost, and no text raises.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from batchline.text.text_cursor import Markers, Reading, TextCursor, UnexpectedText
from batchline.text.tool_parsers.calls import Delta, ParsedToolCalls, ToolDefinition, assemble
from batchline.text.tool_parsers.schema_types import ArgumentTypes
from batchline.text.tool_parsers.sink import Callees, CallSink


class ToolCallParser(ABC):
    """Finds the calls in a model's text. One instance may serve many texts at once.

    A subclass names its `openings` and reads the text after one in `read_block`. Register it with
    `register_tool_parser`.
    """

    openings: ClassVar[tuple[str, ...]] = ()
    """Strings that begin a block of calls. None may begin inside another."""

    bare_openings: ClassVar[tuple[str, ...]] = ()
    """Characters that begin a block if the text begins with one, after optional white space."""

    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Markers that may be special tokens, so detokenizing must not skip them."""

    def __init__(self, tools: Sequence[ToolDefinition] = (), *, eager: bool = False, only_these: bool = False) -> None:
        """tools: the functions that the model may call; formats without types take argument types from them.

        eager: stream a call of one of the tools while it is written, instead of when it is complete and valid. If such
        a call breaks off, it stays a call with the arguments so far; only the text after it is content.
        only_these: a call of any other function is content.
        """
        self.tools = tuple(tools)
        self.argument_types = ArgumentTypes(tools)
        self._callees = Callees(frozenset(tool.name for tool in tools), eager, only_these)
        self._opening_markers = Markers(*self.openings)

    def parse(self, text: str) -> ParsedToolCalls:
        """Parse a complete text."""
        stream = self.stream()
        return assemble([*stream.push(text), *stream.finish()])

    def stream(self) -> ToolCallStream:
        """A stream for one text that arrives in pieces."""
        return ToolCallStream(self, self._callees)

    @classmethod
    def recognizes(cls, template: str) -> bool:
        """Whether a chat template asks the model for this format, and for no other."""
        return False

    @staticmethod
    def make_call_id() -> str:
        """An id for a call without one, in a form that the model's template accepts."""
        return f"call_{secrets.token_hex(12)}"

    @abstractmethod
    def read_block(self, cursor: TextCursor, sink: CallSink, opening: str) -> Reading[None]:
        """Read the calls after `opening`; "" means that the text at the cursor begins with a bare opening.

        Raises: UnexpectedText if the text is not a block; the text after the last complete call is then content.
        """

    def read(self, cursor: TextCursor, sink: CallSink) -> Reading[None]:
        """Read a whole text."""
        sink.content((yield from cursor.space()))
        if (yield from cursor.peek()) in self.bare_openings:
            yield from self._try_block(cursor, sink, "")
        while opening := (yield from cursor.pass_until(self._opening_markers, sink.content)):
            yield from self._try_block(cursor, sink, opening)

    def _try_block(self, cursor: TextCursor, sink: CallSink, opening: str) -> Reading[None]:
        """Read a block, or return to where it stopped being one. A call that was already shown stays."""
        start = cursor.position
        cursor.set_mark()
        try:
            yield from self.read_block(cursor, sink, opening)
        except UnexpectedText:
            was_shown = sink.abandon_call()
            cursor.return_to_mark()
            if cursor.position == start and not was_shown:
                sink.content(opening)


class ToolCallStream:
    """Parses one text that arrives in pieces. Mutable, one per text."""

    def __init__(self, parser: ToolCallParser, callees: Callees) -> None:
        self._cursor = TextCursor()
        self._sink = CallSink(self._cursor, callees)
        self._reading = parser.read(self._cursor, self._sink)

    def push(self, delta_text: str) -> list[Delta]:
        """Add text. Returns the deltas that are now certain."""
        self._cursor.push(delta_text)
        next(self._reading, None)
        return self._sink.drain()

    def finish(self) -> list[Delta]:
        """End the text. Returns the deltas that were held back."""
        self._cursor.end()
        next(self._reading, None)
        self._sink.finish()
        return self._sink.drain()
