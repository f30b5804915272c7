"""Following one text token by token through a compiled grammar.

A text ends by a token of its request's choosing, which is no text to the grammar. So the engine is told of an end token
of its own, `END`, that no model has; wherever the engine allows it, the request's end tokens are allowed instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import llguidance
import numpy as np

from batchline.errors import ConstraintFailed
from batchline.text.grammars.patterns import one_line

MASK_SECONDS = 0.02
"""Processor time that a text's masks may take each, on average; ordinary ones take 0.1 to 1 ms."""

FIRST_SECONDS = 1.0
"""What they may take in all beyond that: first masks also build the lexer's tables."""


@contextmanager
def _engine_faults() -> Iterator[None]:
    """Any exception of the engine, a panic too, as the request's own error. Raises: ConstraintFailed."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:  # a panic of the engine is not an `Exception`
        raise ConstraintFailed("the constraint cannot be followed any further: the grammar engine failed") from exc


class CompiledGrammar:
    """A grammar at the beginning of its text. Immutable; every text follows a matcher of its own."""

    def __init__(self, start: llguidance.LLMatcher, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        """start: never advanced. vocab_size: of the model, and so the id of `END`. end_token_ids: what ends a text."""
        self._start = start
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids

    def ended_by(self, end_token_ids: frozenset[int]) -> CompiledGrammar:
        """The same grammar for texts that end by other tokens."""
        return CompiledGrammar(self._start, self._vocab_size, end_token_ids)

    def matcher(self) -> GrammarMatcher:
        """A matcher at the beginning of a text. Raises: ConstraintFailed."""
        with _engine_faults():
            start = self._start.deep_copy()
        return GrammarMatcher(start, self._vocab_size, self._end_token_ids)


class GrammarMatcher:
    """Where one text stands. Mutable, used by one thread at a time."""

    def __init__(self, state: llguidance.LLMatcher, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        self._state = state
        self._end = vocab_size
        self._words = np.empty(vocab_size // 32 + 1, dtype=np.int32)  # of all tokens, and END as the last
        self._seconds_left = FIRST_SECONDS
        self._ends = [(token_id // 32, np.int32(_bit(token_id))) for token_id in end_token_ids]

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing could follow it."""
        return bool(self._state.is_stopped())

    def fill_mask(self, row: np.ndarray) -> None:
        """Set the bits of the tokens that may come next, clear all others. Releases the interpreter lock.

        row: (ceil(vocab_size / 32),) int32. Raises: ConstraintFailed.
        """
        began = time.thread_time()
        with _engine_faults():
            self._state.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        self._spend(time.thread_time() - began)
        end = np.int32(_bit(self._end))
        may_end = self._words[-1] & end != 0
        self._words[-1] &= ~end
        row[:] = self._words[: len(row)]
        for word, bit in self._ends:
            row[word] = row[word] | bit if may_end else row[word] & ~bit

    def accept(self, token_id: int) -> None:
        """Go on behind a token. Raises: ConstraintFailed."""
        with _engine_faults():
            self._state.consume_token(token_id)
        self._check()

    def _spend(self, seconds: float) -> None:
        """Account for a mask's processor time: one slow mask is no harm, but many would slow all other requests."""
        self._seconds_left += MASK_SECONDS - seconds
        if self._seconds_left < 0:
            raise ConstraintFailed(
                f"the constraint is too complex to be followed: its tokens take more than {MASK_SECONDS * 1000:.0f} ms "
                "of processor time each"
            )

    def _check(self) -> None:
        if self._state.is_error():
            reason = one_line(self._state.get_error())
            raise ConstraintFailed(f"the constraint cannot be followed any further: {reason}")


def _bit(token_id: int) -> int:
    """The token's bit of its word, as a signed number."""
    bit = 1 << token_id % 32
    return bit - (1 << 32) if bit >= 1 << 31 else bit
