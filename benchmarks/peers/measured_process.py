"""A peer's command: started, its memory sampled from outside, and ended with all that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType

import psutil


class PeerError(Exception):
    """The peer cannot be measured. `str()` of it says why, and what to do."""


@contextmanager
def started_process(
    command: list[str], environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """The command with the lines of its output. Afterwards, whatever happened, none of its processes is left."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a process group of its own, which can be ended as a whole
    )
    assert process.stdout is not None  # it was asked for
    try:
        with process.stdout as output:
            yield process, output
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class TreeMemory:
    """Peak memory of a process and all it has started, sampled every `interval_s` while the context is open.

    The sum of what each holds for itself plus the largest shared part: libraries that all have mapped count once. The
    plain sum of RSS is a tenth more for vLLM. Proportional set sizes (PSS) agree with this figure, but reading them
    walks all page tables and would slow down what is measured.
    """

    def __init__(self, pid: int, interval_s: float = 1.0) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> TreeMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, tree_memory_bytes(self._pid))


def tree_memory_bytes(pid: int) -> int:
    """What a process and all it has started hold now; 0 if it has ended."""
    parts: list[tuple[int, int]] = []
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # it ended between listing and looking
                memory = member.memory_info()
                parts.append((memory.rss - memory.shared, memory.shared))
    return sum(private for private, _ in parts) + max((shared for _, shared in parts), default=0)
