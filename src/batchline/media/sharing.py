"""Work that several requests wait for, and memory that they share. For one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedWork(Generic[T]):
    """Runs work once for all callers that want it at the same time, and cancels it when the last of them leaves."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[T]] = {}
        self._num_waiting: dict[str, int] = {}

    async def result(self, key: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the work returns or raises. work: started unless it is running already."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(work())
            self._num_waiting[key] = 0
            task.add_done_callback(lambda done: self._forget(key, done))
        self._num_waiting[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            if self._tasks.get(key) is task:
                self._num_waiting[key] -= 1
                if not self._num_waiting[key] and not task.done():
                    self._forget(key, task)  # the next request starts it anew
                    task.cancel()

    def _forget(self, key: str, task: asyncio.Task[T]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key], self._num_waiting[key]


class ByteBudget:
    """Memory that is reserved before it is used, in the order of the requests."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._num_reserved = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserved(self, num_bytes: int) -> AsyncIterator[None]:
        """Reserve memory until the block ends. More than the whole budget waits until nothing else is reserved."""
        if self._waiting or not self._fits(num_bytes):
            await self._wait(num_bytes)
        else:
            self._num_reserved += num_bytes
        try:
            yield
        finally:
            self._num_reserved -= num_bytes
            self._wake()

    def _fits(self, num_bytes: int) -> bool:
        return not self._num_reserved or self._num_reserved + num_bytes <= self._num_bytes

    async def _wait(self, num_bytes: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn has come, and nobody takes it
                self._num_reserved -= num_bytes
            self._wake()
            raise

    def _wake(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self._fits(self._waiting[0][0])):
            num_bytes, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._num_reserved += num_bytes
                turn.set_result(None)


async def all_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """The results in order. The first that fails cancels the others, and they have ended when it is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
