"""JSON responses, written by the library that reads requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from starlette.responses import Response

from batchline.openai_api.parsing import is_small

LIST_PART = 256
"""Items of a long list that are written together."""


class JsonResponse(Response):
    """A JSON body. Infinite and undefined numbers become null, as JSON has none."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes; content that is bytes is JSON already."""
        return content if isinstance(content, bytes) else orjson.dumps(content)


async def written(body: Mapping[str, Any] | bytes, status_code: int = 200) -> JsonResponse:
    """A response; a large one is written on a thread, and in parts: nothing else can run while JSON is written."""
    is_ready = isinstance(body, bytes) or is_small(body)
    return JsonResponse(body if is_ready else await asyncio.to_thread(json_in_parts, body), status_code)


def json_in_parts(value: Any) -> bytes:
    """The same bytes as are written at once."""
    return b"".join(_parts(value))


def _parts(value: Any) -> Iterator[bytes]:
    if is_small(value) or not isinstance(value, (dict, list)):
        yield orjson.dumps(value)
    elif isinstance(value, dict):
        before = b"{"
        for key, item in value.items():
            yield before + orjson.dumps(key) + b":"
            yield from _parts(item)
            before = b","
        yield b"}"
    else:
        before = b"["
        for first in range(0, len(value), LIST_PART):
            for part in _list_parts(value[first : first + LIST_PART]):
                yield before
                yield from part
                before = b","
        yield b"]"


def _list_parts(items: list[Any]) -> Iterator[Iterator[bytes]]:
    """The items of a list, together where they are few and small."""
    if is_small(items):
        yield iter((orjson.dumps(items)[1:-1],))
    else:
        yield from map(_parts, items)
