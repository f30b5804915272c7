"""Records which files of the package run between the first byte of a chat request and the last byte of its answer.

The request is plain: one message without media, tools or constraints, a whole answer, a server without keys and access
log, a model in memory. A file counts if one of its functions runs, whatever it does. The forward pass counts as one
file, `engine/model_runner.py`: what runs below it depends on the model and the machine.

    python tests/server/chat_path.py    the files, with the functions that run in each
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from threaded_server import ThreadedServer

import batchline
from batchline.backends.in_process import InProcessBackend
from batchline.config import CacheConfig, EngineConfig, ModelConfig

PACKAGE = Path(batchline.__file__).parent
TINY_CHAT = Path(__file__).parents[2] / "examples/models/tiny-chat"
FORWARD_PASS = ("engine/model_runner.py", "run")

BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0.8, "seed": 1}


class Recorder:
    """Notes the functions that run in every thread that starts after `recording`, while `is_on`."""

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = defaultdict(set)
        self.is_on = False
        self._forward_pass = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function (`sys.setprofile`)."""
        code = frame.f_code
        if not (self.is_on and code.co_filename.startswith(str(PACKAGE)) and event in ("call", "return")):
            return
        file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
        if (file, code.co_name) == FORWARD_PASS:
            self._forward_pass.is_running = event == "call"
        elif event == "return" or getattr(self._forward_pass, "is_running", False):
            return
        self.functions[file].add(code.co_name)


@contextmanager
def recording() -> Iterator[Recorder]:
    """A recorder for the threads that start inside the block."""
    recorder = Recorder()
    threading.setprofile(recorder)
    try:
        yield recorder
    finally:
        threading.setprofile(None)  # type: ignore[arg-type] # as the documentation says


def functions_of_a_chat() -> Mapping[str, set[str]]:
    """The names of the functions that run, by file."""
    model = ModelConfig(model=str(TINY_CHAT), served_names=("tiny",), dtype="float32", num_threads=1)
    backend = InProcessBackend([EngineConfig(model=model, cache=CacheConfig(num_bytes=64 << 20))])
    with recording() as recorder, ThreadedServer(backend) as server:
        for is_on in (False, True):  # the first request fills caches
            recorder.is_on = is_on
            httpx.post(f"{server.url}/v1/chat/completions", json={"model": "tiny", **BODY}).raise_for_status()
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.loop).result()  # then the request is counted, too
        recorder.is_on = False
    return recorder.functions


if __name__ == "__main__":
    import batchline.backends.resident_models  # before anything is recorded: that makes it fast

    found = functions_of_a_chat()
    for file, names in sorted(found.items()):
        print(f"{file:32} {', '.join(sorted(names))}")
    print(f"{len(found)} files")
