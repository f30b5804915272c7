"""Memory for the KV cache on a CPU, made ready while libraries are imported and a model is loaded.

Systems hand out memory page by page when it is first touched: a virtual machine whose host has to find it first gives
less than a gigabyte a second, which every step that enters new cache blocks would wait for. Importing and loading take
seconds of one core; a thread touches the beginning of the cache on another one meanwhile. Needs no torch.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from batchline.engine.memory import free_bytes, fresh_mapping, fresh_zeros

MAX_AHEAD_BYTES = 1536 * 1024**2
"""What is touched at most: more than a few seconds are good for."""

SLICE_BYTES = 8 * 1024**2
"""Touched at a time, before looking whether to stop."""


class CacheMemory:
    """Zeroed memory of up to half of what is free: addresses only, but for the beginning, which a thread touches."""

    def __init__(self) -> None:
        """Start touching. Raises: OSError where the system does not give so many addresses."""
        free = free_bytes("cpu")
        self._ahead = min(MAX_AHEAD_BYTES, free // 8) // SLICE_BYTES * SLICE_BYTES
        self._mapping = fresh_mapping(free // 2)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="batchline-cache-memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the touching; what it has come to stays. Idempotent."""
        self._is_stopped.set()
        self._thread.join()

    def take(self, num_bytes: int) -> np.ndarray:
        """(num_bytes,) uint8 zeros, ready in front. To be called once: a second array would share the memory."""
        if num_bytes > len(self._mapping):
            return fresh_zeros(num_bytes)
        self.stop()  # it writes zeros, which must not come behind what the caller writes
        first_unused = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if first_unused < self._ahead:
            self._mapping.madvise(mmap.MADV_DONTNEED, first_unused)
        return np.frombuffer(self._mapping, dtype=np.uint8, count=num_bytes)

    def _touch(self) -> None:
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        for offset in range(0, self._ahead, SLICE_BYTES):
            if self._is_stopped.is_set():
                return
            ctypes.memset(start + offset, 0, SLICE_BYTES)  # lets other threads run meanwhile


@contextmanager
def cache_memory_ahead() -> Iterator[CacheMemory | None]:
    """Memory that is being made ready while the block runs; None where the system has no such means."""
    try:
        memory = CacheMemory()
    except (OSError, AttributeError):  # too few addresses allowed, or not Linux
        yield None
        return
    try:
        yield memory
    finally:
        memory.stop()
