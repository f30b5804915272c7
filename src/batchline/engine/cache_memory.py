"""Prepares memory for the KV cache on a CPU while libraries are imported and a model is loaded.

The system provides memory page by page, when it is first touched. On a virtual machine whose host must find the memory,
that may be slower than a gigabyte per second, and every step that uses new cache blocks would wait. Importing and
loading take seconds on one core; meanwhile a thread on another core touches the beginning of the cache. Needs no torch.
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
"""Bytes to touch at most, which is more than a few seconds suffice for."""

SLICE_BYTES = 8 * 1024**2
"""Bytes to touch before checking whether to stop."""


class CacheMemory:
    """Zeroed address space of up to half of the free memory. A thread touches its beginning."""

    def __init__(self) -> None:
        """Start touching. Raises: OSError if the system does not provide the address space."""
        free = free_bytes("cpu")
        self._ahead = min(MAX_AHEAD_BYTES, free // 8) // SLICE_BYTES * SLICE_BYTES
        self._mapping = fresh_mapping(free // 2)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._touch, name="batchline-cache-memory", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop touching; touched pages stay. Idempotent."""
        self._is_stopped.set()
        self._thread.join()

    def take(self, num_bytes: int) -> np.ndarray:
        """(num_bytes,) uint8 zeros, with the beginning already touched. Call only once: arrays would share memory."""
        if num_bytes > len(self._mapping):
            return fresh_zeros(num_bytes)
        self.stop()  # it writes zeros, which must not overwrite the caller's numbers
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
    """Memory that is prepared while the block runs; None if the system cannot do that."""
    try:
        memory = CacheMemory()
    except (OSError, AttributeError):  # too few addresses allowed, or not Linux
        yield None
        return
    try:
        yield memory
    finally:
        memory.stop()
