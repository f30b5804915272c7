"""Reasoning parsers by name: built in, of installed packages, and from plugin files."""

from __future__ import annotations

from collections.abc import Callable

from batchline.text.parser_registry import REASONING_PARSERS, ParserRegistry
from batchline.text.reasoning.base import ReasoningParser

_REGISTRY: ParserRegistry[type[ReasoningParser]] = ParserRegistry("reasoning parser", REASONING_PARSERS)


def register_reasoning_parser(name: str) -> Callable[[type[ReasoningParser]], type[ReasoningParser]]:
    """A class decorator that makes a parser known by `name`, in place of any other of that name."""
    return _REGISTRY.register(name)


def reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser of that name. Raises: UnknownParser."""
    return _REGISTRY.get(name)


def reasoning_parser_names() -> list[str]:
    """All names, sorted."""
    return _REGISTRY.names()


def detect_reasoning_parser(template: str) -> str | None:
    """The parser for the format that a chat template asks for, by the marker strings in its text."""
    return _REGISTRY.detect(template)
