"""Reads several streams as one: the choices of a prompt, the prompts of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

Stream = AsyncGenerator[T, None]


async def merge(streams: Sequence[Stream[T]], at_once: int | None = None) -> AsyncGenerator[tuple[int, T], None]:
    """(number of the stream, item) as items come; items that are ready together come in the streams' order.

    Each stream is read at most one item ahead. at_once: how many are open at a time, started in order; None means all.
    If a stream raises, or the caller closes this one, all are closed. The cost of an item does not depend on the number
    of streams.
    """
    if len(streams) == 1:
        try:
            async for item in streams[0]:
                yield 0, item
        finally:
            await streams[0].aclose()
        return
    reading = _Reading(streams, at_once or len(streams))
    try:
        while reading.tasks:
            for number in await reading.ready():
                try:
                    item = reading.tasks.pop(number).result()
                except StopAsyncIteration:
                    reading.begin_next()
                    continue
                yield number, item
                reading.read(number)
    finally:
        await reading.close()


class _Reading(Generic[T]):
    """The streams that are being read (one task each), and those that have an item. Mutable."""

    def __init__(self, streams: Sequence[Stream[T]], at_once: int) -> None:
        self.tasks: dict[int, asyncio.Task[T]] = {}
        self._streams = streams
        self._ready: list[int] = []
        self._has_ready = asyncio.Event()
        self._num_begun = 0
        for _ in range(at_once):
            self.begin_next()

    def begin_next(self) -> None:
        """Read the next stream in line, if there is one."""
        if self._num_begun < len(self._streams):
            self._num_begun += 1
            self.read(self._num_begun - 1)

    def read(self, number: int) -> None:
        """Ask a stream for its next item."""
        task = self.tasks[number] = asyncio.create_task(_next_of(self._streams[number]))
        task.add_done_callback(lambda _: self._add_ready(number))

    def _add_ready(self, number: int) -> None:
        self._ready.append(number)
        self._has_ready.set()

    async def ready(self) -> list[int]:
        """At least one stream that has an item or has ended since the last call, in order."""
        await self._has_ready.wait()
        self._has_ready.clear()
        numbers, self._ready = sorted(self._ready), []
        return numbers

    async def close(self) -> None:
        """Close all streams. The readers are cancelled first, because a stream that is being read cannot be closed."""
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()


async def _next_of(stream: Stream[T]) -> T:
    return await stream.__anext__()  # a task needs a coroutine
