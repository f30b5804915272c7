"""API keys: if the operator has set any, every path needs one, except a few that show nothing about requests.

A request's key is checked before its body is read, and decides whose stored objects it sees (`owner_of`) and with whose
work its own takes turns (`current_caller`).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from batchline.callers import current_caller
from batchline.errors import Unauthorized
from batchline.server.request_path import route_path

OPEN_PATHS = frozenset({"/health", "/ping", "/", "/docs"})
"""The page at /docs is the same for every server. It requests its contents with the key that the user enters."""

_PREFLIGHT = "Browsers cannot call this server from other sites: its operator can start it with --allowed-origins"
"""A preflight never has a key, and only gets here if no origin is allowed."""

_ASKED_METHOD = "access-control-request-method"


def owner_of(request: Request) -> str:
    """The owner of a request: a name for its key; empty if the server has no keys."""
    owner: str = getattr(request.state, "owner", "")
    return owner


class ApiKeys:
    """Lets requests through that carry a known key: in `Authorization: Bearer`, `X-Api-Key` or `Api-Key`.

    ASGI middleware.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: frozenset[str]) -> None:
        """keys: one or more. open_paths: paths that need none."""
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: Unauthorized."""
        if scope["type"] == "http" and route_path(scope) not in self._open_paths:
            headers = Headers(scope=scope)
            keys = _keys_in(headers)
            if not keys and scope["method"] == "OPTIONS" and {"origin", _ASKED_METHOD} <= set(headers):
                raise Unauthorized(_PREFLIGHT, code="missing_api_key")
            owner = self._check(keys)
            scope.setdefault("state", {})["owner"] = owner
            current_caller.set(owner)
        await self._app(scope, receive, send)

    def _check(self, keys: Sequence[str]) -> str:
        """The owner of the first valid key. Raises: Unauthorized."""
        if not keys:
            raise Unauthorized("An API key is needed: send Authorization: Bearer <key>", code="missing_api_key")
        for key in keys:
            # headers arrive as latin-1; all digests are compared, in constant time
            given = _digest(key.encode("latin-1"))
            matches = [hmac.compare_digest(given, digest) for digest in self._digests]
            if any(matches):
                return given.hex()
        raise Unauthorized("The API key is not valid", code="invalid_api_key")


def _keys_in(headers: Headers) -> list[str]:
    """The keys that a request carries. Anthropic's clients send `X-Api-Key`, and Azure's send `Api-Key`.

    Some clients and proxies send an empty `Authorization` beside them, or one of another scheme.
    """
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    keys = [bearer if scheme.lower() == "bearer" else "", headers.get("x-api-key", ""), headers.get("api-key", "")]
    return [key for key in map(str.strip, keys) if key]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
