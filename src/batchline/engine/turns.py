"""Callers share the engine's seats, blocks and tokens evenly, whatever number of sequences each of them has. No torch.

A caller's sequences run in the order (priority, arrival). Sequences of different callers, if they are of the same kind
(`kind_of`), run by their *turn*: how many running sequences of their caller and kind come before them. So each caller's
first sequence comes before anybody's second. A waiting sequence may take the place of a running one with a later turn;
the callers are then closer to an even share than before, so they cannot alternate endlessly.

The prompt tokens of a step are shared evenly, too (`PromptShares`). Otherwise one long prompt would fill whole steps,
and the other callers would get no token until it is computed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from itertools import chain

from batchline.engine.sequence import Sequence


class WaitingLine:
    """The waiting sequences. lines: by caller; in reverse order, because removing the last one is cheap."""

    def __init__(self) -> None:
        self.lines: dict[str, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self.lines.values())

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into its caller's line."""
        insort(self.lines.setdefault(sequence.caller, []), sequence, key=_last_first)

    def remove(self, sequence: Sequence) -> None:
        """Take a waiting sequence out, wherever it is."""
        line = self.lines[sequence.caller]
        del line[bisect_left(line, _last_first(sequence), key=_last_first)]
        if not line:
            del self.lines[sequence.caller]

    def first(self, running: Ordered[Sequence], *, is_shared: bool, besides: Collection[str] = ()) -> Sequence | None:
        """The sequence whose turn is next; sets the turns of those that are first in their caller's line. besides:
        callers that are passed over."""
        firsts = [line[-1] for caller, line in self.lines.items() if caller not in besides]
        if not (firsts and is_shared):
            return firsts[0] if firsts else None
        for sequence in firsts:
            share = (other for other in running if other.caller == sequence.caller and other.kind == sequence.kind)
            sequence.turn = sum(other.order < sequence.order for other in share)
        return min(firsts, key=_by_turn)

    def is_shared(self, running: Ordered[Sequence]) -> bool:
        """Whether more than one caller has running or waiting sequences."""
        return len(self.lines.keys() | {sequence.caller for sequence in running}) > 1


@dataclass(slots=True)
class PromptShares:
    """What is left of the prompt tokens of a step. room: for all callers together.

    The callers whose prompts are of the first kind, `kind`, get a `share` each. All others use what these leave.
    """

    room: int
    kind: int
    share: int
    used: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, room: int, running: Ordered[Sequence], waiting: WaitingLine) -> PromptShares:
        """Shares for the callers that have a prompt to compute."""
        prompts = [sequence for sequence in running if sequence.num_uncomputed_tokens > 1]
        prompts += [line[-1] for line in waiting.lines.values()]
        kind = min((sequence.kind for sequence in prompts), default=0)
        num_callers = len({sequence.caller for sequence in prompts if sequence.kind == kind})
        return cls(room, kind, max(1, room // max(1, num_callers)))

    def left(self, sequence: Sequence) -> int:
        """How many tokens of its prompt the step may still compute."""
        share = self.share - self.used[sequence.caller] if sequence.kind == self.kind else self.room
        return max(0, min(self.room, share))

    def use(self, sequence: Sequence, num_tokens: int) -> None:
        """Count a chunk of its prompt."""
        self.room -= num_tokens
        self.used[sequence.caller] += num_tokens


def in_order(running: Ordered[Sequence], *, is_shared: bool) -> list[Sequence]:
    """Running sequences in the order in which they get tokens and blocks; sets their turns."""
    ordered = sorted(running, key=lambda sequence: sequence.order)
    if not is_shared:
        return ordered
    num_before: Counter[tuple[str, int]] = Counter()
    for sequence in ordered:
        share = sequence.caller, sequence.kind
        sequence.turn = num_before[share]
        num_before[share] += 1
    return sorted(ordered, key=_by_turn)


def may_replace(waiting: Sequence, running: Sequence) -> bool:
    """Whether a waiting sequence may take the place of a running one. Both have their turns."""
    if waiting.caller == running.caller:
        return waiting.priority < running.priority
    return (waiting.kind, waiting.turn) < (running.kind, running.turn)


def _by_turn(sequence: Sequence) -> tuple[int, int, int]:
    return (sequence.kind, sequence.turn, sequence.arrival)


def _last_first(sequence: Sequence) -> tuple[int, int]:
    return (-sequence.priority, -sequence.arrival)
