"""How much memory is free where models run, and what of it is promised already.

Systems hand out zeroed memory as addresses and find the memory itself when it is first written. So the cache of a model
that has done little yet looks free; the next model's cache must not be sized from it.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import psutil

CGROUP = Path("/sys/fs/cgroup")
"""Where a container sees its own limits (cgroup v2)."""


class MemoryLedger:
    """The arrays of this process whose memory is promised, as long as they live."""

    def __init__(self) -> None:
        self._arrays: WeakValueDictionary[int, np.ndarray] = WeakValueDictionary()

    def promise(self, array: np.ndarray) -> np.ndarray:
        """The same array, noted down until nothing refers to it any more."""
        self._arrays[id(array)] = array
        return array

    def untouched_bytes(self) -> int:
        """What is promised and has not been taken yet, so that it looks free."""
        return sum(array.nbytes - _resident_bytes(array) for array in list(self._arrays.values()))


def fresh_mapping(num_bytes: int) -> mmap.mmap:
    """Zeroed memory straight from the system, given back to it as a whole when nothing refers to it any more.

    An allocator may hand out memory that something else used before: it has to write the zeros, gigabytes of them, and
    keeps the memory afterwards. Raises: OSError where the system does not give so many addresses.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, num_bytes)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def fresh_zeros(num_bytes: int) -> np.ndarray:
    """(num_bytes,) uint8 of a mapping of its own. Raises: OSError as `fresh_mapping` does."""
    return np.frombuffer(fresh_mapping(max(num_bytes, 1)), dtype=np.uint8, count=num_bytes)


LEDGER = MemoryLedger()
"""One for the process, as its memory is one. Memory of a GPU is taken when it is asked for and needs no ledger."""


def free_bytes(device_type: str | None = None) -> int:
    """Bytes on the GPU or the machine that are neither taken nor promised; None takes the GPU where there is one."""
    import torch  # for seconds: whoever starts up wants this module without it

    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        return torch.cuda.mem_get_info()[0]
    available = int(psutil.virtual_memory().available)
    room = _container_room()
    free = available if room is None else min(available, room)
    return max(0, free - LEDGER.untouched_bytes())


def _container_room() -> int | None:
    """Bytes left under the container's limit; None without one. Cached files give way, so they do not count."""
    try:
        limit = int((CGROUP / "memory.max").read_text())  # "max" is no limit
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, limit - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0)))


def _resident_bytes(array: np.ndarray) -> int:
    """How much of a contiguous array's memory the system has given already; 0 where it cannot be asked."""
    start = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    num_pages = -(-(array.ctypes.data + array.nbytes - start) // mmap.PAGESIZE)
    pages = np.empty(num_pages, dtype=np.uint8)
    try:
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(start), ctypes.c_size_t(num_pages * mmap.PAGESIZE), ctypes.c_void_p(pages.ctypes.data)
        )
    except (OSError, AttributeError, TypeError):  # no such call, as on Windows
        return 0
    return 0 if failed else min(array.nbytes, int((pages & 1).sum(dtype=np.int64)) * mmap.PAGESIZE)
