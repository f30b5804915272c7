"""Limits the work in the server: more is refused at once, so that no request waits for ever.

Work is counted in sequences. A request counts as one until its body has been read, which says how many it has.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from batchline.errors import BadRequest, Overloaded
from batchline.openai_api.endpoint_table import ENDPOINTS, answering_path
from batchline.openai_api.limits import num_sequences, num_texts
from batchline.server.metrics import Metrics
from batchline.server.request_path import route_path

RETRY_AFTER_S = 1

TEXTS_PER_SEQUENCE = 64
"""This many texts to embed, score or rank count as one sequence, because each needs only one forward pass."""


def num_places(path: str, body: Mapping[str, Any]) -> int:
    """How many sequences a request counts as. body: not yet checked. Raises: BadRequest if no endpoint takes it."""
    endpoint = ENDPOINTS[answering_path(path, body)]
    if endpoint.generates or endpoint.schema is None:
        return num_sequences(body)
    return max(1, -(-num_texts(endpoint.schema, body) // TEXTS_PER_SEQUENCE))


class Places:
    """The places that one request holds. Mutable."""

    def __init__(self, admission: Admission) -> None:
        self.num_held = 0
        self._admission = admission

    def hold(self, number: int) -> None:
        """Hold this many places in total. Raises: Overloaded; BadRequest if the server never has as many."""
        if number > self._admission.max_in_flight:
            raise BadRequest(
                f"The request has {number:,} sequences (prompts times choices), and this server never takes more than "
                f"{self._admission.max_in_flight:,} at a time (--max-num-seqs and --max-waiting): send it in parts"
            )
        if self._admission.num_in_flight + number - self.num_held > self._admission.max_in_flight:
            raise Overloaded("Too many requests are waiting; try again later", retry_after_s=RETRY_AFTER_S)
        self._admission.num_in_flight += number - self.num_held
        self.num_held = number

    def release(self) -> None:
        """Release all of them."""
        self._admission.num_in_flight -= self.num_held
        self.num_held = 0


class Admission:
    """Counts requests to some paths from their first byte to the last of their answer. ASGI middleware.

    Leaves a request's `Places` in its state. num_in_flight: places that are held.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, max_in_flight: int, paths: Container[str]) -> None:
        """paths: those that do work; all others are always let through."""
        self.max_in_flight = max_in_flight
        self.num_in_flight = 0
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: Overloaded."""
        if scope["type"] != "http" or route_path(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        if state.get("is_crowded"):
            raise Overloaded("Too many connections are open; try again later", retry_after_s=RETRY_AFTER_S)
        places = state["places"] = Places(self)
        places.hold(1)
        self._metrics.num_in_flight += 1
        try:
            await self._app(scope, receive, send)
        finally:
            places.release()
            self._metrics.num_in_flight -= 1
