"""A server in a process that may open few files: `python starved_server.py FILES`. It ends with its standard input."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys

from threaded_server import ThreadedServer

from batchline.backends.base import EndpointRequest
from batchline.server.log_lines import SparingHandler
from batchline.testing import FakeBackend


async def hold(request: EndpointRequest) -> None:
    """For ever."""
    await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level="INFO", handlers=[SparingHandler(sys.stderr)])
    num_files = int(sys.argv[1])
    with ThreadedServer(FakeBackend(before_answer=hold), max_connections=1000, grace_period_s=0) as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
        print(server.url, flush=True)
        sys.stdin.read()
