"""Records which requests are in flight, so that those that crash the process can be found.

Two small files in the job folder survive the process, because their written pages belong to the system. `in-flight` has
a token of the run in this process and the position of every request that the backend is answering. `fault` has the
output of `faulthandler` if the process dies of a fault in native code (a segmentation fault, an abort). SIGKILL and
power loss leave no fault. The kernel also uses SIGKILL when memory runs out, but counts such kills: `fault` begins with
that count, if the process's control group has a readable one. Such a kill makes suspects like a crash, but it is no
proof: another process may have taken the memory.

An engine that ends for good ends the run but not the process. The run itself notes that as a crash.

A request that was in flight at a crash is a suspect. Suspects run before all others: in small groups after one crash,
alone after two. After the third crash a request gets an error as its answer. If some of these were kills for lack of
memory, no other request may have been in flight at the last `LETHAL_STARVED_ALONE` deaths, and no result in between.

A kill without a known cause is weak evidence. A user may have sent it, but a container that ran out of memory leaves no
other trace. The first such kill makes no suspects, and a kill after a request to stop counts for nothing. Many requests
may have been in flight at several kills that no request is to blame for. Until they are few, they run in groups, which
one more kill tells apart. A request gets an error after `LETHAL_KILLS` kills, if no other was in flight at the
last `LETHAL_KILLS_ALONE` and no result came in between. So every batch can be finished.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import math
import os
import struct
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from batchline.batch.journal import Note
from batchline.batch.plan import WorkItem
from batchline.process_memory import oom_kills

LETHAL_CRASHES = 3
"""A request that was in flight at this many crashes, the last time alone, is not tried again."""

LETHAL_KILLS, LETHAL_KILLS_ALONE = 6, 3
"""Nor is a request that was in flight at this many kills without a known cause, at the last of them alone."""

LETHAL_STARVED_ALONE = 2
"""With kills for lack of memory among the crashes, it must have been alone at this many deaths in a row."""

MAX_NUM_ALONE = 32
"""So many requests that were in flight at several kills run one at a time; more of them run in groups."""

_IN_FLIGHT, _FAULT = "in-flight", "fault"
_SEAT = struct.Struct("<Q")
_STARVED = "killed for lack of memory"
_FATAL = "Fatal Python error: "
_ALTERNATE_STACK_BYTES = 1 << 16
_TURN_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Crash:
    """How a process died. token: distinguishes crashes. fault: empty for a kill without a known cause. positions: the
    first lines of the requests in flight."""

    token: str
    fault: str
    positions: tuple[int, ...]

    def note(self) -> Note:
        """The crash as a note for the journal."""
        kind = "starved" if self.is_starved else "crashed" if self.fault else "killed"
        return Note(kind, " ".join([self.token, *map(str, self.positions)]))

    @property
    def is_starved(self) -> bool:
        """Whether the kernel killed it for lack of memory."""
        return self.fault == _STARVED


def last_crash(folder: Path) -> Crash | None:
    """How the last process that was `watched` in this job folder died; None if it left the block."""
    try:
        oom_kills, _, report = (folder / _FAULT).read_text(errors="replace").partition("\n")
        content = (folder / _IN_FLIGHT).read_bytes()
    except FileNotFoundError:
        return None
    token, seats = content[: _SEAT.size].hex(), content[_SEAT.size :]
    fault = report.partition("\n")[0].removeprefix(_FATAL)
    if not fault and _have_grown(oom_kills):
        fault = _STARVED
    whole = seats[: len(seats) // _SEAT.size * _SEAT.size]
    return Crash(token, fault, tuple(sorted(number - 1 for (number,) in _SEAT.iter_unpack(whole) if number)))


def _oom_kills() -> str:
    """`GROUP COUNT`, see `oom_kills`; empty if that cannot be read."""
    kills = oom_kills()
    return "" if kills is None else f"{kills[0]} {kills[1]}"


def _have_grown(before: str) -> bool:
    """Whether the same control group now counts more kills than `before`."""
    group, _, count = before.partition(" ")
    group_now, _, count_now = _oom_kills().partition(" ")
    return bool(group) and group == group_now and int(count_now) > int(count)


def forget_crash(folder: Path) -> None:
    """Remove the files that `last_crash` reads."""
    for name in (_FAULT, _IN_FLIGHT):
        (folder / name).unlink(missing_ok=True)


@dataclass(slots=True)
class Suspects:
    """At how many crashes and kills each request was in flight, by position. tokens: those that were counted.

    num_starved: those of the crashes that were kills for lack of memory."""

    num_crashes: Counter[int] = field(default_factory=Counter)
    num_starved: Counter[int] = field(default_factory=Counter)
    num_kills: Counter[int] = field(default_factory=Counter)
    tokens: set[str] = field(default_factory=set)
    _alone: list[int] = field(default_factory=list)
    """The request that alone was in flight at the last crashes and kills, once for each of these."""

    def add(self, note: Note) -> None:
        """Count a crash or kill that the journal has noted."""
        token, *texts = note.text.split(" ")
        positions = [int(text) for text in texts]
        if token in self.tokens:
            return
        self.tokens.add(token)
        counts = self.num_kills if note.kind == "killed" else self.num_crashes
        counts.update(positions)
        if note.kind == "starved":
            self.num_starved.update(positions)
        if positions != self._alone[:1]:
            self._alone = []
        if len(positions) == 1:
            self._alone += positions

    def add_result(self) -> None:
        """A request was answered after the crashes and kills so far."""
        self._alone = []

    def weight(self, position: int) -> int:
        """How suspicious a request is, from 0 for no suspect. See `groups`."""
        return max(self.num_crashes[position], self.num_kills[position] - 1)

    def num_deaths(self, position: int) -> int:
        """The crashes and kills of the request."""
        return self.num_crashes[position] + self.num_kills[position]

    def __bool__(self) -> bool:
        return any(map(self.weight, {*self.num_crashes, *self.num_kills}))

    def lethal(self, items: Iterable[WorkItem]) -> list[WorkItem]:
        """The `items` that must not be tried again."""
        return [item for item in items if self._is_lethal(item.position)]

    def _is_lethal(self, position: int) -> bool:
        num_alone = self._alone.count(position)
        by_kills = self.num_kills[position] >= LETHAL_KILLS and num_alone >= LETHAL_KILLS_ALONE
        is_proven = not self.num_starved[position] or num_alone >= LETHAL_STARVED_ALONE
        return by_kills or (self.num_crashes[position] >= LETHAL_CRASHES and is_proven)

    def groups(self, items: Iterable[WorkItem]) -> Iterator[Sequence[WorkItem]]:
        """The suspects among `items` in groups, the most suspicious first; each group must be durable before the next
        starts. The size balances speed against work lost in a crash."""
        suspects = [item for item in items if self.weight(item.position)]
        yield from ([item] for item in suspects if self._must_be_alone(item.position))
        others = [item for item in suspects if not self._must_be_alone(item.position)]
        weights = Counter(self.weight(item.position) for item in others)
        for weight in sorted(weights, reverse=True):
            alike = [item for item in others if self.weight(item.position) == weight]
            size = 1 if weight > 1 and len(alike) <= MAX_NUM_ALONE else math.isqrt(len(alike))
            yield from (alike[start : start + size] for start in range(0, len(alike), size))

    def _must_be_alone(self, position: int) -> bool:
        """Whether one more crash is its last one."""
        return self.num_crashes[position] >= LETHAL_CRASHES - 1


_suspects_turn = threading.Lock()


@asynccontextmanager
async def suspects_turn(stop: asyncio.Event) -> AsyncIterator[None]:
    """Wait until no other run of this process, on any thread, runs suspects: a crash would accuse both runs. Once
    `stop` is set, there is nothing to wait for."""
    while not (has_turn := _suspects_turn.acquire(blocking=False)) and not stop.is_set():  # noqa: ASYNC110 - other loops
        await asyncio.sleep(_TURN_POLL_S)
    try:
        yield
    finally:
        if has_turn:
            _suspects_turn.release()


class InFlight:
    """The file of positions in flight. Writes are not synced: the page cache survives the process.

    The file begins with the token of the crash that would end the run: each run of a process counts its own crashes.
    Then follow the seats: each has a request's position plus one, or 0.

    is_written: whether requests get seats. Those that other processes compute cannot end this one.
    """

    def __init__(self, path: Path) -> None:
        token = os.urandom(_SEAT.size)
        self.token = token.hex()
        self._path = path
        self._is_excused = False
        self.is_written = True
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._seats: dict[int, int] = {}
        self._free: list[int] = []
        self._write(token, 0)

    def take(self, position: int) -> None:
        """A request starts. position: of its first line."""
        seat = self._free.pop() if self._free else len(self._seats)
        self._seats[position] = seat
        self._write_seat(seat, position + 1)

    def leave(self, position: int) -> None:
        """A request is answered, or will not be. A position that has no seat is ignored."""
        seat = self._seats.pop(position, None)
        if seat is not None:
            self._free.append(seat)
            self._write_seat(seat, 0)

    def accuse_nobody(self) -> None:
        """However this process ends from now on, no request is suspected of it. Called when a stop is requested, since
        a service manager kills a process whose stop takes too long.

        Safe in any thread and in signal handlers: it uses the path, because the descriptor may just have been closed.
        """
        self._is_excused = True
        with suppress(OSError):
            os.truncate(self._path, _SEAT.size)

    def crash(self, fault: str) -> Crash:
        """Describe a crash that this process survives. A later fault has the same token, so both count as one crash."""
        return Crash(self.token, fault, tuple(sorted(self._seats)))

    def _write_seat(self, seat: int, number: int) -> None:
        if self.is_written and not self._is_excused:
            self._write(_SEAT.pack(number), (seat + 1) * _SEAT.size)
            self._undo_if_excused()

    def _undo_if_excused(self) -> None:
        """A signal may have come while a seat was written."""
        if self._is_excused:
            self.accuse_nobody()

    def _write(self, data: bytes, offset: int) -> None:
        with suppress(OSError):  # on a full disk, a crash has fewer suspects
            os.pwrite(self._fd, data, offset)

    def __len__(self) -> int:
        return len(self._seats)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class _FaultReport:
    """The file that faulthandler writes to. A process has only one; runs at the same time share it by hard links."""

    def __init__(self) -> None:
        self._paths: set[Path] = set()
        self._was_enabled = False
        self._file: TextIO | None = None
        self._lock = threading.Lock()  # runs of one process may be on several threads

    @contextmanager
    def at(self, path: Path) -> Iterator[None]:
        """Report at `path` until the block ends. A file there is replaced. On another file system than the first path,
        a crash accuses no request of this run."""
        path.unlink(missing_ok=True)
        with self._lock:
            if self._file is None:
                self._open(path)
            else:
                with suppress(OSError):
                    os.link(next(filter(Path.exists, self._paths), path), path)
            self._paths.add(path)
        try:
            yield
        finally:
            with self._lock:
                self._paths.remove(path)
                if not self._paths:
                    self._close()

    def _open(self, path: Path) -> None:
        self._was_enabled = faulthandler.is_enabled()
        file = path.open("w")
        file.write(f"{_oom_kills()}\n")
        file.flush()
        faulthandler.enable(file)
        self._file = file

    def leave_to_parent(self) -> None:
        """In a forked child: close the file, which the parent still has."""
        if self._file is not None:
            self._close()

    def _close(self) -> None:
        """Close the file. faulthandler continues with standard error if it was on before."""
        assert self._file is not None
        faulthandler.disable()
        self._file.close()
        self._file = None
        if self._was_enabled and sys.__stderr__ is not None:
            with suppress(OSError, ValueError):  # standard error may be closed
                faulthandler.enable(sys.__stderr__)


_fault_report = _FaultReport()


def _start_afresh() -> None:
    """In a forked child: its faults are not its parent's, and the parent's locks may be held by threads that the child
    does not have."""
    global _fault_report, _suspects_turn
    _fault_report.leave_to_parent()
    _fault_report, _suspects_turn = _FaultReport(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)


@contextmanager
def watched(folder: Path) -> Iterator[InFlight]:
    """Until the block ends, a fault of this process is reported in the job folder `folder`, with what is in flight.

    On threads, an overflow of the stack is reported only if they were started under `alternate_stacks`.
    """
    with ExitStack() as stack:
        stack.callback(forget_crash, folder)
        stack.enter_context(_fault_report.at(folder / _FAULT))  # first: a fault must never be read with another's seats
        yield stack.enter_context(closing(InFlight(folder / _IN_FLIGHT)))


class _SignalStack(ctypes.Structure):
    """Linux's `stack_t`."""

    _fields_ = (("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


_stacks: dict[int, Any] = {}
"""The stacks by thread. Each is kept until another thread gets the same number, because the system may use it until the
very end of its thread."""

_num_stack_blocks = 0
_lock = threading.Lock()
"""Of `_num_stack_blocks`."""


@contextmanager
def alternate_stacks() -> Iterator[None]:
    """Give threads that start in the block a stack for signal handlers.

    Without it, a thread's stack overflow cannot be reported; faulthandler provides one only for the main thread. A
    profile function is the only hook that Python runs first in every new thread.
    """
    global _num_stack_blocks
    if sys.platform != "linux" or threading.getprofile() not in (None, _on_first_event):
        yield
        return
    with _lock:
        _num_stack_blocks += 1
        threading.setprofile(_on_first_event)
    try:
        yield
    finally:
        with _lock:
            _num_stack_blocks -= 1
            if not _num_stack_blocks:
                threading.setprofile(None)


def _on_first_event(_frame: object, _event: str, _argument: object) -> None:
    sys.setprofile(None)
    buffer = ctypes.create_string_buffer(_ALTERNATE_STACK_BYTES)
    stack = _SignalStack(ctypes.addressof(buffer), 0, _ALTERNATE_STACK_BYTES)
    if ctypes.CDLL(None, use_errno=True).sigaltstack(ctypes.byref(stack), None) == 0:
        _stacks[threading.get_ident()] = buffer
