"""In which order requests run, and which of them are one: decided on fixed-width keys, never on whole lines.

Order: model, endpoint, then the leading bytes of the prompt (a cheap stand-in for its leading tokens), so that requests
that share a prefix are neighbours; within such a group the longest expected decode comes first, so that the tail is
short. One request goes ahead of all, a short one, whose answer shows early how the run goes. A prefix is known by
hashes at a few lengths; one that a request shares with no other does not separate it from its group. Identical
deterministic requests stand next to each other, run once, and count as one.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from batchline.batch.index import PositionSet
from batchline.batch.sorting import RecordSorter, Rows, column

PREFIX_LENGTHS = (64, 256, 512, 1024, 2048, 4096)
"""Bytes of the prompt at which a shared prefix is looked for."""

GROUP_SAMPLES = 8

MAX_COPIES = 1023
"""How many copies one run of a request may serve: bounds the memory of a file of identical lines."""

# A planning key, every part big-endian. The last part makes the order total and names the line.
#   0      2        3                              27          31           47        55
#   | model | endpoint | hash at each prefix length | ~decode   | request    | position |
_PREFIX = slice(3, 3 + 4 * len(PREFIX_LENGTHS))
_DECODE = slice(_PREFIX.stop, _PREFIX.stop + 4)
_REQUEST = slice(_DECODE.stop, _DECODE.stop + 16)
_POSITION = slice(_REQUEST.stop, _REQUEST.stop + 8)
_KEY = struct.Struct(f">HB{len(PREFIX_LENGTHS)}II16sQ")
KEY_WIDTH = _KEY.size

_PROMPT_FIELDS = ("prompt", "input", "query", "text_1", "queries", "data_1")
_NOT_DEDUPLICABLE = bytes(16)
GENERATING_ENDPOINTS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
_COMPLETION_MAX_TOKENS = 16
_UNKNOWN_DECODE = 2**31

# An entry of the plan on disk: a position, and in the highest bits whether the one before it answers it too,
# and whether a new group of requests with a shared prefix starts with it.
_COPY_BIT = 1 << 63
_START_BIT = 1 << 62
_POSITION_BITS = _START_BIT - 1


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request to run: the line it stands on, and the lines that its answer also serves."""

    position: int
    copies: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """Neighbours in the plan with the same model, endpoint and shared prefix. samples: positions of its first ones."""

    samples: tuple[int, ...]
    num_requests: int
    num_copies: int


class Planner:
    """Collects a key of every good line during the check pass, then writes the order of the run to disk."""

    def __init__(self, scratch: Path, *, dedup: bool = True) -> None:
        self._scratch = scratch
        self._dedup = dedup
        self._sorter = RecordSorter(scratch, "plan-keys", KEY_WIDTH)
        self._models: dict[str, int] = {}
        self._endpoints: dict[str, int] = {}

    def add(self, position: int, url: str, body: dict[str, Any]) -> None:
        """Take one good line; a `check.LineObserver`."""
        model = _number(self._models, body["model"], 0xFFFF)
        endpoint = _number(self._endpoints, url, 0xFF)
        prompt = prompt_bytes(body)
        decode = expected_decode(url, body, prompt)
        request = request_hash(url, body) if self._dedup and is_deterministic(url, body) else _NOT_DEDUPLICABLE
        self._sorter.add(_KEY.pack(model, endpoint, *prefix_hashes(prompt), 0xFFFFFFFF - decode, request, position))

    def plan(self, *, skip: PositionSet) -> Plan:
        """Write the order of all lines taken, but those in `skip`; once. Raises: OSError."""
        by_group = RecordSorter(self._scratch, "plan-order", KEY_WIDTH)
        for rows in _with_shared_prefixes(_without(self._sorter.sorted_blocks(), skip)):
            by_group.add(rows.tobytes())
        path = self._scratch / "plan"
        num_requests = num_copies = 0
        previous = np.zeros((1, KEY_WIDTH), dtype=np.uint8)
        with path.open("wb") as file:
            for rows in by_group.sorted_blocks():
                window = np.concatenate([previous, rows])
                previous = rows[-1:]
                is_copy, is_start = _is_copy(window), _is_group_start(window)
                entries = _positions(rows) | is_copy * np.uint64(_COPY_BIT) | is_start * np.uint64(_START_BIT)
                file.write(entries.data)
                num_requests += len(rows)
                num_copies += int(is_copy.sum())
        return Plan(path, num_requests, num_copies)

    def close(self) -> None:
        """Drop the keys. Idempotent."""
        self._sorter.close()


