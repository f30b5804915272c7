"""Responses that the server keeps in memory, so that later requests can go on from them, read them and cancel them.

The newest are kept, up to a number and to the bytes of their JSON; a restart forgets them all. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson

from batchline.errors import BadRequest, NotFound

MAX_KEPT = 1000
MAX_KEPT_BYTES = 256 << 20
"""Of JSON; in memory it is a few times as much."""

JsonObject = dict[str, Any]


@dataclass(slots=True)
class KeptResponse:
    """A response as it stands, with all the input items that led to it. task: what makes it, in the background."""

    response: JsonObject
    input_items: list[JsonObject]
    task: asyncio.Task[None] | None = None

    @property
    def num_bytes(self) -> int:
        """The size of its JSON, of the input that it goes on from too."""
        return len(orjson.dumps([self.response, self.input_items]))

    @property
    def is_running(self) -> bool:
        """Whether it is still being made."""
        return self.response["status"] in ("queued", "in_progress")

    @property
    def conversation(self) -> list[JsonObject]:
        """The items that a following request begins with."""
        return [*self.input_items, *self.response["output"]]


class KeptResponses:
    """The kept responses by id, the oldest forgotten first; the newest is kept whatever its size."""

    def __init__(self, max_kept: int = MAX_KEPT, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept = max_kept
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._num_bytes: dict[str, int] = {}  # as each was when it was kept

    def keep(self, kept: KeptResponse) -> None:
        """Add a response, or put a new state of it in place of the old."""
        response_id = kept.response["id"]
        self._kept[response_id] = kept
        self._kept.move_to_end(response_id)
        self._num_bytes[response_id] = kept.num_bytes
        total = sum(self._num_bytes.values())
        while len(self._kept) > self._max_kept or (total > self._max_bytes and len(self._kept) > 1):
            oldest = next(iter(self._kept))
            total -= self._num_bytes[oldest]
            self.forget(oldest)

    def get(self, response_id: str, param: str | None = None) -> KeptResponse:
        """A kept response. param: the request's field that names it. Raises: NotFound."""
        kept = self._kept.get(response_id)
        if kept is None:
            raise NotFound(f"Response with id {response_id[:200]!r} not found", param=param)
        return kept

    def finished(self, response_id: str, param: str) -> KeptResponse:
        """A kept response that is not being made any more. Raises: NotFound, BadRequest."""
        kept = self.get(response_id, param)
        if kept.is_running:
            message = f"{param}: the response {response_id!r} is still being made; wait for it, or cancel it"
            raise BadRequest(message, param=param)
        return kept

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._kept

    @property
    def num_running(self) -> int:
        """How many are being made in the background."""
        return sum(kept.task is not None and not kept.task.done() for kept in self._kept.values())

    def cancel(self, response_id: str) -> JsonObject:
        """Stop making a response in the background. Raises: NotFound, BadRequest."""
        kept = self.get(response_id)
        if kept.task is None:
            raise BadRequest("Only a response made in the background can be cancelled", param="response_id")
        if kept.is_running:
            kept.task.cancel()
            kept.response = kept.response | {"status": "cancelled"}
        return kept.response

    def forget(self, response_id: str) -> None:
        """Drop a response; one that is still being made is cancelled. Raises: NotFound."""
        kept = self.get(response_id)
        if kept.task is not None:
            kept.task.cancel()
        del self._kept[response_id], self._num_bytes[response_id]
