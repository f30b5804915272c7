"""Notices when an output has begun to repeat itself. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_ROOM = 256
"""After so many tokens, the newest ones are moved to make room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """An output ends if a pattern of `min_size` to `max_size` tokens occurs `count` times (2 or more) in a row."""

    min_size: int
    max_size: int
    count: int


class RepetitionTracker:
    """Follows one output. Mutable. Each token costs two operations on as many numbers as there are pattern sizes.

    For each size, it keeps the last position whose token differs from the one that far before it. A pattern of that
    size occurs n times in a row once the (n - 1) * size tokens after that position are all equal.
    """

    def __init__(self, wanted: Repetition) -> None:
        self._wanted = wanted
        sizes = np.arange(wanted.min_size, wanted.max_size + 1)
        self._num_needed = sizes * (wanted.count - 1)
        self._last_different = np.zeros_like(sizes)
        self._differs = np.empty(len(sizes), dtype=np.bool_)
        self._recent = np.full(wanted.max_size + _ROOM, -1, dtype=np.int64)  # newest first, from `_newest` on
        self._newest = _ROOM
        self._num_tokens = 0
        self._due = int(self._num_needed.min())  # there is no repetition before so many tokens

    def push(self, token_id: int) -> bool:
        """Take the next token of the output. Returns whether the output repeats itself now."""
        self._num_tokens += 1
        first = self._newest - 1
        before = self._recent[first + self._wanted.min_size : first + self._wanted.max_size + 1]
        np.not_equal(before, token_id, out=self._differs)
        np.copyto(self._last_different, self._num_tokens, where=self._differs)
        self._remember(token_id)
        if self._num_tokens < self._due:
            return False
        self._due = int((self._last_different + self._num_needed).min())
        return self._num_tokens >= self._due

    def _remember(self, token_id: int) -> None:
        if not self._newest:  # move the tokens that are still read to the other end
            self._recent[_ROOM:] = self._recent[:-_ROOM].copy()
            self._newest = _ROOM
        self._newest -= 1
        self._recent[self._newest] = token_id
