"""Hundreds of clients at once that stay, vanish or hardly read: afterwards nothing of them is left.

A few seconds by default; `--load-minutes 5` (or `make soak`) makes it minutes and prints what was measured.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from load_clients import Crowd
from threaded_server import ThreadedServer

from batchline.backends.in_process import InProcessBackend
from batchline.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from batchline.engine import async_engine
from batchline.engine.core import Engine
from batchline.engine.sequence import Sequence

TINY_CHAT = Path(__file__).parents[2] / "examples/models/tiny-chat"
NUM_CLIENTS = 200
IDLE_TIMEOUT_S = 60
POOLED_THREADS = 32
"""Pools start threads when all they have are busy, up to this many (asyncio's): not each is there after the warm-up."""

IDLE = {
    "batchline_running 0.0",
    "batchline_waiting 0.0",
    "batchline_kv_cache_usage 0.0",
    "batchline_requests_in_flight 0.0",
}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that are made from now on."""
    made: list[Engine] = []

    class KnownEngine(Engine):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(async_engine, "Engine", KnownEngine)
    return made


@pytest.fixture
def server(engines: list[Engine]) -> Iterator[ThreadedServer]:
    """The model that ships, with fewer seats than clients and a cache that they fill."""
    config = EngineConfig(
        model=ModelConfig(model=str(TINY_CHAT), served_names=("tiny",), dtype="float32", num_threads=1),
        cache=CacheConfig(num_bytes=6 << 20),
        scheduler=SchedulerConfig(max_num_seqs=128),
    )
    with ThreadedServer(InProcessBackend([config])) as running:
        yield running


class Memory:
    """Resident memory while clients come and go, noted at most once in `interval_s`. series: MiB."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._process = psutil.Process()
        self._next = time.monotonic()
        self.series: list[float] = []

    def note(self) -> None:
        """Called whenever something has happened."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._interval_s
            self.series.append(round(self._process.memory_info().rss / (1 << 20), 1))

    @property
    def growth(self) -> float:
        """From the first to the last quarter, in MiB. Medians: a single look may fall on a moment with much to do."""
        quarter = max(1, len(self.series) // 4)
        return statistics.median(self.series[-quarter:]) - statistics.median(self.series[:quarter])


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process has that requests could leave behind. objects: those that the garbage collector follows, without
    libraries and models, which are frozen after loading."""

    files: int
    threads: int
    tasks: int
    sequences: int
    objects: int

    @classmethod
    def of(cls, server: ThreadedServer) -> Holdings:
        """Counted while nothing runs."""
        gc.collect()
        process, objects = psutil.Process(), gc.get_objects()
        return cls(
            files=process.num_fds(),
            threads=process.num_threads(),
            tasks=len(asyncio.all_tasks(server.loop)),
            sequences=sum(isinstance(item, Sequence) for item in objects),
            objects=len(objects),
        )


async def until_idle(client: httpx.AsyncClient) -> None:
    """An aborted sequence leaves at the engine's next step."""
    until = time.monotonic() + IDLE_TIMEOUT_S
    while missing := IDLE - set((text := (await client.get("/metrics")).text).splitlines()):
        assert time.monotonic() < until, f"after {IDLE_TIMEOUT_S} s without clients still not {missing}:\n{text}"


async def test_hundreds_of_clients_leave_nothing_behind(
    server: ThreadedServer, engines: list[Engine], pytestconfig: pytest.Config
) -> None:
    seconds = 60 * float(pytestconfig.getoption("--load-minutes"))
    async with httpx.AsyncClient(base_url=server.url, timeout=IDLE_TIMEOUT_S) as client:
        await Crowd(server.url, seed=0).run(NUM_CLIENTS, min(seconds / 2, 20), lambda: None)  # fills caches and pools
        await until_idle(client)
        before = Holdings.of(server)
        crowd, memory = Crowd(server.url, seed=1), Memory(seconds / 60)
        await crowd.run(NUM_CLIENTS, seconds, memory.note)
        await until_idle(client)
        after = Holdings.of(server)
    (engine,) = engines
    engine.check_integrity()
    stats = engine.stats()
    print(f"\n{crowd.counts.total():,} clients: {dict(crowd.counts)}\n{stats}\n{before}\n{after}\nMiB: {memory.series}")
    assert (stats.running, stats.waiting, stats.cache_usage, after.sequences) == (0, 0, 0.0, 0)
    assert (after.files, after.tasks) == (before.files, before.tasks)
    assert after.threads - before.threads <= POOLED_THREADS
    # what is bounded (connections kept alive, tables of metrics) may differ a little; a thing a client may not
    assert after.objects - before.objects < 100 + crowd.counts.total() / 100
    # The allocator's free lists and the libraries' caches keep growing for a while, by a few hundred bytes a client;
    # what a request holds while it runs (prompt, tokens, connection) is tens of kilobytes.
    assert memory.growth < 16 + crowd.counts.total() * 2 / 1024
