"""Parsers by name, or detected from a chat template; installed packages and plugin files add more.

All are registered in the same way: built-in parsers when their module is imported, then those of installed packages
(entry points of the registry's group), then those of plugin files. A later registration of a name replaces the earlier
one. To detect a template's parser, the latest registration is tried first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from batchline.errors import PluginLoadError, UnknownParser

logger = logging.getLogger(__name__)

TOOL_PARSERS, REASONING_PARSERS = "batchline.tool_parsers", "batchline.reasoning_parsers"
"""Names of the groups of entry points."""


class Recognizing(Protocol):
    """A class that can recognize its format in a chat template's text."""

    @classmethod
    def recognizes(cls, template: str) -> bool:
        """Whether the template asks the model for this format."""


P = TypeVar("P", bound=type[Recognizing])


class ParserRegistry(Generic[P]):
    """Parser classes of one kind by name. kind: as used in error messages, "tool-call parser". group: of entry points.

    If a parser of an installed package cannot be loaded, only `get` with its name raises.
    """

    def __init__(self, kind: str, group: str) -> None:
        self._kind = kind
        self._group = group
        self._parsers: dict[str, P] = {}
        self._broken: dict[str, PluginLoadError] = {}
        self._has_installed = False
        _REGISTRIES.append(self)

    def register(self, name: str) -> Callable[[P], P]:
        """A class decorator."""

        def add(parser: P) -> P:
            self._parsers.pop(name, None)
            self._parsers[name] = parser
            return parser

        return add

    def get(self, name: str) -> P:
        """Raises: UnknownParser, PluginLoadError."""
        self.load_installed()
        if name in self._broken and name not in self._parsers:
            raise self._broken[name]
        try:
            return self._parsers[name]
        except KeyError:
            raise UnknownParser(self._kind, name, self.names()) from None

    def names(self) -> list[str]:
        """All names, sorted."""
        self.load_installed()
        return sorted(self._parsers)

    def detect(self, template: str) -> str | None:
        """The parser that recognizes the template, None if none does."""
        self.load_installed()
        newest_first = reversed(self._parsers.items())
        return next((name for name, parser in newest_first if parser.recognizes(template)), None)

    def load_installed(self) -> None:
        """Register the parsers of installed packages, once. Warns of those that cannot be loaded."""
        if self._has_installed:
            return
        self._has_installed = True
        for entry in installed(self._group):
            self._register_installed(entry)

    def _register_installed(self, entry: EntryPoint) -> None:
        try:
            self.register(entry.name)(_class_of(entry))
        except PluginLoadError as exc:
            self._broken[entry.name] = exc
            logger.warning("%s", exc)


_REGISTRIES: list[ParserRegistry[Any]] = []


def installed(group: str) -> list[EntryPoint]:
    """The entry points of a group, sorted by name."""
    return sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))


def _class_of(entry: EntryPoint) -> Any:
    """Raises: PluginLoadError."""
    where = entry.value if entry.dist is None else f"{entry.value} of the package {entry.dist.name}"
    try:
        parser = entry.load()
    except (Exception, SystemExit) as exc:  # foreign code: it may raise anything
        raise PluginLoadError(where, f"{type(exc).__name__}: {exc}") from exc
    if not isinstance(parser, type) or not hasattr(parser, "recognizes"):
        raise PluginLoadError(where, "it is not a parser class")
    return parser


def load_plugin(path: str | Path) -> None:
    """Run a Python file that registers parsers. Raises: PluginLoadError for any exception in it."""
    for registry in _REGISTRIES:
        registry.load_installed()  # a file replaces what an installed package registers
    file = Path(path)
    digest = hashlib.sha256(str(file.absolute()).encode(errors="surrogateescape")).hexdigest()[:8]
    name = f"batchline_plugin_{file.stem}_{digest}"
    specification = importlib.util.spec_from_file_location(name, file)
    if specification is None or specification.loader is None:
        raise PluginLoadError(str(path), "it is not a Python file (.py)")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses look their module up there while the file runs
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as exc:  # a plugin is foreign code: it may raise anything
        del sys.modules[name]
        reason = f"{type(exc).__name__}: {exc}" if file.exists() else "there is no such file"
        raise PluginLoadError(str(path), reason) from exc
