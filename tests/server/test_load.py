"""Hundreds of streams at once, of clients that stay, vanish or hardly read: afterwards nothing of them is left."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from threaded_server import ThreadedServer

from batchline.backends.in_process import InProcessBackend
from batchline.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from batchline.engine import async_engine
from batchline.engine.core import Engine

TINY_CHAT = Path(__file__).parents[2] / "examples/models/tiny-chat"
NUM_CLIENTS = 200
MAX_TOKENS = 24
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


class Crowd:
    """Clients of a server, each with a connection and a streamed chat of its own."""

    def __init__(self, url: str, seed: int) -> None:
        address = urlsplit(url)
        self._host, self._port = str(address.hostname), address.port
        self._random = random.Random(seed)
        self.num_vanished = 0

    async def run(self) -> list[bytes]:
        """The answers of those who stayed."""
        answers = await asyncio.gather(*(self._ask(number) for number in range(NUM_CLIENTS)))
        return [answer for answer in answers if answer]

    async def _ask(self, number: int) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1024)
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"Hello world! {number}"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "seed": number,
        }
        raw = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        try:
            return await self._read(reader, number)
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, number: int) -> bytes:
        """Every third client goes away at some byte, every tenth takes a few bytes at a time."""
        if number % 3 == 1:
            self.num_vanished += 1
            await reader.read(self._random.choice([0, 1, 300, 2000]))
            return b""
        answer = b""
        while part := await reader.read(32 if number % 10 == 2 else 65536):
            answer += part
        return answer


async def until_idle(client: httpx.AsyncClient) -> None:
    """An aborted sequence leaves at the engine's next step."""
    while not IDLE.issubset((await client.get("/metrics")).text.splitlines()):
        pass


async def test_hundreds_of_streams_leave_nothing_behind(server: ThreadedServer, engines: list[Engine]) -> None:
    num_bytes = []
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        for wave in range(3):
            crowd = Crowd(server.url, seed=wave)
            answers = await crowd.run()
            assert len(answers) == NUM_CLIENTS - crowd.num_vanished
            assert all(answer.startswith(b"HTTP/1.1 200 OK") and b"data: [DONE]" in answer for answer in answers)
            assert all(b'"completion_tokens":%d' % MAX_TOKENS in answer for answer in answers)
            await until_idle(client)
            gc.collect()
            num_bytes.append(psutil.Process().memory_info().rss)
    (engine,) = engines
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.cache_usage) == (0, 0, 0.0)
    assert num_bytes[2] - num_bytes[1] < 32 << 20
