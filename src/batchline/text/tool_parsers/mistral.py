"""Mistral: `[TOOL_CALLS]` and a JSON list of calls, or in newer models a name and its arguments.

Format: mistral-common's tokenizers. Up to version 7 `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`; version
11 `[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, version 13 `[TOOL_CALLS]name[ARGS]{...}`, each call with its own marker.
vLLM's `mistral` parser reads the first and `name{...}`. Mistral's templates refuse ids of calls that are not 9
characters of a-z, A-Z, 0-9.
"""

from __future__ import annotations

import re
import secrets
import string

from batchline.text.text_cursor import Reading, TextCursor
from batchline.text.tool_parsers.base import ToolCallParser
from batchline.text.tool_parsers.json_calls import read_arguments, read_calls
from batchline.text.tool_parsers.registry import register_tool_parser
from batchline.text.tool_parsers.sink import CallSink

_NAME = re.compile(r"[\w.\-]*")
_ID_CHARACTERS = string.ascii_letters + string.digits


@register_tool_parser("mistral")
class MistralToolParser(ToolCallParser):
    """Calls after a special token."""

    openings = ("[TOOL_CALLS]",)
    special_tokens = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    @classmethod
    def recognizes(cls, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    @staticmethod
    def make_call_id() -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))

    def read_block(self, cursor: TextCursor, sink: CallSink, opening: str) -> Reading[None]:
        yield from cursor.space()
        if (yield from cursor.peek()) in ("[", "{"):
            yield from read_calls(cursor, sink)
        else:
            yield from _read_named_call(cursor, sink)


def _read_named_call(cursor: TextCursor, sink: CallSink) -> Reading[None]:
    name = yield from cursor.run(_NAME)
    call_id = None
    if (yield from cursor.literal("[CALL_ID]")):
        call_id = (yield from cursor.run(_NAME)) or None
    yield from cursor.optional("[ARGS]")
    yield from cursor.space()
    yield from read_arguments(cursor, sink, name, call_id)
