"""Ends the processes of a new Ray cluster when the process that started it is gone, however it ended.

Ray's own processes end with the driver, except two for each machine, which notice it a minute later. The guard is a
small process that reads a pipe from the driver. At the pipe's end, it ends every process that has inherited the
driver's mark in its environment, and removes the cluster's folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress

MARK = "BATCHLINE_RAY_CLUSTER"

GRACE_S = 5.0
"""How long processes may take to end by themselves."""


class Guard:
    """A running guard. folder: for the cluster's files. mark: what its processes must have in their environment."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        """Raises: OSError."""
        self.folder = tempfile.mkdtemp(prefix="batchline-ray-")
        name = secrets.token_hex(16)
        self.mark = {MARK: name}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, name, self.folder, str(grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )

    def close(self) -> None:
        """Let it end what is left of the cluster, and wait for it. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def marked_processes(name: str) -> list[int]:
    """The processes of this user with the mark in their environment."""
    mark = f"{MARK}={name}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if mark in file.read().split(b"\0"):
                        found.append(int(entry))
            except OSError:  # it has ended, or is another user's
                continue
    return found


def _end_processes(name: str, grace_s: float) -> None:
    deadline = time.monotonic() + grace_s
    while (left := marked_processes(name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Wait for the end of the driver, and clean up after it."""
    name, folder, grace_s = sys.argv[1:]
    sys.stdin.buffer.read()
    if sys.platform == "linux":
        _end_processes(name, float(grace_s))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
