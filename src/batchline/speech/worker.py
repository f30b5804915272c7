"""The thread of a speech model, and the bridge to it from event loops.

The windows of all callers wait in one queue. When a sequence ends, the next window takes its place, so a long recording
does not hold up short ones. Only the thread uses the model.

If the model fails on several windows, they run again in halves, until the window at fault is found. Its call fails; all
others continue.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from batchline.callers import EngineProgress, FairLine, engine_progress
from batchline.errors import EngineDead, EngineError, EngineOutOfMemory, NumbersNotFinite
from batchline.speech.decoding import TextOf, WindowSequence
from batchline.speech.model import MAX_ENCODED, WhisperRunner
from batchline.speech.request import DecodedWindow, Window
from batchline.speech.tokens import SpeechTokens

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechStats:
    """Counters since the start. num_steps: of the decoder, each for all running windows."""

    num_encoded: int = 0
    num_steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0


class _Call:
    """One window of a caller, and its place among the running sequences. The future belongs to its event loop."""

    def __init__(self, window: Window, rules: SpeechTokens) -> None:
        self.sequence = WindowSequence(window, rules)
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[DecodedWindow] = self.loop.create_future()
        self.is_over = False
        self.progress = engine_progress.get() or EngineProgress()
        self.progress.is_queued = True


class SpeechWorker:
    """Decodes the windows of all callers together, on its own thread."""

    def __init__(
        self,
        runner: WhisperRunner,
        rules: SpeechTokens,
        text_of: TextOf,
        *,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        """text_of: called on the thread. on_start: called first on the new thread."""
        self._runner = runner
        self._rules = rules
        self._text_of = text_of
        self._on_start = on_start
        self._wake = threading.Condition()
        self._waiting: FairLine[_Call] = FairLine()
        self._running: list[_Call] = []
        self._calls: set[_Call] = set()
        self._is_closing = False
        self._death: BaseException | None = None
        self._num_encoded = self._num_steps = self._prompt_tokens = self._output_tokens = 0
        self._thread = threading.Thread(target=self._run, name="batchline-speech", daemon=True)
        self._thread.start()

    async def decode(self, window: Window, *, priority: int = 0) -> DecodedWindow:
        """The window's tokens. Callers take turns; of one caller, lower priorities run earlier.

        Raises: EngineDead after `close` or a crash; EngineOutOfMemory, EngineError if the model fails on the window.
        """
        call = _Call(window, self._rules)
        with self._wake:
            if self._is_closing:
                raise EngineDead("the model's thread has stopped") from self._death
            self._calls.add(call)
            self._waiting.push(call, priority)
            self._wake.notify()
        try:
            return await call.future
        finally:
            with self._wake:
                call.is_over = True
                self._calls.discard(call)

    @property
    def is_alive(self) -> bool:
        """Whether calls are still accepted: False after `close`, and once the thread has died."""
        return not self._is_closing

    def stats(self) -> SpeechStats:
        """Counters since the start."""
        return SpeechStats(
            num_encoded=self._num_encoded,
            num_steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
        )

    def close(self) -> None:
        """Stop after the current step; calls still waiting get EngineDead. Idempotent."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        """The thread: step after step until closed or dead."""
        try:
            self._on_start()
            while (arrived := self._next_calls()) is not None:
                self._remove_ended()
                self._admit(arrived)
                if self._running:
                    self._step(0, len(self._running))
        except BaseException as exc:  # no caller may wait for ever, no matter what ended the thread
            logger.exception("the speech thread has died")
            self._death = exc
        with self._wake:
            self._is_closing = True
            calls = list(self._calls)
        for call in calls:
            error = EngineDead("the model's thread has stopped")
            error.__cause__ = self._death
            _settle(call, error)

    def _next_calls(self) -> list[_Call] | None:
        """Calls for the free rows, the first in the queue first; waits while nothing runs. None when closing."""
        with self._wake:
            while not self._is_closing:
                found: list[_Call] = []
                room = min(self._runner.num_rows - len(self._running), MAX_ENCODED)
                while self._waiting and len(found) < room:
                    call = self._waiting.pop()
                    if not call.is_over:
                        call.progress.has_started = True
                        found.append(call)
                if found or self._running:
                    return found
                self._wake.wait()
        return None

    def _admit(self, calls: list[_Call]) -> None:
        """Encode the windows, read their prompts, and choose their first tokens."""
        if not calls:
            return
        begun = self._attempt(calls, lambda: self._begun(calls))
        if begun is None:
            middle = len(calls) // 2
            if middle:
                self._admit(calls[:middle])
                self._admit(calls[middle:])
            return
        self._num_encoded += len(calls)
        self._prompt_tokens += sum(len(call.sequence.prompt) for call in calls)
        self._running += calls
        for call, logits in zip(calls, begun, strict=True):
            call.sequence.first_logits = logits
        self._advance(calls, [logits.clone() for logits in begun])
        self._remove_ended()

    def _begun(self, calls: Sequence[_Call]) -> torch.Tensor:
        """The logits after each prompt. The calls take the first free rows."""
        runner, row = self._runner, len(self._running)
        sequences = [call.sequence for call in calls]
        runner.encode(np.stack([sequence.window.features for sequence in sequences]), row)
        self._detect_languages(sequences, row)
        for sequence in sequences:
            sequence.set_prompt()
        longest = max(len(sequence.prompt) for sequence in sequences)
        padded = [sequence.prompt + (self._rules.end,) * (longest - len(sequence.prompt)) for sequence in sequences]
        states = runner.prefill(np.array(padded), row)
        starts = [sequence.prompt.index(self._rules.start) for sequence in sequences]
        every = range(len(sequences))
        at_start = torch.softmax(runner.logits(states[list(every), starts]), dim=-1)
        for sequence, chances in zip(sequences, at_start, strict=True):
            sequence.no_speech_probability = float(chances[self._rules.no_speech])
        return runner.logits(states[list(every), [len(sequence.prompt) - 1 for sequence in sequences]])

    def _detect_languages(self, sequences: Sequence[WindowSequence], row: int) -> None:
        """Set the likeliest language where none is given. It follows the start token in the model's training."""
        ids = list(self._rules.languages.values())
        if not ids or all(sequence.language is not None for sequence in sequences):
            return
        states = self._runner.prefill(np.full((len(sequences), 1), self._rules.start), row)
        best = self._runner.logits(states[:, 0])[:, ids].argmax(dim=-1).tolist()
        for sequence, index in zip(sequences, best, strict=True):
            if sequence.language is None:
                sequence.language = ids[index]

    def _step(self, first: int, stop: int) -> None:
        """Decode one more token of the running sequences in these rows; all others keep theirs."""
        calls = self._running[first:stop]
        logits = self._attempt(calls, lambda: self._next_logits(calls, first))
        if logits is not None:
            self._num_steps += 1
            self._advance(calls, list(logits))
        elif len(calls) > 1:
            middle = first + len(calls) // 2
            self._step(first, middle)
            self._step(middle, stop)

    def _next_logits(self, calls: Sequence[_Call], row: int) -> torch.Tensor:
        sequences = [call.sequence for call in calls]
        tokens = np.array([sequence.tokens[-1] for sequence in sequences])
        positions = np.array([len(sequence.prompt) + len(sequence.tokens) - 1 for sequence in sequences])
        return self._runner.step(tokens, positions, row)

    def _attempt(self, calls: Sequence[_Call], work: Callable[[], T]) -> T | None:
        """The result of work on the calls; None if it failed. If there is one call, it fails with it."""
        try:
            return work()
        except Exception as exc:  # the model's code may raise anything; its callers get a typed error
            logger.warning("%d windows failed", len(calls), exc_info=len(calls) == 1)
            if len(calls) == 1:
                is_memory = isinstance(exc, torch.OutOfMemoryError | MemoryError)
                kind = EngineOutOfMemory if is_memory else EngineError
                error = kind("the model failed on this recording")
                error.__cause__ = exc
                _settle(calls[0], error)
        return None

    def _advance(self, calls: Sequence[_Call], logits: Sequence[torch.Tensor]) -> None:
        """Choose the next token of each call, and settle those that are complete."""
        for call, row in zip(calls, logits, strict=True):
            sequence = call.sequence
            if bool(torch.isnan(row).any()):
                _settle(call, NumbersNotFinite("the model computed numbers for this recording that are not finite"))
                continue
            sequence.advance(row)
            self._output_tokens += 1
            while sequence.is_finished:
                result = sequence.retry_or_result(self._text_of)
                if result is not None:
                    _settle(call, result)
                    break
                sequence.advance(sequence.first_logits.clone())

    def _remove_ended(self) -> None:
        """Free the rows of calls that are over. The last running sequence fills each gap."""
        row = 0
        while row < len(self._running):
            if not self._running[row].is_over:
                row += 1
                continue
            last = self._running.pop()
            if row < len(self._running):
                self._running[row] = last
                self._runner.move(len(self._running), row)


def _settle(call: _Call, outcome: DecodedWindow | EngineError) -> None:
    """Called on the thread: give the call its result or its error, whichever comes first."""
    if call.is_over:
        return
    call.is_over = True
    try:
        call.loop.call_soon_threadsafe(_set_result, call, outcome)
    except RuntimeError:
        logger.debug("a caller's event loop closed before its window was decoded")


def _set_result(call: _Call, outcome: DecodedWindow | EngineError) -> None:
    """Called in the caller's event loop. A cancelled call is skipped."""
    if call.future.done():
        return
    if isinstance(outcome, EngineError):
        call.future.set_exception(outcome)
    else:
        call.future.set_result(outcome)
