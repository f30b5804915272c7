"""Notices when an output has begun to repeat itself. Imports no torch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """An output ends if a pattern of `min_size` to `max_size` tokens occurs `count` times (2 or more) in a row."""

    min_size: int
    max_size: int
    count: int


class RepetitionTracker:
    """Follows one output. Mutable. Each token costs the same: a few operations on `max_size` numbers.

    For each distance up to `max_size`, it counts how many of the last tokens equal the token that far before them. A
    pattern of that size occurs n times in a row once (n - 1) * size tokens do.
    """

    def __init__(self, wanted: Repetition) -> None:
        sizes = np.arange(1, wanted.max_size + 1)
        self._num_equal = np.zeros(wanted.max_size, dtype=np.int64)
        self._num_needed = np.where(sizes < wanted.min_size, _NEVER, sizes * (wanted.count - 1))

    def push(self, token_ids: array[int], num_output: int) -> bool:
        """Take the last token; call this for each token. Returns whether the output repeats itself now.

        token_ids: 64-bit, the last `num_output` count.
        """
        tail = np.array(token_ids[-min(num_output, len(self._num_equal) + 1) :], dtype=np.int64)
        equal = tail[-2::-1] == tail[-1]
        counts = self._num_equal[: len(equal)]
        counts += 1
        counts *= equal
        return bool((self._num_equal >= self._num_needed).any())
