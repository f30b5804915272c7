"""Group commit: results that end together become durable together, off the event loop.

Workers hand over the entry of a finished line and continue. One task repeatedly writes and syncs all collected
entries. An outcome is reported only once it is on disk. The backlog is bounded in bytes, so a slow disk slows the run
down instead of filling the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from batchline.batch.journal import Journal, Outcome, encode_result
from batchline.errors import RunFailed

MAX_BACKLOG_BYTES = 64 * 1024 * 1024
COMMIT_INTERVAL_S = 0.05
"""The shortest time between two syncs, so a power failure loses at most this much finished work."""


class GroupCommit:
    """Writes entries to a journal in groups. `run` is a separate task, until `close`."""

    def __init__(self, journal: Journal, on_durable: Callable[[Outcome], None]) -> None:
        self._journal = journal
        self._on_durable = on_durable
        self._entries: list[bytes] = []
        self._outcomes: list[Outcome] = []
        self._backlog_bytes = 0
        self._has_work = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_closing = False

    async def put(self, outcome: Outcome, result_line: bytes) -> None:
        """Accept one finished line; waits only while the backlog is full."""
        entry = encode_result(outcome, result_line)
        self._entries.append(entry)
        self._outcomes.append(outcome)
        self._backlog_bytes += len(entry)
        self._has_work.set()
        if self._backlog_bytes > MAX_BACKLOG_BYTES:
            self._has_room.clear()
            await self._has_room.wait()

    async def run(self) -> None:
        """Commit until closed and empty. Raises: RunFailed when the journal cannot be written."""
        while not (self._is_closing and not self._entries):
            await self._has_work.wait()
            self._has_work.clear()
            await self._commit()
            if not self._is_closing:
                await asyncio.sleep(COMMIT_INTERVAL_S)

    def close(self) -> None:
        """Let `run` end as soon as all accepted entries are durable."""
        self._is_closing = True
        self._has_work.set()

    async def _commit(self) -> None:
        entries, self._entries = self._entries, []
        outcomes, self._outcomes = self._outcomes, []
        if not entries:
            return
        try:
            await asyncio.to_thread(self._journal.append, b"".join(entries))
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise RunFailed(f"The journal {self._journal.path} cannot be written: {reason}.") from exc
        for outcome in outcomes:
            self._on_durable(outcome)
        self._backlog_bytes -= sum(map(len, entries))
        self._has_room.set()
