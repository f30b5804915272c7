"""JSON bodies: a request's is read within limits of size, type and depth; a large answer's is written in parts."""

from __future__ import annotations

import asyncio
import codecs
import gc
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from batchline.errors import BadRequest, PayloadTooLarge, UnsupportedMediaType
from batchline.openai_api.parsing import is_small

MAX_DEPTH = 128
"""The deepest nesting that recursive code for templates and schemas can handle."""

SMALL_BODY = 1 << 16
"""Parsing a body of up to this size takes less time than waking up a thread."""

MAX_VALUES = 1 << 22
"""Limit of values in a body: the token ids of a full embeddings request. Parsing takes 0.1 s; 0.4 s for objects."""

MAX_CONTAINERS = 1 << 18
"""Limit of arrays and objects in a body. The parser holds the interpreter's lock for 0.1 s while it makes them."""

LIST_PART = 256
"""Items of a long list that are written together."""

_BRACKETS = b"[{"
_SEPARATORS = b"," + _BRACKETS


async def read_json_object(
    request: Request, max_bytes: int, *, takes_forms: bool = False
) -> tuple[dict[str, Any], bytes]:
    """The body, a JSON object: parsed, and as it was sent, without a byte-order mark. takes_forms: whether the client
    could have sent a form, for the error.

    Raises: UnsupportedMediaType, PayloadTooLarge, BadRequest, ClientDisconnect.
    """
    _require_json(request, takes_forms=takes_forms)
    raw = await _read_whole(request, max_bytes)
    return (_parsed(raw) if len(raw) <= SMALL_BODY else await asyncio.to_thread(_parsed, raw)), raw


async def read_optional_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """As `read_json_object`, but a request without a body has an empty object, whatever its content type."""
    raw = await _read_whole(request, max_bytes)
    if not raw:
        return {}
    _require_json(request)
    return _parsed(raw) if len(raw) <= SMALL_BODY else await asyncio.to_thread(_parsed, raw)


def _require_json(request: Request, *, takes_forms: bool = False) -> None:
    """Raises: UnsupportedMediaType, BadRequest."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        form = "a form (multipart/form-data) or " if takes_forms else ""
        raise UnsupportedMediaType(f"The body must be {form}JSON: send it with Content-Type: application/json")
    refuse_compressed(request)


async def _read_whole(request: Request, max_bytes: int) -> bytes:
    """The body without a byte-order mark. Raises: PayloadTooLarge, ClientDisconnect."""
    return b"".join([part async for part in read_parts(request, max_bytes)]).removeprefix(codecs.BOM_UTF8)


def _parsed(raw: bytes) -> dict[str, Any]:
    """The object in a body. Raises: BadRequest."""
    _check_number(raw, _SEPARATORS, MAX_VALUES, "values")
    _check_number(raw, _BRACKETS, MAX_CONTAINERS, "arrays and objects")
    try:
        with _without_collections():
            body = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise BadRequest(f"The body is not valid JSON: {_fault(raw, exc)}", code="invalid_json") from exc
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object", code="invalid_json")
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:  # else it cannot be nested deeper
        _check_depth(body)
    return body


def _fault(raw: bytes, exc: orjson.JSONDecodeError) -> str:
    """What is wrong with a body; the parser's own words mislead about one that is not UTF-8."""
    try:
        raw.decode()
    except UnicodeDecodeError as fault:
        return f"it is not UTF-8 (the byte at offset {fault.start:,} is invalid)"
    return str(exc)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage in the block. A collector that visits the new objects while they are made doubles the time for
    which the parser holds the interpreter's lock. They are still counted, so a collection follows soon."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def refuse_compressed(request: Request) -> None:
    """Raises: UnsupportedMediaType."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType("The body must not be compressed: send it without Content-Encoding")


async def read_parts(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it arrives. It is refused if its announced length exceeds the limit, or as soon as it does.

    Raises: PayloadTooLarge, ClientDisconnect.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        yield part


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The body is larger than the {max_bytes:,} bytes that this server takes (--max-request-size)"
    )


def _check_number(raw: bytes, marks: bytes, limit: int, what: str) -> None:
    """Limit the values in a body, because no other thread can run while it is parsed. Raises: BadRequest.

    marks: characters that each stand for one counted value, unless they are inside a string.
    """
    if sum(map(raw.count, marks)) <= limit:
        return  # those inside strings included
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left begins or ends a string
    text = np.frombuffer(unescaped, np.uint8)
    is_inside = np.logical_xor.accumulate(text == ord('"'))
    if sum(np.count_nonzero((text == mark) & ~is_inside) for mark in marks) > limit:
        raise BadRequest(f"The body has more than {limit:,} {what}: send it in parts", code="invalid_json")


def _check_depth(body: dict[str, Any]) -> None:
    """Check the depth level by level, so that no depth exhausts the stack. Raises: BadRequest."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [child for container in level for child in _children(container) if isinstance(child, dict | list)]
        if not level:
            return
    raise BadRequest(f"The body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _children(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


class JsonResponse(Response):
    """A JSON body. Infinite and undefined numbers become null, because JSON has none."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes; content that is bytes is JSON already."""
        return content if isinstance(content, bytes) else orjson.dumps(content)


async def written(body: Mapping[str, Any] | list[Any] | bytes | str, status_code: int = 200) -> Response:
    """A response. Large JSON is written on a thread and in parts: nothing else can run while it is written."""
    if isinstance(body, str):
        return PlainTextResponse(body, status_code)
    is_ready = isinstance(body, bytes) or is_small(body)
    return JsonResponse(body if is_ready else await asyncio.to_thread(json_in_parts, body), status_code)


def json_in_parts(value: Any) -> bytes:
    """The JSON in parts, with the same bytes as when it is written at once."""
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
    """The items of a list, several together if they are small."""
    if is_small(items):
        yield iter((orjson.dumps(items)[1:-1],))
    else:
        yield from map(_parts, items)
