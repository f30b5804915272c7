"""Qwen 3 and others with `<think>...</think>`, where the model or the prompt decides whether to reason.

Format: Qwen's chat templates and vLLM's `qwen3` parser. Qwen3's template leaves the tags to the model, or ends the
prompt with an empty pair if `enable_thinking` is false. The templates of thinking-only models end it with `<think>`.
"""

from __future__ import annotations

from batchline.text.reasoning.base import ReasoningParser
from batchline.text.reasoning.registry import register_reasoning_parser

_OTHER_FORMATS = ("<｜Assistant｜>", "<response>", "[THINK]")


@register_reasoning_parser("qwen3")
class Qwen3ReasoningParser(ReasoningParser):
    """Reasons if the text or the prompt has the tag."""

    starts = ("<think>",)
    ends = ("</think>",)
    special_tokens = ("<think>", "</think>")

    @classmethod
    def recognizes(cls, template: str) -> bool:
        return "</think>" in template and not any(marker in template for marker in _OTHER_FORMATS)
