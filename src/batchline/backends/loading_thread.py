"""A thread for each load of a model: it ends with its work, and what a failed load has made is freed.

OpenMP keeps a team for every computing thread as long as that thread lives. If the teams have more threads than there
are cores, they sleep at barriers instead of spinning, which costs the engine's thread a tenth of its speed. So the
loading thread must not stay alive, as the threads of asyncio's pool do.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from batchline.errors import BatchlineError, ModelLoadError

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def in_own_thread(name: str, work: Callable[[], T]) -> T:
    """What `work` for the model `name` returns. Raises: BatchlineError."""
    return await asyncio.wrap_future(start_thread(name, work))


def start_thread(
    name: str, work: Callable[[], T], turn: contextlib.AbstractContextManager[object] | None = None
) -> Future[T]:
    """Run `work` for the model `name` on a thread that ends with it. It fails with a BatchlineError only.

    A daemon thread: a process that ends does not wait for a load that was abandoned. turn: held while it works.
    """

    def guarded() -> T:
        failure: BatchlineError
        try:
            return work()
        except BatchlineError as exc:
            failure = exc
        except BaseException as exc:  # models' code may raise anything, even `SystemExit`
            logger.exception("loading %s failed", name)
            failure = ModelLoadError(name, f"it failed with a {type(exc).__name__}; the log has the details")
            failure.__cause__ = exc
        _free_what_it_made(failure)
        raise failure

    def run() -> None:
        with turn or contextlib.nullcontext():
            if future.set_running_or_notify_cancel():  # not given up before its turn
                try:
                    future.set_result(guarded())
                except BatchlineError as exc:
                    future.set_exception(exc.with_traceback(None))  # it would refer to the future

    future: Future[T] = Future()
    threading.Thread(target=run, name="batchline-loading", daemon=True).start()
    return future


def _free_what_it_made(failure: BaseException | None) -> None:
    """Clear the variables of failed calls. They may hold half a model, which the exception would keep alive."""
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)  # for those who have kept it, a log maybe
        failure.__traceback__ = None
        failure = failure.__cause__ or failure.__context__
    gc.collect()  # parts of a model may refer to each other
