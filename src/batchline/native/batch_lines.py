"""The C++ parts of reading a batch file: recognizing lines by their form, and sorting rows of bytes. Needs no torch.

A form is a batch line without its `custom_id`, its prompt and other values that only its hashes depend on. This module
mirrors the structures of `line_forms.h`.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from batchline.native import library_path

OTHER_LINE, BLANK_LINE = -1, -2
HASH_BYTES = 16


class _Text(ctypes.Structure):
    """Mirrors the structure `Text`."""

    _fields_ = [("data", ctypes.c_char_p), ("size", ctypes.c_int64)]


class _PatternArgs(ctypes.Structure):
    """Mirrors the structure `PatternArgs`."""

    _fields_ = [
        *(("pieces", ctypes.POINTER(_Text)), ("values", ctypes.POINTER(ctypes.c_int32))),
        ("num_values", ctypes.c_int64),
    ]


class _FormArgs(ctypes.Structure):
    """Mirrors the structure `FormArgs`."""

    _fields_ = [
        *((name, _PatternArgs) for name in ("line", "prompt", "request")),
        *((name, ctypes.c_int64) for name in ("prompt_is_text", "has_request_hash")),
    ]


class _ScanArgs(ctypes.Structure):
    """Mirrors the structure `ScanArgs`."""

    _fields_ = [
        ("lines", _Text),
        ("max_lines", ctypes.c_int64),
        ("prefix_lengths", ctypes.c_void_p),
        ("num_prefix_lengths", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("lengths", "forms", "id_hashes", "prefix_hashes", "prompt_sizes")),
        ("request_hashes", ctypes.c_void_p),
    ]


class ValueKind(IntEnum):
    """Mirrors the enumeration `ValueKind`. ID: the `custom_id` without its quotes."""

    ID = 0
    STRING = 1
    ARRAY = 2
    OBJECT = 3
    INTEGER = 4


@dataclass(frozen=True, slots=True)
class Pattern:
    """Pieces of text with a value between each two of them."""

    pieces: tuple[bytes, ...]
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FormText:
    """The text of a form.

    line: its values are the kinds of those that differ between the form's lines. prompt, request: the two texts that
    are hashed (`request_traits`); their values are indices of the line's values. prompt_is_text: the prompt is the
    characters of its only value, a string. No request means that its hash is zero.
    """

    line: Pattern
    prompt: Pattern
    request: Pattern | None
    prompt_is_text: bool = False


class ScannedLines:
    """Arrays with a row for each line. Only lines with a form have hashes.

    lengths: bytes, with the line end. forms: the number of the form, `OTHER_LINE` or `BLANK_LINE`. id_hashes,
    request_hashes: (num_lines, 16) uint8. prefix_hashes: (num_lines, number of prefix lengths) uint32.
    """

    def __init__(self, max_lines: int, num_prefix_lengths: int) -> None:
        self.lengths = np.empty(max_lines, np.int64)
        self.forms = np.empty(max_lines, np.int32)
        self.id_hashes = np.empty((max_lines, HASH_BYTES), np.uint8)
        self.prefix_hashes = np.empty((max_lines, num_prefix_lengths), np.uint32)
        self.prompt_sizes = np.empty(max_lines, np.int64)
        self.request_hashes = np.empty((max_lines, HASH_BYTES), np.uint8)

    def first(self, count: int) -> ScannedLines:
        """A view of the first rows."""
        view = ScannedLines.__new__(ScannedLines)
        for name, rows in vars(self).items():
            setattr(view, name, rows[:count])
        return view


class NativeForms:
    """The forms that are known so far. Not for several threads at once."""

    def __init__(self, library: ctypes.CDLL, prefix_lengths: tuple[int, ...], max_lines: int) -> None:
        """max_lines: how many lines `scan` looks at in one call."""
        self._library = library
        self._forms = library.batchline_line_forms_open()
        if not self._forms:
            raise MemoryError
        self._prefix_lengths = np.array(prefix_lengths, np.int64)
        self._out = ScannedLines(max_lines, len(prefix_lengths))

    def add(self, form: FormText) -> int:
        """Learn a form. Returns its number: they count from 0."""
        return self._checked(self._library.batchline_line_forms_add(self._forms, ctypes.byref(_form_args(form))))

    def scan(self, lines: bytes) -> ScannedLines:
        """The first lines of some whole ones. The arrays are valid until the next call."""
        out = self._out
        pointers = (out.lengths, out.forms, out.id_hashes, out.prefix_hashes, out.prompt_sizes, out.request_hashes)
        args = _ScanArgs(
            _Text(lines, len(lines)),
            len(out.lengths),
            self._prefix_lengths.ctypes.data,
            len(self._prefix_lengths),
            *(rows.ctypes.data for rows in pointers),
        )
        return out.first(self._checked(self._library.batchline_line_forms_scan(self._forms, ctypes.byref(args))))

    def close(self) -> None:
        """Free the memory. Idempotent."""
        forms, self._forms = self._forms, None
        self._library.batchline_line_forms_close(forms)

    def _checked(self, count: int) -> int:
        if count < 0:
            raise MemoryError
        return count


def _form_args(form: FormText) -> _FormArgs:
    patterns = map(_pattern_args, (form.line, form.prompt, form.request or Pattern((b"",), ())))
    return _FormArgs(*patterns, form.prompt_is_text, form.request is not None)


def _pattern_args(pattern: Pattern) -> _PatternArgs:
    pieces = (_Text * len(pattern.pieces))(*(_Text(piece, len(piece)) for piece in pattern.pieces))
    values = (ctypes.c_int32 * len(pattern.values))(*pattern.values)
    return _PatternArgs(pieces, values, len(pattern.values))


def sort_rows(library: ctypes.CDLL, rows: np.ndarray[Any, Any]) -> None:
    """Sort rows of bytes in place. rows: (num_rows,) of a fixed-width type; contiguous."""
    assert rows.flags.c_contiguous
    assert rows.flags.writeable
    library.batchline_sort_rows(rows.ctypes.data, len(rows), rows.itemsize)


@functools.cache
def load_batch_lines() -> ctypes.CDLL | None:
    """The library; None if it was not built, or cannot be loaded here."""
    path = library_path()
    try:
        library = None if path is None else ctypes.CDLL(str(path))
    except OSError:
        library = None
    if library is None:
        return None
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "line_forms_open": (ctypes.c_void_p, []),
        "line_forms_close": (None, [ctypes.c_void_p]),
        "line_forms_add": (ctypes.c_int32, [ctypes.c_void_p, ctypes.c_void_p]),
        "line_forms_scan": (ctypes.c_int64, [ctypes.c_void_p, ctypes.c_void_p]),
        "sort_rows": (None, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"batchline_{name}", None)
        if function is None:
            return None
        function.restype, function.argtypes = result, arguments
    return library
