"""Group commit: results that end together become durable together, off the event loop.

Workers hand over the record of a finished line and continue. One task repeatedly writes and syncs all collected
records. An outcome is reported only once it is on disk. The backlog is bounded in bytes, so a slow disk slows the run
down instead of filling the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from batchline.batch.journal import Journal, Outcome, encode_record
from batchline.errors import RunFailed

MAX_BACKLOG_BYTES = 64 * 1024 * 1024
COMMIT_INTERVAL_S = 0.05
"""The shortest time between two syncs, so a power failure loses at most this much finished work."""


class GroupCommit:
    """Writes records to a journal in groups. `run` is a separate task, until `close`."""

    def __init__(self, journal: Journal, on_durable: Callable[[Outcome], None]) -> None:
        self._journal = journal
        self._on_durable = on_durable
        self._records: list[bytes] = []
        self._outcomes: list[Outcome] = []
        self._backlog_bytes = 0
        self._has_work = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_closing = False

    async def put(self, outcome: Outcome, result_line: bytes) -> None:
        """Accept one finished line; waits only while the backlog is full."""
        record = encode_record(outcome, result_line)
        self._records.append(record)
        self._outcomes.append(outcome)
        self._backlog_bytes += len(record)
        self._has_work.set()
        if self._backlog_bytes > MAX_BACKLOG_BYTES:
            self._has_room.clear()
            await self._has_room.wait()

    async def run(self) -> None:
        """Commit until closed and empty. Raises: RunFailed when the journal cannot be written."""
        while not (self._is_closing and not self._records):
            await self._has_work.wait()
            self._has_work.clear()
            await self._commit()
            if not self._is_closing:
                await asyncio.sleep(COMMIT_INTERVAL_S)

    def close(self) -> None:
        """Let `run` end as soon as all accepted records are durable."""
        self._is_closing = True
        self._has_work.set()

    async def _commit(self) -> None:
        records, self._records = self._records, []
        outcomes, self._outcomes = self._outcomes, []
        if not records:
            return
        try:
            await asyncio.to_thread(self._journal.append, b"".join(records))
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise RunFailed(f"The journal {self._journal.path} cannot be written: {reason}.") from exc
        for outcome in outcomes:
            self._on_durable(outcome)
        self._backlog_bytes -= sum(map(len, records))
        self._has_room.set()
