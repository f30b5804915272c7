"""Gives memory back to the system that the C library keeps after large objects were freed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

HUGE_TEXT = 1 << 20
"""Tokenizing so many characters leaves 100 bytes or more behind for each: 800 MB for a text of 7.5 MB."""


def release_after(texts: Sequence[str]) -> None:
    """Call it when texts have been tokenized. If they are huge, it takes a few percent of the tokenizer's time."""
    if sum(map(len, texts)) >= HUGE_TEXT:
        release_memory()


def release_memory() -> None:
    """Give free memory back, where the C library can. Releases the interpreter's lock; takes up to half a second."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    """glibc's function; None on other systems."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
