"""DeepSeek V3, R1 and V3.1: calls between special tokens, all of them between `tool▁calls▁begin` and `tool▁calls▁end`.

Format: DeepSeek's chat templates. V3 and R1 write `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a Markdown block
of JSON with the arguments, and `<｜tool▁call▁end｜>`. V3.1 writes the name before `<｜tool▁sep｜>` and bare JSON
after it. This parser reads both; vLLM has `deepseek_v3` and `deepseek_v31`.
"""

from __future__ import annotations

import re

from batchline.text.text_cursor import Reading, TextCursor
from batchline.text.tool_parsers.base import ToolCallParser
from batchline.text.tool_parsers.json_calls import read_arguments
from batchline.text.tool_parsers.registry import register_tool_parser
from batchline.text.tool_parsers.sink import CallSink

_CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
_CALL_BEGIN = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_WORD = re.compile(r"[^<{\n]*")


@register_tool_parser("deepseek_v3")
class DeepSeekV3ToolParser(ToolCallParser):
    """Calls as a name and JSON between special tokens."""

    openings = (_CALLS_BEGIN, _CALL_BEGIN)
    special_tokens = (_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR)

    @classmethod
    def recognizes(cls, template: str) -> bool:
        return _CALL_BEGIN in template

    def read_block(self, cursor: TextCursor, sink: CallSink, opening: str) -> Reading[None]:
        if opening == _CALLS_BEGIN:
            yield from cursor.space()
            yield from cursor.expect(_CALL_BEGIN)
        while True:
            yield from _read_call(cursor, sink)
            if not (yield from cursor.optional(_CALL_BEGIN)):
                break
        yield from cursor.optional(_CALLS_END)


def _read_call(cursor: TextCursor, sink: CallSink) -> Reading[None]:
    name = yield from cursor.run(_WORD)
    yield from cursor.expect(_SEPARATOR)
    is_fenced = (yield from cursor.peek()) != "{"
    if is_fenced:
        name = yield from cursor.run(_WORD)
        yield from cursor.space()
        yield from cursor.literal(f"{_FENCE}json")
        yield from cursor.space()
    yield from read_arguments(cursor, sink, name.strip())
    if is_fenced:
        yield from cursor.optional(_FENCE)
    yield from cursor.optional(_CALL_END)
