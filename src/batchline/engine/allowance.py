"""How many tokens of batch work a step may hold, so that it does not slow the requests that clients wait for. No torch.

A new request waits for the running step. For a while after a client's request, steps of batch work are therefore short:
they take a set share of the time from the start of clients' requests to their first token. The allowance follows the
measured length of steps. A step that computes a client's prompt usually contains no batch work (`Scheduler`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from batchline.engine.step import Step

LATELY_S = 60.0
"""How long clients count as present after their last request."""

FEWEST_TOKENS = 16
"""Batch work never stops completely: a step costs almost as much without these tokens."""

NUM_SAMPLES = 64


class BatchAllowance:
    """The limit of a step's tokens of batch work. Mutable; follows what is noted.

    limit: None if there is none.
    """

    def __init__(self, max_delay: float | None, most_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        """max_delay: see `SchedulerConfig`; None never limits. most_tokens: the limit while there are no clients."""
        self.limit = None if max_delay is None else most_tokens
        self._max_delay = max_delay
        self._most_tokens = most_tokens
        self._clock = clock
        self._latest_client_at: float | None = None
        self._first_token_s: deque[float] = deque(maxlen=NUM_SAMPLES)

    def note_first_token(self, seconds: float) -> None:
        """A client's request got its first token this many seconds after its start."""
        self._first_token_s.append(seconds)

    def note_step(self, step: Step, seconds: float) -> None:
        """A step took so long."""
        if self.limit is None:
            return
        now = self._clock()
        if any(chunk.sequence.kind == 0 for chunk in step.chunks):
            self._latest_client_at = now
        num_tokens = sum(chunk.num_tokens for chunk in step.chunks if chunk.sequence.kind > 0)
        if not num_tokens:
            return
        allowed_s = self._allowed_s(now)
        if allowed_s is not None and seconds > allowed_s:
            self._set(num_tokens * max(0.5, allowed_s / seconds))
        elif num_tokens >= self.limit:
            self._set(num_tokens * (1.25 if allowed_s is None else min(1.25, allowed_s / max(seconds, 1e-9))))

    def _allowed_s(self, now: float) -> float | None:
        """How long a step of batch work may take; None while there are no clients."""
        is_alone = self._latest_client_at is None or now - self._latest_client_at > LATELY_S
        if self._max_delay is None or is_alone or not self._first_token_s:
            return None
        return self._max_delay * median(self._first_token_s)

    def _set(self, limit: float) -> None:
        self.limit = min(self._most_tokens, max(FEWEST_TOKENS, round(limit)))
