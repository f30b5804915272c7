"""Turns token ids into text, step by step, and finds the stop string that ends it.

The concatenated steps equal the text of all tokens at once. Bytes go through an incremental UTF-8 decoder, so a
character that spans several tokens comes out with its last one, and bytes that form no character become U+FFFD.

Stop strings are found independently of how the text is cut into pieces. The one that is complete first wins; if several
end at the same character, the longest wins. Text that could still become part of a stop string is held back. The
strings are compiled to an automaton (Aho and Corasick, "Efficient string matching", 1975), so that the cost per
character does not depend on their number and length. A state stands for the longest suffix of the text that is a prefix
of a stop string.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from batchline.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence as its tokens arrive. Mutable, one per sequence.

    kept_special_ids: special tokens that are not skipped, because a parser needs them.
    is_continuation: the tokens follow others (a prompt), so the first one keeps its leading space.
    spaces_between_special_tokens: some decoders put a space before every token; False removes it between two added
    tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        kept_special_ids: Collection[int] = (),
        is_continuation: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._kept_special_ids = kept_special_ids
        self._skip_special_tokens = skip_special_tokens
        self._joins_added_tokens = not (skip_special_tokens or spaces_between_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = not is_continuation
        self._was_added_token = False

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        is_skipped = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        if is_skipped and token_id not in self._kept_special_ids:
            return ""
        return self._utf8.decode(self._bytes(token_id))

    def flush(self) -> str:
        """The remaining text when no more tokens follow: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        added = self._tokenizer.added_token(token_id)
        joins = self._joins_added_tokens and added is not None and self._was_added_token
        self._was_added_token = added is not None
        if joins and added is not None:
            return added.encode()
        token_bytes = self._tokenizer.token_bytes(token_id, is_first=self._is_first)
        if self._is_first and self._tokenizer.token_bytes(token_id):
            self._is_first = False
        return token_bytes


def detokenize(tokenizer: Tokenizer, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
    """The text of all tokens at once."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


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

    State 0 is the start. Each list has an entry per state.
    next_states: the following states, by character. fallbacks: the state of the next shorter suffix of the text.
    complete: the longest stop string that ends there. num_held: how many of the last characters may begin a stop
    string.
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
        self._pieces: list[str] = []  # the text not yet taken, which begins at _num_taken
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
