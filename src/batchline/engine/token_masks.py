"""Computes the masks of constrained sequences on separate threads while the model runs.

A step's masks depend only on the tokens before it. So they are started when the step is scheduled, and are usually
ready before its logits. The matchers work without the interpreter lock. No other code may use a matcher until its mask
is collected.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from batchline.engine.recovery import reraise_interrupt
from batchline.engine.request import TokenMatcher
from batchline.engine.sequence import Sequence as RunningSequence
from batchline.errors import EngineError, SequenceFailed

logger = logging.getLogger(__name__)

MAX_THREADS = 4
"""Masks take little time, and more threads would compete with the model's thread for the interpreter lock."""

MIN_SHARE = 8
"""This many masks take less time than waking up a thread."""


class StepMasks:
    """The masks of one step's constrained sequences, one row each, still being computed until `wait` returns."""

    def __init__(self, matchers: Sequence[TokenMatcher], vocab_size: int, executor: ThreadPoolExecutor) -> None:
        self._rows = np.empty((len(matchers), -(-vocab_size // 32)), dtype=np.int32)
        self._index = {id(matcher): row for row, matcher in enumerate(matchers)}
        self._failures: dict[int, EngineError] = {}
        self._futures: list[Future[None]] = []
        share = max(MIN_SHARE, -(-len(matchers) // MAX_THREADS))
        try:
            for first in range(0, len(matchers), share):
                self._futures.append(executor.submit(self._fill, matchers[first : first + share], first))
        except BaseException:
            self.wait()
            raise

    def wait(self) -> None:
        """Wait until no matcher is in use. Raises nothing: a matcher's exception becomes its `failure`."""
        for future in self._futures:
            future.result()

    def failure(self, matcher: TokenMatcher) -> EngineError | None:
        """Why there is no mask for a matcher; None if there is one. Call after `wait`."""
        return self._failures.get(self._index[id(matcher)])

    def rows(self, matchers: Sequence[TokenMatcher]) -> np.ndarray:
        """(len(matchers), ceil(vocabulary / 32)) int32, in the matchers' order. Call after `wait`."""
        return np.asarray(self._rows[[self._index[id(matcher)] for matcher in matchers]])

    def _fill(self, matchers: Sequence[TokenMatcher], first: int) -> None:
        for row, matcher in enumerate(matchers, start=first):
            failure = _fill_row(matcher, self._rows[row])
            if failure is not None:
                self._failures[row] = failure


def _fill_row(matcher: TokenMatcher, row: np.ndarray) -> EngineError | None:
    try:
        matcher.fill_mask(row)
    except EngineError as exc:
        return exc
    except BaseException as exc:
        reraise_interrupt(exc)
        logger.exception("a mask could not be computed")
        return SequenceFailed.because_of(exc)
    return None


class TokenMasks:
    """Starts the masks of steps. Its threads start with the first constrained sequence."""

    def __init__(self, vocab_size: int) -> None:
        """vocab_size: of the model's logits."""
        self._vocab_size = vocab_size
        self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="batchline-masks")

    def start(self, sequences: Sequence[RunningSequence]) -> StepMasks | None:
        """Start computing the masks of the constrained sequences; None if there are none."""
        matchers = [sequence.matcher for sequence in sequences if sequence.matcher is not None]
        return StepMasks(matchers, self._vocab_size, self._executor) if matchers else None

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown(wait=False)
