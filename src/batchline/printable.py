"""Text from outside, made safe to print: names and messages may contain characters that a terminal obeys.

A name such as `\\x1b]0;...` would set a terminal's title or move its cursor, and a line break would forge a line of a
log.
"""

from __future__ import annotations

import json
import unicodedata


def printable(text: str, *, keep: str = "") -> str:
    """The text with every invisible character but spaces as its escape, such as `\\x1b`. keep: characters that stay."""
    if text.isprintable():
        return text
    return "".join(char if _is_visible(char) or char in keep else ascii(char)[1:-1] for char in text)


def printable_json(text: str) -> str:
    """The same JSON, with the invisible characters of its strings as JSON's escapes."""
    if text.isprintable():
        return text
    return "".join(char if _is_visible(char) or char == "\n" else json.dumps(char)[1:-1] for char in text)


def _is_visible(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"