@dataclass(frozen=True, slots=True)
class Plan:
    """The order of a run, on disk. num_copies: how many of the requests are served by another one's answer."""

    path: Path
    num_requests: int
    num_copies: int

    def items(self, done: PositionSet) -> Iterator[WorkItem]:
        """What is left to run: the shortest request of the first group, then the others in order.

        A request whose first line is done is run again for its copies alone.
        """
        ahead = next(_work_items(_entries(self.path, _last_of_first_group(self.path)), done), None)
        if ahead is not None:
            yield ahead
        for item in _work_items(_entries(self.path), done):
            if ahead is None or item.position != ahead.position:
                yield item

    def groups(self) -> Iterator[PlannedGroup]:
        """The groups, in order."""
        samples: list[int] = []
        num_requests = num_copies = 0
        for entry in _entries(self.path):
            if entry & _START_BIT and num_requests:
                yield PlannedGroup(tuple(samples), num_requests, num_copies)
                samples, num_requests, num_copies = [], 0, 0
            num_requests += 1
            num_copies += bool(entry & _COPY_BIT)
            if len(samples) < GROUP_SAMPLES and not entry & _COPY_BIT:
                samples.append(entry & _POSITION_BITS)
        if num_requests:
            yield PlannedGroup(tuple(samples), num_requests, num_copies)


def prompt_bytes(body: dict[str, Any]) -> bytes:
    """What stands in for the rendered prompt: tools and messages, or the prompt or input, as bytes."""
    content = prompt_content(body)
    if body.get("messages") is not None and body.get("tools"):
        content = [body["tools"], content]
    if isinstance(content, str):
        return content[: PREFIX_LENGTHS[-1]].encode()
    try:
        return orjson.dumps(content)
    except TypeError:  # nested deeper than the writer goes: such a request gets no company
        return b""


def prompt_content(body: dict[str, Any]) -> Any:
    """The field of a body that is its prompt: the messages, or the prompt, input or query; None without any."""
    messages = body.get("messages")
    if messages is not None:
        return messages
    return next((body[name] for name in _PROMPT_FIELDS if name in body), None)


def prefix_hashes(prompt: bytes) -> list[int]:
    """CRC-32 of the prompt's first bytes, at each of `PREFIX_LENGTHS`."""
    hashes: list[int] = []
    crc = start = 0
    for end in PREFIX_LENGTHS:
        if start >= len(prompt):
            return hashes + [crc] * (len(PREFIX_LENGTHS) - len(hashes))
        crc = zlib.crc32(prompt[start:end], crc)
        hashes.append(crc)
        start = end
    return hashes


def expected_decode(url: str, body: dict[str, Any], prompt: bytes) -> int:
    """How much work comes after the prefix: output tokens at most; for requests that generate nothing, input bytes."""
    if url not in GENERATING_ENDPOINTS:
        return min(len(prompt), _UNKNOWN_DECODE)
    limit = output_limit(url, body)
    return _UNKNOWN_DECODE if limit is None else min(limit, _UNKNOWN_DECODE)


def output_limit(url: str, body: dict[str, Any]) -> int | None:
    """The most output tokens that a generating request asks for; None is all that the context leaves."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("max_output_tokens")
    if isinstance(limit, int) and limit > 0:
        return limit
    return _COMPLETION_MAX_TOKENS if url == "/v1/completions" else None


def is_deterministic(url: str, body: dict[str, Any]) -> bool:
    """Whether asking twice gives the same answer: greedy, seeded, or nothing is sampled at all."""
    if url not in GENERATING_ENDPOINTS:
        return True
    temperature = body.get("temperature")
    is_greedy = isinstance(temperature, int | float) and not isinstance(temperature, bool) and 0 <= temperature < 1e-5
    return is_greedy or isinstance(body.get("seed"), int)


def request_hash(url: str, body: dict[str, Any]) -> bytes:
    """128 bits that equal requests share, whatever the order of their keys."""
    try:
        canonical = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return _NOT_DEDUPLICABLE
    return hashlib.blake2b(canonical, digest_size=16, person=url.encode()[-16:]).digest()


def _number(numbers: dict[str, int], name: str, highest: int) -> int:
    number = numbers.get(name)
    if number is None:
        number = min(len(numbers), highest)
        if number < highest:
            numbers[name] = number
    return number


def _positions(rows: Rows) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return column(rows, _POSITION.start, 8)


def _without(blocks: Iterator[Rows], skip: PositionSet) -> Iterator[Rows]:
    for rows in blocks:
        if len(skip):
            rows = rows[np.array([position not in skip for position in _positions(rows).tolist()], dtype=bool)]
        if len(rows):
            yield rows


def _with_shared_prefixes(blocks: Iterator[Rows]) -> Iterator[Rows]:
    """The same rows in order, hashes that a request shares with no other set to zero. Holds one run's copies back."""
    before = np.zeros((1, KEY_WIDTH), dtype=np.uint8)
    held = before[:0]
    for rows in blocks:
        held = np.concatenate([held, rows])
        firsts = _first_rows(held)
        last = firsts[-1]
        if last > 0:
            yield _keep_shared_prefixes(before, held[:last], firsts[:-1], held[last : last + 1])
            before, held = held[firsts[-2] : firsts[-2] + 1], held[last:]
    if len(held):
        yield _keep_shared_prefixes(before, held, _first_rows(held), np.zeros_like(before))


