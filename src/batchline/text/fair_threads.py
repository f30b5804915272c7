"""Threads that several callers share fairly: they take turns, and none of them gets all threads while others wait.

Knows nothing about what the work is, or who the callers are.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any

current_caller: ContextVar[str] = ContextVar("current_caller", default="")
"""Whose work is submitted in this context: a server with API keys sets it for each request, to a name for its key.
Without keys, all work has the same unnamed caller."""

Work = Callable[[], Any]


class FairThreads(Executor):
    """An executor. The callers with waiting work take turns, whatever number of works each of them has submitted.

    One thread is kept free of each named caller, for the next caller that comes. The unnamed caller gets all threads.
    """

    def __init__(self, num_threads: int, thread_name_prefix: str) -> None:
        """num_threads: at least 2."""
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=thread_name_prefix)
        self._num_threads = self._num_idle = num_threads
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Work]]] = OrderedDict()  # whose turn it is first
        self._num_running: Counter[str] = Counter()
        self._is_closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run work for the context's caller when it is its turn. Raises: RuntimeError after `shutdown`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("these threads have been shut down")
            self._waiting.setdefault(current_caller.get(), deque()).append((future, partial(fn, *args, **kwargs)))
            self._start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads when all submitted work is done. Nothing may be submitted afterwards."""
        with self._lock:
            self._is_closed = True
            waiting = [item for queue in self._waiting.values() for item in queue]
            self._waiting.clear()
            if cancel_futures:
                for future, _ in waiting:
                    future.cancel()
            else:  # without turns: nobody else can come
                for item in waiting:
                    self._pool.submit(_run, *item)
        self._pool.shutdown(wait=wait)  # it cannot cancel: its futures are not those that callers wait for

    def _start(self) -> None:
        """Start as much of the waiting work as there are threads for. Called with the lock."""
        while self._num_idle:
            caller = next((caller for caller in self._waiting if self._has_thread_for(caller)), None)
            if caller is None:
                return
            item = self._waiting[caller].popleft()
            if self._waiting[caller]:
                self._waiting.move_to_end(caller)
            else:
                del self._waiting[caller]
            self._num_idle -= 1
            self._num_running[caller] += 1
            self._pool.submit(self._run_for, caller, item)

    def _has_thread_for(self, caller: str) -> bool:
        """Whether a caller may use another thread if one is idle."""
        return caller == "" or self._num_running[caller] < self._num_threads - 1

    def _run_for(self, caller: str, item: tuple[Future[Any], Work]) -> None:
        _run(*item)
        with self._lock:
            self._num_idle += 1
            self._num_running[caller] -= 1
            if not self._num_running[caller]:
                del self._num_running[caller]
            self._start()


def _run(future: Future[Any], work: Work) -> None:
    """Run work that has not been cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as exc:  # the caller's, as in every executor
        future.set_exception(exc)
    else:
        future.set_result(result)
