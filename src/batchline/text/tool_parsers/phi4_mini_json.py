"""Phi-4-mini: `functools[{"name": ..., "arguments": {...}}, ...]`.

Format: vLLM's template for Phi-4-mini, "prefix function calls with functools marker (no closing marker required)", and
its `phi4_mini_json` parser; and the model's own tokens, `<|tool_call|>` before a list or an object and
`<|/tool_call|>` after it, as in llama.cpp's template. The word `functools` in code is content.
"""

from __future__ import annotations

from batchline.text.text_cursor import Reading, TextCursor
from batchline.text.tool_parsers.base import ToolCallParser
from batchline.text.tool_parsers.json_calls import read_call_list, read_calls
from batchline.text.tool_parsers.registry import register_tool_parser
from batchline.text.tool_parsers.sink import CallSink


@register_tool_parser("phi4_mini_json")
class Phi4MiniJsonToolParser(ToolCallParser):
    """Calls as a JSON list after a word."""

    openings = ("functools", "<|tool_call|>")
    special_tokens = ("<|tool_call|>", "<|/tool_call|>")

    @classmethod
    def recognizes(cls, template: str) -> bool:
        has_tokens = "<|tool|>" in template and "<|/tool|>" in template
        return "functools[" in template or has_tokens

    def read_block(self, cursor: TextCursor, sink: CallSink, opening: str) -> Reading[None]:
        if opening == "functools":
            yield from read_call_list(cursor, sink)
        else:
            yield from read_calls(cursor, sink)
            yield from cursor.optional("<|/tool_call|>")
