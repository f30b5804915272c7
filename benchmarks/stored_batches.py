"""What requests to the Files and Batches API and its page cost with many batches in the store.

    python benchmarks/stored_batches.py [--batches 10000] [--requests 200]

A server over a fake backend, whose store has so many batches that are over, with two files each. Every kind of request
is sent by one client, one at a time; the table has medians and the slowest twentieth in milliseconds. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

from sqlalchemy import create_engine, insert

from batchline.backends.base import running
from batchline.jobs.options import JobsOptions
from batchline.jobs.store import Store
from batchline.jobs.tables import BatchRecord, FileRecord, batches, files
from batchline.server.options import ServerOptions
from batchline.server.run import run
from batchline.testing import FakeBackend

DAY_S = 24 * 3600


def main() -> None:
    """Fill a store, measure, and print."""
    parser = argparse.ArgumentParser(description="Requests to a server with many stored batches.")
    parser.add_argument("--batches", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), options.batches)
        with served(Path(folder)) as port:
            medians = measure(port, options.batches, options.requests)
    figures = {f"{kind.replace(' ', '_')}_ms": median for kind, median in medians.items()}
    print(json.dumps({"batches": options.batches, **figures}))


def fill(folder: Path, count: int) -> None:
    """Make the store of a server."""
    url = f"sqlite:///{folder / 'batchline.db'}"
    Store(url).close()
    now = int(time.time())
    engine = create_engine(url)
    with engine.begin() as connection:
        for number in range(count):
            purposes = ("batch", "batch_output")
            rows = [asdict(_file(f"{purpose}-{number}", purpose, now)) for purpose in purposes]
            connection.execute(insert(files), rows)
            connection.execute(insert(batches), [asdict(_batch(number, now))])
    engine.dispose()


def _file(file_id: str, purpose: str, now: int) -> FileRecord:
    return FileRecord(
        id=file_id,
        owner="",
        filename=f"{file_id}.jsonl",
        purpose=purpose,
        bytes=1000,
        created_at=now,
        content=file_id,
    )


def _batch(number: int, now: int) -> BatchRecord:
    return BatchRecord(
        id=f"batch_{number}",
        owner="",
        status="completed" if number % 10 else "failed",
        endpoint="/v1/chat/completions",
        input_file_id=f"batch-{number}",
        output_file_id=f"batch_output-{number}",
        completion_window="24h",
        created_at=now,
        expires_at=now + DAY_S,
        completed_at=now,
        total=100,
        completed=100,
        metadata={"night": str(number)},
        errors=None if number % 10 else [{"code": "invalid_url", "message": "m" * 80, "param": "url", "line": 1}] * 20,
    )


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """The port of a server with the store, which runs in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(folder, theirs))
    server.start()
    try:
        yield int(ours.recv().rpartition(":")[2])
    finally:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGTERM)
        server.join()


def serve(folder: Path, ready: Connection) -> None:
    """Serve until a signal; send the URL once it is there."""
    options = ServerOptions(port=0, access_log=False, jobs=JobsOptions(state_dir=folder))
    run(running(FakeBackend()), options, lambda url, models: ready.send(url))


def measure(port: int, count: int, requests: int) -> dict[str, float]:
    """The medians of all kinds of requests, in milliseconds."""
    chosen = random.Random(7)
    kinds: dict[str, Callable[[int], str]] = {
        "list": lambda n: "/v1/batches?limit=100",
        "list after": lambda n: f"/v1/batches?limit=100&after=batch_{n}",
        "retrieve": lambda n: f"/v1/batches/batch_{n}",
        "files": lambda n: f"/v1/files?limit=100&purpose=batch&after=batch-{n}",
        "page": lambda n: "/",
        "page after": lambda n: f"/?after=batch_{n}",
        "page of failed": lambda n: "/?status=failed",
        "page of running": lambda n: "/?status=running",
        "page of one": lambda n: f"/page/batches/batch_{n}",
        "page of files": lambda n: "/page/files",
    }
    client = http.client.HTTPConnection("127.0.0.1", port)
    medians = {}
    for kind, path_of in kinds.items():
        times = []
        for _ in range(requests):
            start = time.perf_counter()
            client.request("GET", path_of(chosen.randrange(count // 2, count)))
            response = client.getresponse()
            response.read()
            times.append(1000 * (time.perf_counter() - start))
            assert response.status == 200, (kind, response.status)
        medians[kind] = round(statistics.median(times), 2)
        slow = sorted(times)[int(len(times) * 0.95)]
        print(f"{kind:15} {medians[kind]:8.2f} ms {slow:8.2f} ms", flush=True)
    return medians


if __name__ == "__main__":
    main()
