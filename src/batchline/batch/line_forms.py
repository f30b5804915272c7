"""Takes whole blocks of lines that are like earlier ones in everything but `custom_id`, prompt and a few other fields.

A *form* is a batch line without these values. The check pass parses the first line of each form in Python, and
remembers here what it has found. The native library then recognizes the form's other lines, checks and hashes them
(`native/line_forms.cpp`), and this module turns the hashes into the rows that the parser in Python would have made: the
results are the same, with or without the library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from batchline.batch.lines import split_at_values
from batchline.batch.plan import KEY_ARRAY, KeyParts, Planner
from batchline.batch.request_traits import MAX_DECODE, PREFIX_LENGTHS, PROMPT_FIELDS, prompt_bytes, request_text
from batchline.native.batch_lines import FormText, NativeForms, Pattern, ScannedLines, ValueKind, load_batch_lines

MAX_FORMS = 2000
"""After that many lines, no further form is learned: the lines of the file have little in common."""

MAX_FORMS_BYTES = 8 << 20
"""The text of all forms is at most about three times that long."""

MAX_RECOGNIZED_BYTES = 16 << 20
"""Longer lines may not be recognized: the memory for a block of lines has a limit."""

MAX_SCANNED_LINES = 8192

_LEAST_TAKEN = 8
"""Once all forms are known, at least one line of so many must have one of them."""

_FREE_FIELDS = (
    *("messages", *PROMPT_FIELDS, "documents", "text_2", "data_2"),
    *("seed", "user", "metadata", "safety_identifier", "prompt_cache_key"),
)
"""Fields whose values may differ between the lines of a form. The check of a line, its endpoint and its planning key
depend on their type at most, and on the text of the prompt and of the whole request."""

_KINDS = {str: ValueKind.STRING, list: ValueKind.ARRAY, dict: ValueKind.OBJECT, int: ValueKind.INTEGER}


@dataclass(slots=True)
class LineForm:
    """What the lines of a form have in common, and how many were recognized."""

    model: str
    url: str
    unknown_fields: Sequence[str]
    num_recognized: int = 0


class LineForms:
    """The forms of one file."""

    def __init__(self, native: NativeForms, planner: Planner | None) -> None:
        self.forms: list[LineForm] = []
        self._native = native
        self._planner = planner
        self._known: set[Pattern] = set()
        self._num_looked_at = self._num_bytes = self._num_scanned = self._num_taken = 0
        self._key_parts = np.zeros(MAX_FORMS, KEY_ARRAY)
        self._decodes = np.zeros(MAX_FORMS, np.int64)  # -1: the prompt's length

    @classmethod
    def open(cls, planner: Planner | None) -> LineForms | None:
        """None if the native library was not built. planner: takes the keys of the lines."""
        library = load_batch_lines()
        if library is None:
            return None
        lengths = () if planner is None else PREFIX_LENGTHS
        return cls(NativeForms(library, lengths, MAX_SCANNED_LINES), planner)

    @property
    def pays(self) -> bool:
        """Whether forms are still learned, or recognize lines. If lines have little in common, a search for their forms
        only takes time."""
        return self._num_looked_at < MAX_FORMS or self._num_taken * _LEAST_TAKEN > self._num_scanned

    def learn(self, raw: bytes, url: str, body: dict[str, Any], unknown_fields: Sequence[str]) -> None:
        """Learn the form of a good line, if it has one."""
        if self._num_looked_at == MAX_FORMS or len(raw) > MAX_RECOGNIZED_BYTES:
            return
        self._num_looked_at += 1
        kinds = {name: kind for name in _FREE_FIELDS if (kind := _KINDS.get(type(body.get(name)))) is not None}
        split = split_at_values(raw, kinds)
        if split is None:
            return
        pieces, names = split
        line = Pattern(tuple(pieces), tuple(kinds.get(name, ValueKind.ID) for name in names))
        if line in self._known:
            return
        parts = KeyParts(0, 0, 0, False) if self._planner is None else self._planner.key_parts(url, body)
        text = _form_text(line, names, url, body, parts)
        num_bytes = self._num_bytes + sum(map(len, pieces))
        if text is None or num_bytes > MAX_FORMS_BYTES:
            return
        self._num_bytes = num_bytes
        self._known.add(line)
        number = self._native.add(text)
        self._key_parts[number]["model"], self._key_parts[number]["endpoint"] = parts.model, parts.endpoint
        self._decodes[number] = -1 if parts.decode is None else parts.decode
        self.forms.append(LineForm(body["model"], url, unknown_fields))

    def scan(self, block: bytes) -> ScannedLines:
        """The first lines of a block of whole ones. The arrays are valid until the next call."""
        return self._native.scan(block)

    def take(self, scanned: ScannedLines, is_recognized: np.ndarray[Any, Any], positions: np.ndarray[Any, Any]) -> None:
        """Count the recognized lines and plan their requests. is_recognized: (num_lines,) bool; positions: theirs."""
        forms = scanned.forms[is_recognized]
        self._num_scanned += len(is_recognized)
        self._num_taken += len(forms)
        for number, count in enumerate(np.bincount(forms).tolist()):
            self.forms[number].num_recognized += count
        if self._planner is None:
            return
        keys = self._key_parts[forms]
        decodes = self._decodes[forms]
        sizes = np.minimum(scanned.prompt_sizes[is_recognized], MAX_DECODE)
        keys["prefixes"] = scanned.prefix_hashes[is_recognized]
        keys["decode"] = 0xFFFFFFFF - np.where(decodes < 0, sizes, decodes)
        keys["request"] = scanned.request_hashes[is_recognized]
        keys["position"] = positions
        self._planner.add_keys(keys)

    def close(self) -> None:
        """Free the native memory."""
        self._native.close()


def _form_text(line: Pattern, names: Sequence[str], url: str, body: dict[str, Any], parts: KeyParts) -> FormText | None:
    """names: of the line's values. None if the body is nested too deeply to be written as JSON."""
    marks = {b'"%b"' % os.urandom(16).hex().encode(): index for index in range(len(names))}
    values = {name: orjson.Fragment(mark) for name, mark in zip(names, marks, strict=True) if name}
    marked = {**body, **values}
    prompt = _split_at_marks(prompt_bytes(marked), marks)
    request = request_text(url, marked)
    if request is None:
        return None
    kinds = [line.values[index] for index in prompt.values]
    is_text = kinds == [ValueKind.STRING] and prompt.pieces == (b"", b"")
    return FormText(line, prompt, _split_at_marks(request, marks) if parts.may_be_copy else None, is_text)


def _split_at_marks(text: bytes, marks: Mapping[bytes, int]) -> Pattern:
    """marks: what stands in the place of a value, and its index."""
    parts = re.split(b"(%b)" % b"|".join(marks), text)
    return Pattern(tuple(parts[::2]), tuple(marks[mark] for mark in parts[1::2]))
