"""Finds tool calls in a model's text: a parser for each format, by name or detected from the chat template.

Knows no wire schema and no tokens: text in, content and calls out, at once or in pieces. `batchline.text.reasoning`
removes the reasoning first.
"""

from batchline.plugins import load_plugin
from batchline.text.text_cursor import ContentDelta, MessagePart, ToolCallDelta
from batchline.text.tool_parsers.base import (
    CallSink,
    ParsedToolCalls,
    ToolCall,
    ToolCallParser,
    assemble,
    detect_tool_parser,
    register_tool_parser,
    tool_parser,
    tool_parser_names,
)
from batchline.text.tool_parsers.json_formats import (
    DeepSeekV3ToolParser,
    GraniteToolParser,
    HermesToolParser,
    InternLmToolParser,
    JambaToolParser,
    Llama3JsonToolParser,
    MistralToolParser,
    Phi4MiniJsonToolParser,
)
from batchline.text.tool_parsers.pythonic import PythonicToolParser
from batchline.text.tool_parsers.qwen3_coder import Qwen3CoderToolParser
from batchline.text.tool_parsers.schema_types import ToolDefinition

__all__ = [
    "CallSink",
    "ContentDelta",
    "DeepSeekV3ToolParser",
    "GraniteToolParser",
    "HermesToolParser",
    "InternLmToolParser",
    "JambaToolParser",
    "Llama3JsonToolParser",
    "MessagePart",
    "MistralToolParser",
    "ParsedToolCalls",
    "Phi4MiniJsonToolParser",
    "PythonicToolParser",
    "Qwen3CoderToolParser",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallParser",
    "ToolDefinition",
    "assemble",
    "detect_tool_parser",
    "load_plugin",
    "register_tool_parser",
    "tool_parser",
    "tool_parser_names",
]
