"""What is wrong with a chat request, told of the fields of the response request that it was made from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from batchline.errors import BadRequest

_RENAMED = {
    r"response_format(?:\.json_schema)?": "text.format",
    r"max_(?:completion_)?tokens": "max_output_tokens",
    r"reasoning_effort": "reasoning.effort",
    r"verbosity": "text.verbosity",
}
"""Fields that have another name in chat completions, as regular expressions of it. Messages stand elsewhere besides."""

_MESSAGE = r"messages(?:\[\d+\](?:\.content|\.tool_calls\[\d+\](?:\.function)?)?)?"
_TOOL = r"tools\[\d+\](?:\.function)?"
_NAME = re.compile(rf"(?<![\w.'\"])(?:{'|'.join(_RENAMED)}|(?P<message>{_MESSAGE})|(?P<tool>{_TOOL}))(?!\w)")


@contextmanager
def in_response_fields(places: Mapping[str, str]) -> Iterator[None]:
    """Raise errors again that name the response request's fields.

    places: of messages, their content, their calls and tools, as chat completions name them, in the response request.
    """
    try:
        yield
    except BadRequest as exc:
        param = exc.param and _renamed(exc.param, places)
        raise BadRequest(_renamed(exc.message, places), param=param, code=exc.code) from exc


def _renamed(text: str, places: Mapping[str, str]) -> str:
    def other_name(match: re.Match[str]) -> str:
        name = match[0]
        if match["message"]:
            return places.get(name.removesuffix(".function"), "input")
        if match["tool"]:
            tool = name.removesuffix(".function")
            return places.get(tool, tool)
        return next(re.sub(pattern, other, name) for pattern, other in _RENAMED.items() if re.fullmatch(pattern, name))

    return _NAME.sub(other_name, text)
