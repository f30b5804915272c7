"""The thread that runs a small model (one without the engine's scheduler), and the bridge to it from event loops.

Only the thread uses the model. A call belongs to its caller's event loop, which gets one outcome. When the thread ends,
for whatever reason, all calls that still wait get EngineDead. Knows nothing about models.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from batchline.callers import EngineProgress, engine_progress
from batchline.errors import EngineDead, EngineError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ThreadCall(Generic[T]):
    """A call that the thread answers. is_over: it has its outcome, or its caller has left."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()
        self.is_over = False
        self.progress = engine_progress.get() or EngineProgress()
        self.progress.is_queued = True

    def settle(self, outcome: T | EngineError) -> None:
        """Called on the thread: give the caller a result or an error, whichever comes first."""
        if self.is_over:
            return
        self.is_over = True
        try:
            self._loop.call_soon_threadsafe(self._set_outcome, outcome)
        except RuntimeError:
            logger.debug("a caller's event loop closed before its outcome was known")

    def _set_outcome(self, outcome: T | EngineError) -> None:
        """Called in the caller's event loop. A cancelled call is skipped."""
        if self.future.done():
            return
        if isinstance(outcome, EngineError):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class ModelThread(ABC):
    """Its kinds say what a piece of work is. They set up all that it needs before they call this constructor."""

    def __init__(self, name: str, on_start: Callable[[], None]) -> None:
        """on_start: called first on the new thread."""
        self._on_start = on_start
        self._wake = threading.Condition()
        self._calls: set[ThreadCall[Any]] = set()
        self._is_closing = False
        self._death: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"batchline-{name}", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether calls are still accepted: False after `close`, and once the thread has died."""
        return not self._is_closing

    def close(self) -> None:
        """Stop after the present piece of work; calls still waiting get EngineDead. Idempotent."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    @abstractmethod
    def _work(self) -> bool:
        """Called on the thread: wait for work and do a piece of it. False if the thread is closing."""

    async def _outcome(self, call: ThreadCall[T], enqueue: Callable[[], None]) -> T:
        """What the thread makes of a call. enqueue: puts it where the thread finds it. Raises: EngineError, among them
        EngineDead after `close` or a crash."""
        with self._wake:
            if self._is_closing:
                raise EngineDead("the model's thread has stopped") from self._death
            self._calls.add(call)
            enqueue()
            self._wake.notify()
        try:
            return await call.future
        finally:
            with self._wake:
                call.is_over = True
                self._calls.discard(call)

    def _run(self) -> None:
        try:
            self._on_start()
            while self._work():
                pass
        except BaseException as exc:  # no caller may wait forever, no matter what ended the thread
            logger.exception("the thread %s has died", self._thread.name)
            self._death = exc
        with self._wake:
            self._is_closing = True
            calls = list(self._calls)
        for call in calls:
            error = EngineDead("the model's thread has stopped")
            error.__cause__ = self._death
            call.settle(error)
