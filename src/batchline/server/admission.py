"""How many requests may be in the house: more are refused at once, so that none waits without end."""

from __future__ import annotations

from collections.abc import Container

from starlette.types import ASGIApp, Receive, Scope, Send

from batchline.errors import Overloaded
from batchline.server.metrics import Metrics
from batchline.server.root_path import route_path

RETRY_AFTER_S = 1


class Admission:
    """Counts requests to some paths from their first byte to the last of their answer. ASGI middleware."""

    def __init__(self, app: ASGIApp, metrics: Metrics, max_in_flight: int, paths: Container[str]) -> None:
        """paths: those that do work; all others are always let through."""
        self._app = app
        self._metrics = metrics
        self._max_in_flight = max_in_flight
        self._paths = paths
        self._num_in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: Overloaded."""
        if scope["type"] != "http" or route_path(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        if self._num_in_flight >= self._max_in_flight or scope.get("state", {}).get("is_crowded"):
            raise Overloaded("Too many requests are waiting; try again later", retry_after_s=RETRY_AFTER_S)
        self._num_in_flight += 1
        self._metrics.in_flight.set(self._num_in_flight)
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_in_flight -= 1
            self._metrics.in_flight.set(self._num_in_flight)
