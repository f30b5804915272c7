"""Input and output of the tool-call parsers: tools, calls, and the deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function that the model may call. parameters: JSON Schema of its arguments object."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote. id: as the model wrote it; None if its format has no ids."""

    name: str
    arguments_json: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedToolCalls:
    """A parsed text. content: all text that belongs to no call; None if there is none."""

    content: str | None
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the call at `index`. Its first delta has the name, later ones only more of the arguments' JSON text."""

    index: int
    name: str | None = None
    id: str | None = None
    arguments_fragment: str = ""


Delta = ContentDelta | ToolCallDelta


def assemble(deltas: Iterable[Delta]) -> ParsedToolCalls:
    """Join the deltas of one stream, as a client does."""
    content: list[str] = []
    heads: list[ToolCallDelta] = []
    arguments: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
            continue
        if delta.index == len(heads):
            heads.append(delta)
            arguments.append([])
        arguments[delta.index].append(delta.arguments_fragment)
    calls = [
        ToolCall(head.name or "", "".join(fragments), head.id) for head, fragments in zip(heads, arguments, strict=True)
    ]
    return ParsedToolCalls("".join(content) or None, tuple(calls))
