"""Tool-call parsers by name: built in, of installed packages, and from plugin files that use `register_tool_parser`."""

from __future__ import annotations

from collections.abc import Callable

from batchline.text.parser_registry import TOOL_PARSERS, ParserRegistry
from batchline.text.tool_parsers.base import ToolCallParser

_REGISTRY: ParserRegistry[type[ToolCallParser]] = ParserRegistry("tool-call parser", TOOL_PARSERS)


def register_tool_parser(name: str) -> Callable[[type[ToolCallParser]], type[ToolCallParser]]:
    """A class decorator that makes a parser known by `name`, in place of any other of that name."""
    return _REGISTRY.register(name)


def tool_parser(name: str) -> type[ToolCallParser]:
    """The parser of that name. Raises: UnknownParser."""
    return _REGISTRY.get(name)


def tool_parser_names() -> list[str]:
    """All names, sorted."""
    return _REGISTRY.names()


def detect_tool_parser(template: str) -> str | None:
    """The parser for the format that a chat template asks for, by the marker strings in its text."""
    return _REGISTRY.detect(template)
