"""The thread of a pooling model.

The sequences of all callers wait in one queue, so that concurrent requests share batches. Only the thread touches torch
(through `run_batch`). An event loop gets all rows of a request at once, after the last one is computed. Cancelling a
call drops its waiting sequences.

A batch that fails runs again in halves until the sequence at fault is found. Its call fails; all others get their rows.
Batches that do not fit in memory are made smaller, and grow again after successful batches. The thread ends only if the
model fails on a probe that it passed before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchline.errors import EngineError, EngineOutOfMemory, NumbersNotFinite
from batchline.model_thread import ModelThread, ThreadCall
from batchline.pooling.batching import BatchLimits, LengthSortedQueue, TokenSequence

logger = logging.getLogger(__name__)

GROW_AFTER = 16
"""After this many good batches in a row, batches that had to shrink may double in size."""

Rows = NDArray[np.float32]

RunBatch = Callable[[Sequence[TokenSequence]], Rows]
"""Sequences with equal `num_prompt_tokens` -> one row each. Raises: EngineOutOfMemory, or anything for a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingStats:
    """Counters since the start. padding_tokens: computed padding. num_waiting: sequences in the queue now."""

    num_sequences: int = 0
    num_batches: int = 0
    num_tokens: int = 0
    padding_tokens: int = 0
    num_waiting: int = 0


class _Call(ThreadCall[Rows]):
    """One caller's running sequences, and the rows so far."""

    def __init__(self, sequences: Sequence[TokenSequence]) -> None:
        super().__init__()
        self.sequences = sequences
        self.rows: list[Rows | None] = [None] * len(sequences)
        self.num_missing = len(sequences)


@dataclass(frozen=True, slots=True)
class _Item:
    """The sequence at `index` of a call."""

    call: _Call
    index: int

    @property
    def sequence(self) -> TokenSequence:
        return self.call.sequences[self.index]


class PoolingWorker(ModelThread):
    """Runs the sequences of all callers in shared batches, on its own thread."""

    def __init__(
        self,
        run_batch: RunBatch,
        limits: BatchLimits,
        *,
        probe: Sequence[TokenSequence] = (),
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        """probe: a batch that the model has already run, if any. on_start: called first on the new thread."""
        self._run_batch = run_batch
        self._probe = probe
        self._max_tokens = limits.max_tokens
        self._good_batches = 0
        self._queue: LengthSortedQueue[_Item] = LengthSortedQueue(limits, lambda item: item.call.is_over)
        self._stats = PoolingStats()
        super().__init__("pooling", on_start)

    async def run(self, sequences: Sequence[TokenSequence], *, priority: int = 0) -> Rows:
        """One row for each of one or more sequences, in order: (num_sequences, row_size) float32.

        Lower priorities run earlier.

        Raises: EngineDead after `close` or a crash; EngineOutOfMemory, EngineError if the model failed on the
        sequences.
        """
        call = _Call(sequences)

        def enqueue() -> None:
            for index, sequence in enumerate(sequences):
                item = _Item(call, index)
                self._queue.add(item, length=len(sequence), group=sequence.num_prompt_tokens, priority=priority)

        return await self._outcome(call, enqueue)

    def stats(self) -> PoolingStats:
        """Counters since the start."""
        return self._stats

    def _work(self) -> bool:
        """One batch."""
        batch = self._next_batch()
        if batch is None:
            return False
        self._answer(batch)
        return True

    def _next_batch(self) -> list[_Item] | None:
        """Wait for work; None when closing."""
        with self._wake:
            while not self._is_closing:
                batch = self._queue.take_batch()
                for item in batch:
                    item.call.progress.has_started = True
                if batch:
                    return batch
                self._wake.wait()
        return None

    def _answer(self, items: Sequence[_Item]) -> None:
        """Run a batch, in smaller ones if it fails, and settle the calls that it completes or that fail with it."""
        items = [item for item in items if not item.call.is_over]
        if not items:
            return
        failure = self._run_whole(items)
        if failure is None:
            return
        if len(items) == 1:
            items[0].call.settle(failure)
            return
        del failure  # its traceback refers to the batch's tensors, whose memory the halves need
        middle = len(items) // 2
        self._answer(items[:middle])
        self._answer(items[middle:])

    def _run_whole(self, items: Sequence[_Item]) -> EngineError | None:
        """Run the items together and hand out their rows. Returns the error if that failed.

        Raises: the probe's exception, if the model also fails on the probe.
        """
        sequences = [item.sequence for item in items]
        try:
            rows = self._run_batch(sequences)
            broken = set(np.flatnonzero(~np.isfinite(rows).all(axis=1)).tolist())
            if len(rows) != len(items):
                raise EngineError(f"the model returned {len(rows)} rows for {len(items)} sequences")
        except EngineOutOfMemory as exc:
            self._shrink(sequences)
            return exc
        except Exception as exc:  # the model's code may raise anything; its callers get a typed error
            logger.warning("a batch of %d sequences failed", len(sequences), exc_info=len(sequences) == 1)
            failure = EngineError("the model failed on this input")
            failure.__cause__ = exc
        else:
            self._count(sequences)
            self._grow()
            for index, (item, row) in enumerate(zip(items, rows, strict=True)):
                _hand_out(item, None if index in broken else row)
            return None
        if self._probe:
            self._run_batch(self._probe)
        return failure

    def _shrink(self, sequences: Sequence[TokenSequence]) -> None:
        """Halve the batch size after a batch that did not fit in memory."""
        self._good_batches = 0
        if len(sequences) > 1:
            padded_tokens = len(sequences) * max(len(sequence) for sequence in sequences)
            self._queue.max_tokens = max(1, min(self._queue.max_tokens, padded_tokens) // 2)
            logger.warning("a batch did not fit in memory; batches are now at most %d tokens", self._queue.max_tokens)

    def _grow(self) -> None:
        self._good_batches += 1
        if self._good_batches >= GROW_AFTER and self._queue.max_tokens < self._max_tokens:
            self._good_batches = 0
            self._queue.max_tokens = min(self._max_tokens, 2 * self._queue.max_tokens)

    def _count(self, sequences: list[TokenSequence]) -> None:
        num_tokens = sum(len(sequence) for sequence in sequences)
        padded_tokens = len(sequences) * max(len(sequence) for sequence in sequences)
        before = self._stats
        self._stats = PoolingStats(
            num_sequences=before.num_sequences + len(sequences),
            num_batches=before.num_batches + 1,
            num_tokens=before.num_tokens + num_tokens,
            padding_tokens=before.padding_tokens + padded_tokens - num_tokens,
            num_waiting=len(self._queue),
        )


def _hand_out(item: _Item, row: NDArray[np.float32] | None) -> None:
    """Give a call one of its rows. None: the model computed NaN or infinite numbers."""
    call = item.call
    if row is None:
        call.settle(NumbersNotFinite("the model computed numbers for this input that are not finite"))
        return
    call.rows[item.index] = row
    call.num_missing -= 1
    if call.num_missing == 0:
        call.settle(np.stack([row for row in call.rows if row is not None]))
