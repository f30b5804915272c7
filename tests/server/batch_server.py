"""The Files and Batches API over a fake backend, as a process: `python batch_server.py STATE_FOLDER`. Its limits are
higher than any test's files. It ends with its standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from threaded_server import ThreadedServer

from batchline.backends.base import Answer, EndpointRequest
from batchline.jobs.options import JobsOptions
from batchline.testing import FakeBackend


class ForgetfulBackend(FakeBackend):
    """It does not keep the requests."""

    async def answer(self, request: EndpointRequest) -> Answer:
        """The echo."""
        answer = await super().answer(request)
        self.requests.clear()
        return answer


if __name__ == "__main__":
    jobs = JobsOptions(state_dir=Path(sys.argv[1]), max_file_bytes=1 << 40, max_requests=1 << 30)
    with ThreadedServer(ForgetfulBackend(), jobs=jobs) as server:
        print(server.url, flush=True)
        sys.stdin.read()
