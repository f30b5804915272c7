"""What a tool-call parser is, and the stream that it runs in.

A format is implemented once, as a reader of text that arrives in pieces; a finished text is one piece. So the deltas of
any pieces put together are the parsed text. What is not a complete call comes out as content: no text is lost, and no
text raises.
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
    """Finds the calls in a model's text. One may serve many texts at once.

    A subclass names its `openings` and reads what stands behind them in `read_block`. Register it with
    `register_tool_parser`.
    """

    openings: ClassVar[tuple[str, ...]] = ()
    """Strings that begin a block of calls. None may begin inside another."""

    bare_openings: ClassVar[tuple[str, ...]] = ()
    """Characters that begin a block where the text begins with them, behind white space."""

    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Markup that tokenizers hold as special tokens: it must not be skipped in detokenizing."""

    def __init__(self, tools: Sequence[ToolDefinition] = (), *, eager: bool = False, only_these: bool = False) -> None:
        """tools: what the model may call, for the types of arguments in formats that do not tell them.

        eager: show a call of one of the tools as it grows, instead of when it is complete and right. A call that then
        breaks off stays a call with the arguments so far, and only the text behind it is content.
        only_these: a call of anything else is content.
        """
        self.tools = tuple(tools)
        self.argument_types = ArgumentTypes(tools)
        self._callees = Callees(frozenset(tool.name for tool in tools), eager, only_these)
        self._opening_markers = Markers(*self.openings)

    def parse(self, text: str) -> ParsedToolCalls:
        """The calls of a finished text."""
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
        """An id, as the model's template accepts it, for a call that came without one."""
        return f"call_{secrets.token_hex(12)}"

    @abstractmethod
    def read_block(self, cursor: TextCursor, sink: CallSink, opening: str) -> Reading[None]:
        """Read calls from behind `opening`, or from a bare opening where it is "".

        Raises: UnexpectedText where the text is no such block; what is behind the last complete call is then content.
        """

    def read(self, cursor: TextCursor, sink: CallSink) -> Reading[None]:
        """Read a whole text."""
        sink.content((yield from cursor.space()))
        if (yield from cursor.peek()) in self.bare_openings:
            yield from self._try_block(cursor, sink, "")
        while opening := (yield from cursor.pass_until(self._opening_markers, sink.content)):
            yield from self._try_block(cursor, sink, opening)

    def _try_block(self, cursor: TextCursor, sink: CallSink, opening: str) -> Reading[None]:
        """Read a block, or go back to where it stopped being one: a call that was shown cannot be taken back."""
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
    """One text on its way through a parser. Mutable, one per text."""

    def __init__(self, parser: ToolCallParser, callees: Callees) -> None:
        self._cursor = TextCursor()
        self._sink = CallSink(self._cursor, callees)
        self._reading = parser.read(self._cursor, self._sink)

    def push(self, delta_text: str) -> list[Delta]:
        """Take more text. Returns what it makes certain."""
        self._cursor.push(delta_text)
        next(self._reading, None)
        return self._sink.drain()

    def finish(self) -> list[Delta]:
        """The text is complete. Returns what was held back."""
        self._cursor.end()
        next(self._reading, None)
        self._sink.finish()
        return self._sink.drain()
