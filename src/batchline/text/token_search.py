"""Finds tokens of a fixed set in a text, as fast for a thousand tokens as for one.

The tokens become one pattern with a branch for each of their prefixes, so matching stops at the first character that
continues no token. Long texts are searched in slices, so that other threads can run in between.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import takewhile

SLICE_CHARACTERS = 64 * 1024

_MAX_DEPTH = 20
"""The pattern's deepest nesting, because Python's parser of patterns is recursive."""


class TokenSearch:
    """Finds tokens in texts. If several begin at the same position, the longest is found."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = frozenset(tokens)
        self._pattern = re.compile(_longest_of(self._tokens) if self._tokens else "(?!)")
        self._longest = max(map(len, self._tokens), default=1)

    def __contains__(self, text: str) -> bool:
        return text in self._tokens

    def first(self, text: str) -> str | None:
        """The first token in a text."""
        found = next(self.matches(text), None)
        return None if found is None else found[0]

    def matches(self, text: str) -> Iterator[re.Match[str]]:
        """The tokens in a text, from left to right, without overlap."""
        position = 0
        while position < len(text):
            end = position + SLICE_CHARACTERS
            for found in self._pattern.finditer(text, position, end + self._longest - 1):
                if found.start() >= end:
                    break  # it may continue after the searched part
                position = found.end()
                yield found
            position = max(position, end)

    def begins_with_ending(self, text: str) -> bool:
        """Whether preceding text and this one's beginning could form a token."""
        return any(text[:size] in self._endings for size in range(1, min(self._longest, len(text) + 1)))

    def ends_in_beginning(self, text: str) -> bool:
        """Whether this text's end and the following text could form a token."""
        return any(text[-size:] in self._beginnings for size in range(1, min(self._longest, len(text) + 1)))

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(token[:size] for token in self._tokens for size in range(1, len(token)))

    @cached_property
    def _endings(self) -> frozenset[str]:
        return frozenset(token[size:] for token in self._tokens for size in range(1, len(token)))


def _longest_of(texts: Iterable[str], depth: int = 0) -> str:
    """A pattern that matches the longest of the texts. An empty text among them makes it optional."""
    if depth == _MAX_DEPTH:
        return f"(?:{'|'.join(map(re.escape, sorted(texts, key=len, reverse=True)))})"
    by_first: defaultdict[str, list[str]] = defaultdict(list)
    is_optional = False
    for text in texts:
        if text:
            by_first[text[0]].append(text)
        else:
            is_optional = True
    branches = "|".join(_branch(by_first[char], depth) for char in sorted(by_first))
    if is_optional:
        return f"(?:{branches})?" if branches else ""
    return f"(?:{branches})" if len(by_first) > 1 else branches


def _branch(texts: list[str], depth: int) -> str:
    """A pattern that matches the longest of several texts that begin with the same character."""
    extremes = zip(min(texts), max(texts), strict=False)
    common = "".join(char for char, _ in takewhile(lambda pair: pair[0] == pair[1], extremes))
    return re.escape(common) + _longest_of([text[len(common) :] for text in texts], depth + 1)
