"""Questions to the grammar engine, most of which need no model's tokenizer."""

from __future__ import annotations

import llguidance

from batchline.text.grammars.lark import Grammar, lark

MAX_ALTERNATIVES = 20_000

LIMITS = llguidance.LLParserLimits(
    verbose_errors=False, max_items_in_row=MAX_ALTERNATIVES + 100, step_max_items=10 * MAX_ALTERNATIVES
)
"""What a grammar may take: the engine's defaults, but for how many alternatives there may be at one place of the text.
Its messages do not repeat the grammar."""

_BYTES = llguidance.LLTokenizer("byte")


def refusal(source: str, tokenizer: llguidance.LLTokenizer = _BYTES) -> str | None:
    """Why the engine refuses a grammar, None if it takes it. A warning counts: it tells of what would be left out."""
    _, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source, tokenizer, limits=LIMITS)
    return messages[0] if messages else None


def engine_regex(pattern: str) -> str:
    """A regular expression as it stands between slashes in a grammar; `\\d`, `\\w` and their opposites are ASCII."""
    return str(llguidance.regex_to_lark(pattern, use_ascii="dw"))


def matches_nothing_but(pattern: str, allowed: str) -> bool:
    """Whether every text that a valid `pattern` matches is matched by `allowed` too."""
    more = Grammar(lark(f"start: MORE\nMORE: /{engine_regex(pattern)}/ & ~/{allowed}/")).serialised()
    state = llguidance.LLMatcher(_BYTES, more, log_level=0, limits=LIMITS)
    return state.is_error() or not any(state.compute_bitmask()) or state.is_error()
