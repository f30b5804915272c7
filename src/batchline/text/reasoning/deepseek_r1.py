"""DeepSeek R1, its distillations, and V3.1: `<think>...</think>`.

Format: DeepSeek's chat templates. R1's ends the prompt with `<think>`; with older templates the model writes the tag.
The template of V3.1 ends the prompt with `</think>` for an answer without reasoning. A text without a start tag is
reasoning, as in vLLM's `deepseek_r1` parser.
"""

from __future__ import annotations

from batchline.text.reasoning.base import ReasoningParser
from batchline.text.reasoning.registry import register_reasoning_parser


@register_reasoning_parser("deepseek_r1")
class DeepSeekR1ReasoningParser(ReasoningParser):
    """Reasons unless the prompt says otherwise."""

    starts = ("<think>",)
    ends = ("</think>",)
    special_tokens = ("<think>", "</think>")
    always_reasons = True

    @classmethod
    def recognizes(cls, template: str) -> bool:
        return "</think>" in template and "<｜Assistant｜>" in template
