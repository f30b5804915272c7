"""What random calls are made on: servers under a test's control, and what the model knows of files and batches."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchline.backends.base import EndpointRequest
from batchline.errors import BadRequest
from batchline.jobs.contents import Contents
from batchline.jobs.options import JobsOptions
from batchline.jobs.service import Jobs
from batchline.jobs.state_folder import JobsState
from batchline.jobs.states import EDGES, RUNNING, BatchStatus
from batchline.jobs.tables import BatchRecord
from batchline.testing import FakeBackend

CHAT = "/v1/chat/completions"
LEASE_S = 0.3


class Clock:
    """The time that the test has set."""

    now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Upload:
    """A file that a client has uploaded. texts: of its requests; None if it is not a valid input."""

    id: str
    owner: str
    texts: Sequence[str] | None
    expires_at: float | None
    is_gone: bool = False


@dataclass(slots=True)
class Batch:
    """What the model knows of a batch. texts: None if it has to fail. record: what was last seen. done: the requests
    whose results were seen. kept_until: when its thief's lease ends."""

    id: str
    owner: str
    texts: Sequence[str] | None
    record: BatchRecord
    is_cancelled: bool = False
    was_late: bool = False
    is_delayed: bool = False
    kept_until: float | None = None
    num_disturbed: int = 0
    done: set[str] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return self.record.status not in RUNNING


class Server:
    """One worker and its API. It works between `start` and `stop`."""

    def __init__(self, state: JobsState, options: JobsOptions, gate: Gate) -> None:
        self.backend = FakeBackend(before_answer=gate.before_answer)
        self._state = state
        self.options = options
        self.jobs = Jobs(state, self.backend, options)
        self._stack = contextlib.AsyncExitStack()
        self.is_working = False

    async def start(self) -> None:
        """Run batches from now on."""
        self.jobs = Jobs(self._state, self.backend, self.options)
        await self._stack.enter_async_context(self.jobs.working())
        self.is_working = True

    async def stop(self) -> None:
        """Stop as a server does."""
        self.is_working = False
        await self._stack.aclose()


class Gate:
    """Holds the requests that wait. asked: how often each text was run."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.asked: Counter[str] = Counter()

    async def before_answer(self, request: EndpointRequest) -> None:
        """Wait, or fail."""
        text = request.body["messages"][0]["content"]
        self.asked[text] += 1
        if text.startswith("wait"):
            await self.opened.wait()
        if text.startswith("bad"):
            raise BadRequest("It is bad.")


class StorageSwitch:
    """Makes the contents of files unreadable."""

    def __init__(self, contents: Contents) -> None:
        self.is_broken = self.was_broken = False
        fetch = contents.fetch

        def fetch_if_whole(name: str, copy: Path) -> Path:
            if self.is_broken:
                raise OSError("the disk is away")
            return fetch(name, copy)

        contents.fetch = fetch_if_whole  # type: ignore[method-assign]


def reachable(status: BatchStatus) -> set[BatchStatus]:
    """The states that a batch may have that was once in this one."""
    found = {status}
    for following in EDGES[status]:
        found |= reachable(following)
    return found


def bad_lines(kind: str, lines: Sequence[bytes]) -> bytes:
    """The lines, and one that makes them no valid input."""
    other = {
        "json": b"{\n",
        "twice": lines[0],
        "model": lines[0].replace(b'"fake"', b'"unknown"').replace(b'"custom_id": "', b'"custom_id": "other '),
    }
    return b"".join([*lines, other[kind]])


def line(text: str) -> bytes:
    """A request, whose text is also its `custom_id`."""
    body = {"model": "fake", "messages": [{"role": "user", "content": text}]}
    return json.dumps({"custom_id": text, "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"
