"""Granite 3 and 4: `<|tool_call|>` and a JSON list of calls.

Format: IBM's chat templates, "respond only with <|tool_call|> followed by a JSON list of tools used" (3.0 to 3.3);
`<tool_call>` as text in 3.1; an object between `<tool_call>` tags in 4.0; vLLM's `granite` parser, which also takes a
list at the beginning of the text without any marker.
"""

from __future__ import annotations

from batchline.text.text_cursor import Reading, TextCursor
from batchline.text.tool_parsers.base import ToolCallParser
from batchline.text.tool_parsers.json_calls import read_calls
from batchline.text.tool_parsers.registry import register_tool_parser
from batchline.text.tool_parsers.sink import CallSink


@register_tool_parser("granite")
class GraniteToolParser(ToolCallParser):
    """Calls as a JSON list after a token."""

    openings = ("<|tool_call|>", "<tool_call>")
    bare_openings = ("[",)
    special_tokens = ("<|tool_call|>", "<tool_call>", "</tool_call>")

    @classmethod
    def recognizes(cls, template: str) -> bool:
        has_marker = any(marker in template for marker in cls.openings)
        return "<|start_of_role|>" in template and has_marker

    def read_block(self, cursor: TextCursor, sink: CallSink, opening: str) -> Reading[None]:
        yield from read_calls(cursor, sink, needs_arguments=not opening)
        yield from cursor.optional("</tool_call>")
