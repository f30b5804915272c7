"""Reads the requests of a plan from the input, a little ahead of the workers that run them, off the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from batchline.backends.base import EndpointRequest
from batchline.batch import lines
from batchline.batch.index import LineReader
from batchline.batch.plan import WorkItem
from batchline.errors import LineError, RunFailed

READ_AHEAD_LINES = 256
READ_AHEAD_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """A parsed request, and the lines that its answer serves: (position, custom_id), its own line first.

    num_bytes: the length of its line, as a measure of the memory that it takes.
    """

    request: EndpointRequest
    num_bytes: int
    served: tuple[tuple[int, str], ...]


class Feeder:
    """Gives workers the next request, read and parsed a little ahead of them, off the event loop."""

    def __init__(self, items: Iterator[WorkItem], reader: LineReader, *, keeps_raw: bool = False) -> None:
        """keeps_raw: whether requests also get their bodies as they were written."""
        self._keeps_raw = keeps_raw
        self._items = items
        self._reader = reader
        self._ahead: deque[ReadyRequest] = deque()
        self._lock = asyncio.Lock()

    async def next(self) -> ReadyRequest | None:
        """The next request; None at the end. Raises: RunFailed."""
        if not self._ahead:
            async with self._lock:
                if not self._ahead:
                    self._ahead.extend(await asyncio.to_thread(self._read_ahead))
        return self._ahead.popleft() if self._ahead else None

    def _read_ahead(self) -> list[ReadyRequest]:
        ready: list[ReadyRequest] = []
        num_bytes = 0
        try:
            for item in self._items:
                ready.append(self._ready(item))
                num_bytes += ready[-1].num_bytes
                if len(ready) >= READ_AHEAD_LINES or num_bytes >= READ_AHEAD_BYTES:
                    break
        except (LineError, OSError) as exc:
            raise RunFailed(f"The input can no longer be read: {exc}.") from exc
        return ready

    def _ready(self, item: WorkItem) -> ReadyRequest:
        line, span = self._reader.batch_line(item.position)
        copies = ((position, self._reader.batch_line(position)[0].custom_id) for position in item.copies)
        request = line.request(lines.new_id())
        if self._keeps_raw:
            raw, _ = self._reader.read(item.position)
            request = replace(request, raw_body=lines.raw_body(raw, line.body))
        return ReadyRequest(request, span.length, ((item.position, line.custom_id), *copies))
