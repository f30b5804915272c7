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
    r"(?P<tool>tools\[\d+\])\.function": r"\g<tool>",
}
"""Fields that have another name in chat completions, as regular expressions of it. Messages stand elsewhere besides."""

_MESSAGE = r"messages(?:\[\d+\](?:\.content|\.tool_calls\[\d+\](?:\.function)?)?)?"
_NAME = re.compile(rf"(?<![\w.'\"])(?:{'|'.join(_RENAMED)}|(?P<message>{_MESSAGE}))(?!\w)")


@contextmanager
def in_response_fields(places: Mapping[str, str]) -> Iterator[None]:
    """Raise errors again that name the response request's fields.

    places: of messages, their content and their calls, as chat completions name them, in the response request.
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
        return next(re.sub(pattern, other, name) for pattern, other in _RENAMED.items() if re.fullmatch(pattern, name))

    return _NAME.sub(other_name, text)
