"""The base class of reasoning parsers, and the stream that one runs in.

A model's text is its reasoning, between markers, and then the content. Templates may write the start marker, or both
markers, at the end of the prompt, so the prompt decides whether the text begins inside the reasoning. White space
around the reasoning is markup. A text that ends inside its reasoning has no content.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from batchline.text.reasoning.sink import ContentDelta, Delta, ReasoningDelta, ReasoningSink
from batchline.text.text_cursor import Markers, Reading, TextCursor


@dataclass(frozen=True, slots=True)
class ParsedReasoning:
    """A parsed text. reasoning, content: None if there is none.

    reasoning_end: how many characters of the text are reasoning and its markers. Tokens whose text begins before it
    are reasoning tokens.
    """

    reasoning: str | None
    content: str | None
    reasoning_end: int


class ReasoningParser(ABC):
    """Separates reasoning from content. One instance may serve many texts that answer the same prompt.

    is_over: the prompt ends the reasoning, so the text has none. is_open: the text begins inside the reasoning.

    A subclass names its markers. Register it with `register_reasoning_parser`.
    """

    starts: ClassVar[tuple[str, ...]]
    """Markers that begin the reasoning if the text begins with one, after optional white space."""

    ends: ClassVar[tuple[str, ...]]
    """Markers that end the reasoning. None may begin inside another."""

    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Markers that may be special tokens, so detokenizing must not skip them."""

    always_reasons: ClassVar[bool] = False
    """Whether a text begins with reasoning even if neither it nor the prompt has a start marker."""

    def __init__(self, prompt: str = "") -> None:
        """prompt: the rendered prompt, or its end, up to where the model's text begins."""
        prompt = prompt.rstrip()
        self.is_over = prompt.endswith(self.ends)
        self.is_open = not self.is_over and (self.always_reasons or prompt.endswith(self.starts))
        self._end_markers = Markers(*self.ends)

    def parse(self, text: str) -> ParsedReasoning:
        """Parse a complete text."""
        stream = self.stream()
        deltas = [*stream.push(text), *stream.finish()]
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        return ParsedReasoning(reasoning or None, content or None, stream.reasoning_end)

    def stream(self) -> ReasoningStream:
        """A stream for one text that arrives in pieces."""
        return ReasoningStream(self)

    @classmethod
    def recognizes(cls, template: str) -> bool:
        """Whether a chat template asks the model for this format, and for no other."""
        return False

    def read(self, cursor: TextCursor, sink: ReasoningSink) -> Reading[None]:
        """Read a whole text."""
        if not self.is_over:
            space = yield from cursor.space()
            if (yield from self._skip_start(cursor)) or self.is_open:
                end = yield from cursor.pass_until(self._end_markers, sink.reasoning)
                sink.end_reasoning()
                if end:
                    yield from cursor.space()
            else:
                sink.content(space)
        yield from cursor.pass_until(Markers(), sink.content)

    def _skip_start(self, cursor: TextCursor) -> Reading[bool]:
        for start in self.starts:
            if (yield from cursor.literal(start)):
                return True
        return False


class ReasoningStream:
    """Parses one text that arrives in pieces. Mutable, one per text."""

    def __init__(self, parser: ReasoningParser) -> None:
        self._cursor = TextCursor()
        self._sink = ReasoningSink(self._cursor)
        self._reading = parser.read(self._cursor, self._sink)

    @property
    def reasoning_end(self) -> int:
        """How many characters of the text so far are known to be reasoning and its markers; grows until it ends."""
        return self._sink.reasoning_end

    def push(self, delta_text: str) -> list[Delta]:
        """Add text. Returns the deltas that are now certain."""
        self._cursor.push(delta_text)
        next(self._reading, None)
        return self._sink.drain()

    def finish(self) -> list[Delta]:
        """End the text. Returns the deltas that were held back."""
        self._cursor.end()
        next(self._reading, None)
        return self._sink.drain()
