"""Calls whose text a grammar holds to one format, whatever the model was trained to write.

`tool_choice` "required" asks for a JSON list of calls, `{"name": ..., "parameters": {...}}` each, spelled as
`batchline.text.grammars.lark.calls` has it; the choice of a function asks for its arguments alone. Such text is shown
as it grows: it cannot turn out to be no call. Where it breaks off, at the token limit or a stop string, a call whose
name is known stays one with the arguments so far, and nothing of it is content.
"""

from __future__ import annotations

from batchline.text.text_cursor import Reading, TextCursor, UnexpectedText
from batchline.text.tool_parsers.base import ToolCallParser
from batchline.text.tool_parsers.json_calls import read_arguments, read_container, read_value
from batchline.text.tool_parsers.json_text import strict_loads
from batchline.text.tool_parsers.sink import CallSink


class EnforcedParser(ToolCallParser):
    """A text that is calls and nothing else."""

    def __init__(self) -> None:
        super().__init__(eager=True)

    def read(self, cursor: TextCursor, sink: CallSink) -> Reading[None]:
        yield from cursor.space()
        try:
            yield from self.read_block(cursor, sink, "")
        except UnexpectedText:  # the text ends before its calls do
            sink.abandon_call()


class CallListParser(EnforcedParser):
    """A list of calls."""

    def read_block(self, cursor: TextCursor, sink: CallSink, opening: str) -> Reading[None]:
        yield from cursor.expect("[")
        yield from _read_call(cursor, sink)
        while (yield from cursor.literal(", ")):
            yield from _read_call(cursor, sink)


class ArgumentsParser(EnforcedParser):
    """The arguments of one call of a known function."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self._function = function

    def read_block(self, cursor: TextCursor, sink: CallSink, opening: str) -> Reading[None]:
        yield from read_arguments(cursor, sink, self._function)


def _read_call(cursor: TextCursor, sink: CallSink) -> Reading[None]:
    """A call, which is open from where its name is known. Raises: UnexpectedText."""
    yield from cursor.expect('{"name": ')
    sink.open_call(strict_loads((yield from read_value(cursor))))
    yield from cursor.expect(', "parameters": ')
    yield from read_container(cursor, sink.arguments)
    yield from cursor.expect("}")
    sink.close_call()
