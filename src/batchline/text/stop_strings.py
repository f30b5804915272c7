"""Finds stop strings in text that arrives in pieces.

The result does not depend on how the text is cut into pieces. The stop string that is complete first wins; if several
end at the same character, the longest wins. Text that could still become part of a stop string is held back.

The strings are compiled to an automaton (Aho and Corasick, "Efficient string matching", 1975), so that the cost per
character does not depend on their number and length. A state stands for the longest suffix of the text that is a prefix
of a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string and where it starts in the whole text so far."""

    stop: str
    start: int

    @property
    def end(self) -> int:
        """The position after its last character."""
        return self.start + len(self.stop)


class StopStrings:
    """The stop strings of a request as an automaton. Immutable once made; shared by the request's sequences.

    State 0 is the start. Indexed by state: next_states: the following states by character; fallbacks: the state of the
    next shorter suffix of the text; complete: the longest stop string that ends there; num_held: how many of the last
    characters may begin a stop string.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.next_states: list[dict[str, int]] = [{}]
        self.fallbacks = [0]
        self.complete: list[str | None] = [None]
        self.num_held = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def __bool__(self) -> bool:
        return bool(self.next_states[0])

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.next_states[state].get(character)
            if following is None:
                following = self.next_states[state][character] = len(self.next_states)
                self.next_states.append({})
                self.fallbacks.append(0)
                self.complete.append(None)
                self.num_held.append(self.num_held[state] + 1)
            state = following
        self.complete[state] = stop

    def _link(self) -> None:
        """Set the fallbacks, shorter states first, and the fields that depend on them."""
        waiting = deque(self.next_states[0].values())
        while waiting:
            state = waiting.popleft()
            fallback = self.fallbacks[state]
            if self.complete[state] is None:
                self.complete[state] = self.complete[fallback]
            if not self.next_states[state]:
                self.num_held[state] = self.num_held[fallback]
            for character, following in self.next_states[state].items():
                self.fallbacks[following] = self.after(fallback, character)
                waiting.append(following)

    def after(self, state: int, character: str) -> int:
        """The state after one more character."""
        while character not in self.next_states[state]:
            if state == 0:
                return 0
            state = self.fallbacks[state]
        return self.next_states[state][character]


class StopStringMatcher:
    """Looks for stop strings in one sequence's text, and releases text that cannot be part of one. Mutable."""

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = 0
        self._pieces: list[str] = []  # of the text not yet taken, which begins at _num_taken
        self._num_characters = 0
        self._num_taken = 0

    def push(self, piece: str, *, search: bool = True) -> StopMatch | None:
        """Add text. Without `search`, stop strings that end in this piece do not count."""
        begin = self._num_characters
        self._pieces.append(piece)
        self._num_characters += len(piece)
        if not self._stops:
            return None
        stops, state, found = self._stops, self._state, None
        for index, character in enumerate(piece, start=1):
            state = stops.after(state, character)
            stop = stops.complete[state]
            if stop is not None and search and found is None:
                found = StopMatch(stop, begin + index - len(stop))
        self._state = state
        return found

    def take(self, *, up_to: int | None = None) -> str:
        """Text not yet taken: all of it before `up_to`, or else the part in which no stop string can begin."""
        end = self._num_characters - self._stops.num_held[self._state] if up_to is None else up_to
        length = max(0, end - self._num_taken)
        text = "".join(self._pieces)
        self._pieces = [text[length:]] if length < len(text) else []
        self._num_taken += length
        return text[:length]

    def take_rest(self) -> str:
        """All text not yet taken, when no more will follow."""
        return self.take(up_to=self._num_characters)