def _first_rows(rows: Rows) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Where requests start that are no copies of the one before; of more copies than one run serves, each run's."""
    numbers = np.arange(len(rows))
    is_copy = np.concatenate([[False], _is_copy(rows)])
    num_before = numbers - np.maximum.accumulate(np.where(is_copy, 0, numbers))
    return np.flatnonzero(num_before % (MAX_COPIES + 1) == 0)


def _keep_shared_prefixes(before: Rows, rows: Rows, firsts: np.ndarray[Any, np.dtype[np.intp]], after: Rows) -> Rows:
    """A copy of `rows` where the hashes are zero that no neighbour shares with a request. firsts: where each starts;
    before, after: (1, KEY_WIDTH), the requests around them."""
    requests = np.concatenate([before, rows[firsts], after])
    equals_next = requests[1:] == requests[:-1]
    lengths = np.diff(firsts, append=len(rows))
    kept: Rows = rows.copy()
    for level in range(len(PREFIX_LENGTHS)):
        end = _PREFIX.start + 4 * (level + 1)
        same = equals_next[:, :end].all(axis=1)
        kept[np.repeat(~(same[1:] | same[:-1]), lengths), end - 4 : end] = 0
    return kept


def _is_copy(rows: Rows) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Of all rows but the first: whether the row's request equals the one before it."""
    requests = rows[:, _REQUEST]
    is_copy: np.ndarray[Any, np.dtype[np.bool_]] = (requests[1:] == requests[:-1]).all(axis=1)
    return is_copy & requests[1:].any(axis=1)


def _is_group_start(rows: Rows) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Of all rows but the first: whether its model, endpoint or shared prefix differs from the one before it."""
    groups = rows[:, : _PREFIX.stop]
    is_start: np.ndarray[Any, np.dtype[np.bool_]] = (groups[1:] != groups[:-1]).any(axis=1)
    return is_start


def _work_items(entries: Iterable[int], done: PositionSet) -> Iterator[WorkItem]:
    item: list[int] = []
    for entry in entries:
        is_copy, position = entry & _COPY_BIT, entry & _POSITION_BITS
        if item and (not is_copy or len(item) > MAX_COPIES):
            yield WorkItem(item[0], tuple(item[1:]))
            item = []
        if position not in done:
            item.append(position)
    if item:
        yield WorkItem(item[0], tuple(item[1:]))


def _last_of_first_group(path: Path) -> int:
    """The number of the entry with which the last request of the first group, the shortest, starts."""
    number = last = 0
    for block in _blocks(path):
        starts = np.flatnonzero(block & np.uint64(_START_BIT))
        later_starts = starts[starts + number > 0]
        in_group = block[: later_starts[0]] if len(later_starts) else block
        requests = np.flatnonzero(in_group < np.uint64(_COPY_BIT))
        if len(requests):
            last = number + int(requests[-1])
        if len(later_starts):
            break
        number += len(block)
    return last


def _entries(path: Path, first: int = 0) -> Iterator[int]:
    for block in _blocks(path, first):
        yield from block.tolist()


def _blocks(path: Path, first: int = 0) -> Iterator[np.ndarray[Any, np.dtype[np.uint64]]]:
    offset = first * 8
    while len(block := np.fromfile(path, dtype=np.uint64, count=65536, offset=offset)):
        offset += block.nbytes
        yield block
