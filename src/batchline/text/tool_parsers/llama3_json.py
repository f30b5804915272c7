"""Llama 3.1 to 3.3 and Llama 4 with JSON: the message is `{"name": ..., "parameters": {...}}`.

Format: Meta's chat templates, "Respond in the format {"name": function name, "parameters": dictionary of argument name
and its value}"; vLLM's `llama3_json` parser. `<|python_tag|>` may come first; several calls are separated by `;`.
Without the tag, only an object with arguments at the beginning of the text is a call. Any other JSON is an answer.
"""

from __future__ import annotations

from batchline.text.text_cursor import Reading, TextCursor
from batchline.text.tool_parsers.base import ToolCallParser
from batchline.text.tool_parsers.json_calls import read_call_object
from batchline.text.tool_parsers.registry import register_tool_parser
from batchline.text.tool_parsers.sink import CallSink


@register_tool_parser("llama3_json")
class Llama3JsonToolParser(ToolCallParser):
    """Calls as bare JSON objects."""

    openings = ("<|python_tag|>",)
    bare_openings = ("{",)
    special_tokens = ("<|python_tag|>",)

    @classmethod
    def recognizes(cls, template: str) -> bool:
        return '"parameters": dictionary of argument name' in template or (
            "<|python_tag|>" in template and "<|start_header_id|>" in template
        )

    def read_block(self, cursor: TextCursor, sink: CallSink, opening: str) -> Reading[None]:
        while True:
            yield from cursor.space()
            yield from read_call_object(cursor, sink, needs_arguments=True)
            has_separator = yield from cursor.optional(";")
            if not has_separator and not (yield from _object_follows(cursor)):
                return


def _object_follows(cursor: TextCursor) -> Reading[bool]:
    start = cursor.position
    yield from cursor.space()
    follows = (yield from cursor.peek()) == "{"
    cursor.position = start
    return follows
