"""A request of another API as a chat completion's body, and its errors in the request's own field names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from batchline.errors import BadRequest

_MESSAGE = r"messages(?:\[\d+\](?:\.content(?:\[\d+\])?|\.tool_calls\[\d+\](?:\.function)?)?)?"
_TOOL = r"tools\[\d+\](?:\.function)?"
_INDEX = re.compile(r"\[\d+\]$")


@dataclass(frozen=True, slots=True)
class ChatForm:
    """A request as a chat completion's body.

    places: where in the request a message (`messages[0]`), its content, a part or a call of it, or a tool comes from.
    renamed: the request's fields, by regular expressions of what chat completions call them.
    elsewhere: the field of a message without a place.
    """

    body: dict[str, Any]
    places: Mapping[str, str]
    renamed: Mapping[str, str]
    elsewhere: str

    @contextmanager
    def in_own_fields(self) -> Iterator[None]:
        """Raise errors again that name the request's own fields."""
        try:
            yield
        except BadRequest as exc:
            param = exc.param and self._renamed(exc.param)
            raise BadRequest(self._renamed(exc.message), param=param, code=exc.code) from exc

    def _renamed(self, text: str) -> str:
        def other_name(match: re.Match[str]) -> str:
            name = match[0]
            if match["message"]:
                return self._place(name.removesuffix(".function"))
            if match["tool"]:
                tool = name.removesuffix(".function")
                return self.places.get(tool, tool)
            found = ((re.fullmatch(pattern, name), other) for pattern, other in self.renamed.items())
            return next(full.expand(other) for full, other in found if full)

        return _names(tuple(self.renamed)).sub(other_name, text)

    def _place(self, name: str) -> str:
        """Where a message or something in it stands; a part without a place has its index in the content's place."""
        index = _INDEX.search(name)
        if name in self.places or index is None:
            return self.places.get(name, self.elsewhere)
        content = self.places.get(name[: index.start()])
        return self.elsewhere if content is None else content + index[0]


@cache
def _names(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Any field that has another name, where it stands as a word of its own."""
    return re.compile(rf"(?<![\w.'\"])(?:{'|'.join(patterns)}|(?P<message>{_MESSAGE})|(?P<tool>{_TOOL}))(?!\w)")
