"""A request's JSON body, read within bounds: its size, its type, how deep it is nested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
from starlette.requests import Request

from batchline.errors import BadRequest, PayloadTooLarge, UnsupportedMediaType

MAX_DEPTH = 128
"""Nesting that templates and schemas can be walked with."""


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body, a JSON object. Raises: UnsupportedMediaType, PayloadTooLarge, BadRequest, ClientDisconnect."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType("The body must be JSON: send it with Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise UnsupportedMediaType("The body must not be compressed: send it without Content-Encoding")
    raw = await _read(request, max_bytes)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise BadRequest(f"The body is not valid JSON: {exc}", code="invalid_json") from exc
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object", code="invalid_json")
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH:  # else it cannot be nested deeper
        _check_depth(body)
    return body


async def _read(request: Request, max_bytes: int) -> bytes:
    """All of the body; refused by its announced length, or as soon as it is longer than allowed."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The body is larger than the {max_bytes:,} bytes that this server takes (--max-request-size)"
    )


def _check_depth(body: dict[str, Any]) -> None:
    """Level by level, so that no depth can exhaust the stack. Raises: BadRequest."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [child for container in level for child in _children(container) if isinstance(child, dict | list)]
        if not level:
            return
    raise BadRequest(f"The body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _children(container: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container
