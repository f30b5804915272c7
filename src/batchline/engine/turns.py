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
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
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
    """What is left of the prompt tokens of a step.

    shares: of the callers with prompts of the first kind, `kind`. spare: what these do not need, for every prompt.
    """

    kind: int
    shares: dict[str, int]
    spare: int

    @classmethod
    def of(cls, room: int, prompts: Iterable[Sequence]) -> PromptShares:
        """Share out `room` tokens. prompts: those that the step may compute. A caller gets what its prompts need, but
        not more than an even share of what is left by callers who need less."""
        prompts = list(prompts)
        kind = min((sequence.kind for sequence in prompts), default=0)
        needs: Counter[str] = Counter()
        for sequence in prompts:
            if sequence.kind == kind:
                needs[sequence.caller] += sequence.num_uncomputed_tokens
        shares: dict[str, int] = {}
        for caller, need in sorted(needs.items(), key=lambda item: item[1]):
            shares[caller] = min(need, max(1, room // (len(needs) - len(shares))))
            room -= shares[caller]
        return cls(kind, shares, max(0, room))

    @property
    def is_used_up(self) -> bool:
        """Whether no prompt gets any more tokens."""
        return not self.spare and not any(self.shares.values())

    def left(self, sequence: Sequence) -> int:
        """How many tokens of its prompt the step may still compute."""
        share = self.shares.get(sequence.caller, 0) if sequence.kind == self.kind else 0
        return share + self.spare

    def use(self, sequence: Sequence, num_tokens: int) -> None:
        """Count a chunk of its prompt. What exceeds its share comes from what is spare, never from other shares."""
        if sequence.kind == self.kind and (share := self.shares.get(sequence.caller, 0)):
            self.shares[sequence.caller] = max(0, share - num_tokens)
            num_tokens = max(0, num_tokens - share)
        self.spare = max(0, self.spare - num_tokens)


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
