"""Counting a run while it goes on: what is durable, how fast it grows, how long is left.

Owns the numbers and the interface of whoever shows them; shows nothing itself.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from batchline.backends.base import BackendStats
from batchline.batch.journal import Outcome
from batchline.model_record import ModelRecord

logger = logging.getLogger(__name__)

T = TypeVar("T")

_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One look at a run. Rates are over the last half minute; eta_s is None until there is a rate.

    prompt_tokens, cached_tokens and output_tokens: the backend's counters since it was started. models: those that it
    has loaded.
    """

    done: int
    total: int
    failed: int
    resumed: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    eta_s: float | None = None
    models: tuple[ModelRecord, ...] = ()


class Reporter(Protocol):
    """Whoever tells people how a run goes."""

    def phase(self, text: str) -> None:
        """A new phase begins: "Checking in.jsonl"."""

    def progress(self, progress: Progress) -> None:
        """The run has come this far; called about twice a second while requests run, and once at their end."""

    def warn(self, text: str) -> None:
        """Something a person should know that does not stop the run."""


class SilentReporter:
    """Tells nobody anything."""

    def phase(self, text: str) -> None:
        """Ignored."""

    def progress(self, progress: Progress) -> None:
        """Ignored."""

    def warn(self, text: str) -> None:
        """Ignored."""


class GuardedReporter:
    """Passes everything on to `inner`, whose failures cost a run nothing: a closed terminal, a fault in a callback."""

    def __init__(self, inner: Reporter) -> None:
        self._inner = inner

    def phase(self, text: str) -> None:
        """Passed on."""
        self._guarded(self._inner.phase, text)

    def progress(self, progress: Progress) -> None:
        """Passed on."""
        self._guarded(self._inner.progress, progress)

    def warn(self, text: str) -> None:
        """Passed on."""
        self._guarded(self._inner.warn, text)

    def _guarded(self, tell: Callable[[T], None], what: T) -> None:
        try:
            tell(what)
        except Exception:
            logger.debug("the reporter failed", exc_info=True)


class Tally:
    """Adds up outcomes once they are durable."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.done = 0
        self.answered = 0
        self.failed = 0
        self.resumed = 0
        self.copies = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.failures_by_code: dict[str, int] = {}
        self._clock = clock
        self._samples: deque[tuple[float, int, int, int]] = deque()

    def add(self, outcome: Outcome, *, is_resumed: bool = False) -> None:
        """Count one line that is done. is_resumed: an earlier run did it."""
        self.done += 1
        self.resumed += is_resumed
        self.answered += outcome.is_answer
        self.copies += outcome.is_copy
        self.prompt_tokens += outcome.prompt_tokens
        self.cached_tokens += outcome.cached_tokens
        self.output_tokens += outcome.output_tokens
        if outcome.is_failure:
            self.failed += 1
            self.failures_by_code[outcome.status] = self.failures_by_code.get(outcome.status, 0) + 1

    def snapshot(self, stats: BackendStats, models: tuple[ModelRecord, ...] = ()) -> Progress:
        """How the run stands now. stats: the backend's counters, which move before whole answers arrive. models: those
        that it has loaded."""
        now = self._clock()
        self._samples.append((now, self.done, stats.prompt_tokens, stats.output_tokens))
        while now - self._samples[0][0] > _WINDOW_S and len(self._samples) > 2:
            self._samples.popleft()
        since, done, prompt, output = self._samples[0]
        elapsed = max(now - since, 1e-9)
        rate = (self.done - done) / elapsed
        return Progress(
            done=self.done,
            total=self.total,
            failed=self.failed,
            resumed=self.resumed,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            output_tokens=stats.output_tokens,
            requests_per_s=rate,
            prompt_tokens_per_s=(stats.prompt_tokens - prompt) / elapsed,
            output_tokens_per_s=(stats.output_tokens - output) / elapsed,
            eta_s=(self.total - self.done) / rate if rate > 0 else None,
            models=models,
        )
