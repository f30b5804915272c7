"""A choice's text taken apart as it comes: reasoning, content, calls of tools; exact counts of reasoning tokens.

A whole answer is read as one delta, so it says what the deltas of a stream say together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from batchline.endpoints.answer_format import AnswerFormat
from batchline.endpoints.generation import GeneratedText
from batchline.text.reasoning import ReasoningDelta
from batchline.text.tool_parsers import ContentDelta, Delta, ToolCallDelta

MessagePart = ReasoningDelta | ContentDelta | ToolCallDelta


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDelta:
    """What a delta of the text adds to the message.

    parts: in the order of the text. Of each call the first part has the name and an id.
    num_reasoning_tokens: how many more tokens are known to be reasoning or its markers.
    finish_reason: as the message tells it, None while more will come.
    """

    parts: tuple[MessagePart, ...]
    num_reasoning_tokens: int
    finish_reason: str | None

    @property
    def reasoning(self) -> str:
        """All of its reasoning."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningDelta))

    @property
    def content(self) -> str:
        """All of its content."""
        return "".join(part.text for part in self.parts if isinstance(part, ContentDelta))

    @property
    def calls(self) -> tuple[ToolCallDelta, ...]:
        """What it adds to calls."""
        return tuple(part for part in self.parts if isinstance(part, ToolCallDelta))


class MessageReader:
    """Reads one choice. Mutable; nothing may be pushed after a delta with a finish_reason.

    is_over: a second call began where the message may have one only, and nothing behind the first is told.
    """

    def __init__(self, answer_format: AnswerFormat) -> None:
        self._format = answer_format
        self._reasoning = None if answer_format.reasoning is None else answer_format.reasoning.stream()
        self._tools = None if answer_format.tools is None else answer_format.tools.stream()
        self._undecided: deque[int] = deque()  # text offsets of tokens that may yet turn out to be reasoning
        self._has_calls = False
        self.is_over = False

    def push(self, delta: GeneratedText) -> MessageDelta:
        """What a delta of the choice's text adds to its message."""
        parts = tuple(self._parts(delta.text, is_last=delta.finish_reason is not None))
        self._has_calls = self._has_calls or any(isinstance(part, ToolCallDelta) for part in parts)
        return MessageDelta(
            parts=parts,
            num_reasoning_tokens=self._count_reasoning(delta.text_offsets),
            finish_reason=self._finish_reason(delta.finish_reason),
        )

    def _parts(self, text: str, *, is_last: bool) -> Iterator[MessagePart]:
        for part in self._all_parts(text, is_last=is_last):
            is_second_call = isinstance(part, ToolCallDelta) and part.index > 0
            self.is_over = self.is_over or (self._format.is_single_call and is_second_call)
            if not self.is_over:
                yield part

    def _all_parts(self, text: str, *, is_last: bool) -> Iterator[MessagePart]:
        for part in self._split_reasoning(text, is_last=is_last):
            if isinstance(part, ReasoningDelta):
                if self._format.shows_reasoning:
                    yield part
            elif self._tools is None:
                yield part
            else:
                yield from map(self._with_id, self._tools.push(part.text))
        if self._tools is not None and is_last:
            yield from map(self._with_id, self._tools.finish())

    def _split_reasoning(self, text: str, *, is_last: bool) -> Sequence[ReasoningDelta | ContentDelta]:
        """The reasoning, and what else there is, still with calls in it."""
        stream = self._reasoning
        if stream is None:
            return [ContentDelta(text)] if text else []
        deltas = [*stream.push(text), *(stream.finish() if is_last else [])]
        return [part if isinstance(part, ReasoningDelta) else ContentDelta(part.text) for part in deltas]

    def _with_id(self, part: Delta) -> Delta:
        if isinstance(part, ContentDelta) or part.name is None or part.id is not None:
            return part
        return ToolCallDelta(part.index, part.name, self._format.make_call_id(), part.arguments_fragment)

    def _count_reasoning(self, text_offsets: Sequence[int]) -> int:
        """A token is reasoning if its text begins inside of it."""
        if self._reasoning is None:
            return 0
        self._undecided.extend(text_offsets)
        num_tokens = 0
        while self._undecided and self._undecided[0] < self._reasoning.reasoning_end:
            self._undecided.popleft()
            num_tokens += 1
        return num_tokens

    def _finish_reason(self, reason: str | None) -> str | None:
        if self.is_over and reason == "length":  # the limit cut what is not told
            reason = "stop"
        return self._format.call_reason if self._has_calls and reason == "stop" else reason
