"""Takes whole blocks of lines that are like earlier ones in everything but their `custom_id` and messages.

A *form* is a batch line without these two values. The check pass parses the first line of each form in Python, and
remembers here what it has found. The native library then recognizes the form's other lines, checks and hashes them
(`native/line_forms.cpp`), and this module turns the hashes into the rows that the parser in Python would have made: the
results are the same, with or without the library.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from batchline.batch.lines import around_messages
from batchline.batch.plan import KEY_ARRAY, KeyParts, Planner
from batchline.batch.request_traits import MAX_DECODE, PREFIX_LENGTHS, prompt_bytes, request_text
from batchline.native.batch_lines import FormText, NativeForms, ScannedLines, load_batch_lines

MAX_FORMS = 2000
"""After that many lines, no further form is learned: the lines of the file have little in common."""

MAX_SCANNED_LINES = 8192


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
        self._known: set[tuple[bytes, bytes, bytes]] = set()
        self._num_looked_at = 0
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

    def learn(self, raw: bytes, url: str, body: dict[str, Any], unknown_fields: Sequence[str]) -> None:
        """Learn the form of a good line, if it has one."""
        if self._num_looked_at == MAX_FORMS or type(body.get("messages")) is not list:
            return
        self._num_looked_at += 1
        line = around_messages(raw)
        if line is None or line in self._known:
            return
        parts = KeyParts(0, 0, 0, False) if self._planner is None else self._planner.key_parts(url, body)
        text = _form_text(line, url, body, parts)
        if text is None:
            return
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


def _form_text(line: tuple[bytes, bytes, bytes], url: str, body: dict[str, Any], parts: KeyParts) -> FormText | None:
    """None if the body is nested too deeply to be written as JSON."""
    mark = b'"%b"' % os.urandom(16).hex().encode()
    marked = {**body, "messages": orjson.Fragment(mark)}
    prompt = prompt_bytes(marked).split(mark)
    request = (request_text(url, marked) or b"").split(mark)
    if len(prompt) != 2 or len(request) != 2:
        return None
    return FormText(line, (prompt[0], prompt[1]), (request[0], request[1]) if parts.may_be_copy else None)
