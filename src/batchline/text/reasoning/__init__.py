"""Separates a model's reasoning from its content: a parser for each format, by name or detected from the chat template.

Knows no wire schema and no tokens: text in, reasoning and content out, at once or in pieces. A tool-call parser reads
the content next.
"""

from batchline.text.parser_registry import load_plugin
from batchline.text.reasoning.base import ParsedReasoning, ReasoningParser, ReasoningStream
from batchline.text.reasoning.deepseek_r1 import DeepSeekR1ReasoningParser
from batchline.text.reasoning.granite import GraniteReasoningParser
from batchline.text.reasoning.mistral import MistralReasoningParser
from batchline.text.reasoning.qwen3 import Qwen3ReasoningParser
from batchline.text.reasoning.registry import (
    detect_reasoning_parser,
    reasoning_parser,
    reasoning_parser_names,
    register_reasoning_parser,
)
from batchline.text.reasoning.sink import ContentDelta, Delta, ReasoningDelta, ReasoningSink

__all__ = [
    "ContentDelta",
    "DeepSeekR1ReasoningParser",
    "Delta",
    "GraniteReasoningParser",
    "MistralReasoningParser",
    "ParsedReasoning",
    "Qwen3ReasoningParser",
    "ReasoningDelta",
    "ReasoningParser",
    "ReasoningSink",
    "ReasoningStream",
    "detect_reasoning_parser",
    "load_plugin",
    "reasoning_parser",
    "reasoning_parser_names",
    "register_reasoning_parser",
]
