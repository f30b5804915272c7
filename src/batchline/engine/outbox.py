"""Sends outputs from the engine's thread to the callers' event loops, and limits how often.

Sending one token to each of hundreds of streams costs the event loop (and, through the interpreter's lock, the
engine) more time than a step of a small model. So streams get a step's tokens only after the loops have handled the
previous dispatch, and rested for a multiple of the time that took. Tokens of the steps in between are sent
together. With few streams, or steps longer than a hundred milliseconds, each step's tokens are sent at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from batchline.engine.core import Output
from batchline.engine.request import GenerationOutput
from batchline.errors import EngineDead

logger = logging.getLogger(__name__)

REST_PER_WORK = 12
"""A loop rests this many times as long as it worked on a dispatch, so streams use at most 1/13 of one core."""

MAX_HOLD_S = 0.25
"""Streams are never held longer than this, however busy the loops are."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request. queue: filled by dispatches, on the caller's loop."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Output | EngineDead]

    async def next(self) -> Output | EngineDead:
        """Wait for outputs; return all since the last call as one."""
        output = await self.queue.get()
        outputs: list[GenerationOutput] = []
        while isinstance(output, GenerationOutput):
            outputs.append(output)
            # after a finished output only the engine's end can follow, which must not replace it
            if output.finish_reason is not None or self.queue.empty():
                return joined(outputs)
            output = self.queue.get_nowait()
        return output


class Outbox:
    """Sends outputs to loops, and decides when streams get the next. Used by the engine's thread."""

    def __init__(self) -> None:
        self._open: set[object] = set()  # added to by the thread, discarded from by the loops: both are atomic
        self._rests_until = 0.0
        self._held_since = 0.0

    @property
    def holds_streams(self) -> bool:
        """Whether loops still handle the last dispatch, or rest from it."""
        now = time.monotonic()
        if (self._open or now < self._rests_until) and now - self._held_since < MAX_HOLD_S:
            return True
        self._held_since = now
        self._open.clear()  # a stopped loop never reports that it is done
        return False

    def send(self, outputs: Sequence[tuple[Caller, Output]]) -> None:
        """Send each output to its caller, with one wake-up per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Caller, Output]]] = defaultdict(list)
        for caller, output in outputs:
            by_loop[caller.loop].append((caller, output))
        for loop, part in by_loop.items():
            dispatch = object()
            self._open.add(dispatch)
            if not call_in(loop, self._wake, dispatch, loop, part):
                self._open.discard(dispatch)

    def _wake(
        self, dispatch: object, loop: asyncio.AbstractEventLoop, outputs: Sequence[tuple[Caller, Output]]
    ) -> None:
        """Called on the loop: wake the callers, and take the time after they have run."""
        started = time.thread_time()
        for caller, output in outputs:
            caller.queue.put_nowait(output)
        loop.call_soon(self._note_work, dispatch, started)

    def _note_work(self, dispatch: object, started: float) -> None:
        rest_s = REST_PER_WORK * (time.thread_time() - started)
        self._rests_until = max(self._rests_until, time.monotonic() + rest_s)
        self._open.discard(dispatch)


def joined(outputs: Sequence[GenerationOutput]) -> GenerationOutput:
    """Join consecutive outputs of one sequence."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first
    return GenerationOutput(
        request_id=last.request_id,
        token_ids=tuple(chain.from_iterable(output.token_ids for output in outputs)),
        logprobs=None if first.logprobs is None else tuple(chain.from_iterable(o.logprobs or () for o in outputs)),
        prompt_logprobs=first.prompt_logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        is_complete=last.is_complete,
        num_cached_tokens=last.num_cached_tokens,
    )


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> bool:
    """Call a function on the loop's thread. False if the loop has closed, so that nobody waits there."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        logger.debug("a caller's event loop closed before its outputs were ready")
        return False
    return True
