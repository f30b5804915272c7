"""Measures how much memory is free for models, without the memory that is already promised to caches.

A system reserves only addresses for zeroed memory, and provides the memory when it is first written. So the unused part
of a model's cache still looks free, but the next model's cache must not be sized by it.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from weakref import WeakValueDictionary

import numpy as np
import psutil

from batchline.control_group import memory_room


class MemoryLedger:
    """The live arrays of this process whose memory is promised."""

    def __init__(self) -> None:
        self._arrays: WeakValueDictionary[int, np.ndarray] = WeakValueDictionary()

    def promise(self, array: np.ndarray) -> np.ndarray:
        """Note an array until nothing refers to it any more. Returns the same array."""
        self._arrays[id(array)] = array
        return array

    def untouched_bytes(self) -> int:
        """Bytes that are promised but not yet written, so that they still look free."""
        return sum(array.nbytes - _resident_bytes(array) for array in list(self._arrays.values()))


def fresh_mapping(num_bytes: int) -> mmap.mmap:
    """Zeroed memory directly from the system. It is returned as a whole when nothing refers to it any more.

    An allocator could reuse old memory instead: it would have to write gigabytes of zeros, and would keep the memory
    afterwards. Raises: OSError if the system does not provide the address space.
    """
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return mmap.mmap(-1, num_bytes)
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def fresh_zeros(num_bytes: int) -> np.ndarray:
    """(num_bytes,) uint8 zeros in a new mapping. Raises: OSError, see `fresh_mapping`."""
    return np.frombuffer(fresh_mapping(max(num_bytes, 1)), dtype=np.uint8, count=num_bytes)


LEDGER = MemoryLedger()
"""The process's only ledger. A GPU's memory is taken as soon as it is allocated and needs none."""


def free_bytes(device_type: str | None = None) -> int:
    """Bytes on the GPU or the machine that are neither used nor promised; None means the GPU if there is one."""
    if device_type != "cpu":
        import torch  # takes seconds, and the start-up uses this module without it

        if device_type == "cuda" or torch.cuda.is_available():
            return torch.cuda.mem_get_info()[0]
    available = int(psutil.virtual_memory().available)
    room = memory_room()
    free = available if room is None else min(available, room)
    return max(0, free - LEDGER.untouched_bytes())


def cache_share(num_free: int, device_type: str) -> int:
    """How much of the free memory a cache may take: on a CPU half of it, because other things need memory, too."""
    return num_free if device_type == "cuda" else num_free // 2


def _resident_bytes(array: np.ndarray) -> int:
    """How much of a contiguous array's memory is resident; 0 if the system cannot say."""
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
