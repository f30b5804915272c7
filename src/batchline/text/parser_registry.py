"""Parsers by name, or detected from a chat template; installed packages and plugin files add more (`plugins.py`)."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from batchline.plugins import Registry

TOOL_PARSERS, REASONING_PARSERS = "batchline.tool_parsers", "batchline.reasoning_parsers"
"""Names of the groups of entry points."""


class Recognizing(Protocol):
    """A class that can recognize its format in a chat template's text."""

    @classmethod
    def recognizes(cls, template: str) -> bool:
        """Whether the template asks the model for this format."""


P = TypeVar("P", bound=type[Recognizing])


class ParserRegistry(Registry[P]):
    """Parser classes of one kind. Detection tries the latest registration first."""

    def detect(self, template: str) -> str | None:
        """The parser that recognizes the template, None if none does."""
        self.load_installed()
        newest_first = reversed(self._plugins.items())
        return next((name for name, parser in newest_first if parser.recognizes(template)), None)

    def is_valid(self, plugin: Any) -> bool:
        """Whether it is a parser class."""
        return isinstance(plugin, type) and hasattr(plugin, "recognizes")
