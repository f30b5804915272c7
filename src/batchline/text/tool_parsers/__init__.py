"""Finds tool calls in a model's text: a parser for each format, by name or detected from the chat template.

Knows no wire schema and no tokens: text in, content and calls out, at once or in pieces. `batchline.text.reasoning`
removes the reasoning before.
"""

from batchline.text.parser_registry import load_plugin
from batchline.text.tool_parsers.base import ToolCallParser, ToolCallStream
from batchline.text.tool_parsers.calls import (
    ContentDelta,
    Delta,
    ParsedToolCalls,
    ToolCall,
    ToolCallDelta,
    ToolDefinition,
    assemble,
)
from batchline.text.tool_parsers.deepseek_v3 import DeepSeekV3ToolParser
from batchline.text.tool_parsers.granite import GraniteToolParser
from batchline.text.tool_parsers.hermes import HermesToolParser
from batchline.text.tool_parsers.internlm import InternLmToolParser
from batchline.text.tool_parsers.jamba import JambaToolParser
from batchline.text.tool_parsers.llama3_json import Llama3JsonToolParser
from batchline.text.tool_parsers.mistral import MistralToolParser
from batchline.text.tool_parsers.phi4_mini_json import Phi4MiniJsonToolParser
from batchline.text.tool_parsers.pythonic import PythonicToolParser
from batchline.text.tool_parsers.qwen3_coder import Qwen3CoderToolParser
from batchline.text.tool_parsers.registry import (
    detect_tool_parser,
    register_tool_parser,
    tool_parser,
    tool_parser_names,
)

__all__ = [
    "ContentDelta",
    "DeepSeekV3ToolParser",
    "Delta",
    "GraniteToolParser",
    "HermesToolParser",
    "InternLmToolParser",
    "JambaToolParser",
    "Llama3JsonToolParser",
    "MistralToolParser",
    "ParsedToolCalls",
    "Phi4MiniJsonToolParser",
    "PythonicToolParser",
    "Qwen3CoderToolParser",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallParser",
    "ToolCallStream",
    "ToolDefinition",
    "assemble",
    "detect_tool_parser",
    "load_plugin",
    "register_tool_parser",
    "tool_parser",
    "tool_parser_names",
]
