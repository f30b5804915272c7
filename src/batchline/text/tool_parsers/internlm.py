"""InternLM 2 and 2.5: `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`.

Format: InternLM's chat format documentation and Lagent; vLLM's `internlm` parser. The text after
`<|action_start|><|interpreter|>` is code for an interpreter and not a call, so it stays content.
"""

from __future__ import annotations

from batchline.text.text_cursor import Reading, TextCursor
from batchline.text.tool_parsers.base import ToolCallParser
from batchline.text.tool_parsers.json_calls import read_call_object
from batchline.text.tool_parsers.registry import register_tool_parser
from batchline.text.tool_parsers.sink import CallSink


@register_tool_parser("internlm")
class InternLmToolParser(ToolCallParser):
    """Calls as JSON objects between special tokens."""

    openings = ("<|action_start|><|plugin|>",)
    special_tokens = ("<|action_start|>", "<|plugin|>", "<|action_end|>")

    @classmethod
    def recognizes(cls, template: str) -> bool:
        return "<|action_start|>" in template and "<|plugin|>" in template

    def read_block(self, cursor: TextCursor, sink: CallSink, opening: str) -> Reading[None]:
        yield from cursor.space()
        yield from read_call_object(cursor, sink)
        yield from cursor.optional("<|action_end|>")
