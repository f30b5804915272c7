"""A load generator that costs next to nothing: streamed chat requests over raw sockets, their bytes counted.

    python benchmarks/stream_client.py HOST PORT BATCH_FILE [--concurrency 256]

Run by `server_load.py` in a process of its own. Takes the bodies from a batch file, asks for usage, and looks at the
bytes of an answer only where it ends. Prints one line of JSON: seconds from the first byte sent to the last received,
output tokens, chunks, and the median time to the first chunk. Exits where a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from dataclasses import dataclass
from typing import Any

_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_END = b"data: [DONE]\n\n"
_TAIL_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Streamed:
    """What one request got."""

    num_tokens: int
    num_chunks: int
    first_chunk_s: float


class StreamReader(asyncio.Protocol):
    """One connection with one streamed request on it."""

    def __init__(self, request: bytes, done: asyncio.Future[Streamed]) -> None:
        self._request = request
        self._done = done
        self._tail = b""
        self._num_chunks = 0
        self._begun = time.perf_counter()
        self._first_chunk_s = 0.0

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count events; keep the end of what came."""
        num_events = data.count(b"data: {")
        if num_events and not self._num_chunks:
            self._first_chunk_s = time.perf_counter() - self._begun
        self._num_chunks += num_events
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if _END in self._tail:
            self._transport.close()
            usage = _USAGE.findall(self._tail)
            self._done.set_result(Streamed(int(usage[-1]), self._num_chunks, self._first_chunk_s))

    def connection_lost(self, exc: Exception | None) -> None:
        """Too early, unless the end was seen."""
        if not self._done.done():
            self._done.set_exception(SystemExit(f"a stream broke off: {exc or self._tail.decode(errors='replace')}"))


def main() -> None:
    """Send everything, wait for it, print."""
    parser = argparse.ArgumentParser(description="Streamed chat requests, counted.")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("batch_file")
    parser.add_argument("--concurrency", type=int, default=256)
    options = parser.parse_args()
    with open(options.batch_file) as lines:
        requests = [_request(json.loads(line), options.host) for line in lines]
    print(json.dumps(asyncio.run(_run(requests, options.host, options.port, options.concurrency))))


def _request(line: dict[str, Any], host: str) -> bytes:
    body = line["body"] | {"stream": True, "stream_options": {"include_usage": True}}
    raw = json.dumps(body).encode()
    head = f"POST {line['url']} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


async def _run(requests: list[bytes], host: str, port: int, concurrency: int) -> dict[str, float]:
    """All requests, in order, so many at a time."""
    seats = asyncio.Semaphore(concurrency)
    loop = asyncio.get_running_loop()

    async def stream(request: bytes) -> Streamed:
        async with seats:
            done: asyncio.Future[Streamed] = loop.create_future()
            await loop.create_connection(lambda: StreamReader(request, done), host, port)
            return await done

    start = time.perf_counter()
    streamed = await asyncio.gather(*map(stream, requests))
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "output_tokens": sum(stream.num_tokens for stream in streamed),
        "chunks": sum(stream.num_chunks for stream in streamed),
        "first_chunk_s": statistics.median(stream.first_chunk_s for stream in streamed),
        "client_cpu_s": time.process_time(),
    }


if __name__ == "__main__":
    main()
