"""Turns errors into HTTP responses. Only this module maps errors to status, headers and envelope."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.requests import Request

from batchline.errors import (
    Conflict,
    InternalServerError,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    RequestError,
    ServiceUnavailable,
    Unauthorized,
)
from batchline.openai_api.endpoint_table import error_body, unknown_path_text
from batchline.server.json_body import JsonResponse
from batchline.server.request_path import route_path

SHUTTING_DOWN = ServiceUnavailable("The server is shutting down")


def error_response(error: RequestError, path: str = "") -> JsonResponse:
    """The envelope in the form of the path's API, with the error's status and headers."""
    headers = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, MethodNotAllowed):
        headers["Allow"] = error.allowed
    elif isinstance(error, Conflict):
        headers["X-Should-Retry"] = "false"  # OpenAI's clients try a 409 again otherwise
    elif isinstance(error, Overloaded):
        headers["Retry-After"] = str(error.retry_after_s)
    return JsonResponse(error_body(path, error.body()), status_code=error.status_code, headers=headers)


def unrouted(request: Request, exc: HTTPException, served: Iterable[str], methods: Iterable[str]) -> RequestError:
    """The error of the router: an unknown path, or a method other than `methods`."""
    if exc.status_code == MethodNotAllowed.status_code:
        allowed = ", ".join(methods)
        return MethodNotAllowed(f"{request.method} is not allowed here; allowed: {allowed}", allowed=allowed)
    if exc.status_code == NotFound.status_code:
        return NotFound(unknown_path_text(_shown(route_path(request.scope)), set(served)))
    return InternalServerError("Internal server error")


def _shown(path: str) -> str:
    """An untrusted path, cut and escaped."""
    return ascii(path[:200])[1:-1]
