"""Responses that the server keeps in memory, so that later requests can continue, read and cancel them.

Each response belongs to its owner; for any other owner it does not exist. Once there are too many, or their JSON is too
large, the oldest finished response of the owner who has the most is dropped. A response in progress is never dropped.
So an owner may have only so many in the background that places remain for the others; further ones are refused.
Foreground responses are limited by the requests that wait for them, and count only once they are finished. A restart
drops everything. Knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson

from batchline.errors import BadRequest, NotFound, Overloaded

MAX_KEPT = 1000
MAX_KEPT_BYTES = 256 << 20
"""Limit of all responses' JSON. In memory, they take a few times as much."""

JsonObject = dict[str, Any]


@dataclass(slots=True)
class KeptResponse:
    """A response in its current state, with all the input items that led to it.

    num_input_bytes: the size of those items' JSON. owner: the owner of the API key of its request; empty if the server
    has no keys. task: the task that makes it in the background.
    """

    response: JsonObject
    input_items: list[JsonObject]
    num_input_bytes: int
    owner: str = ""
    task: asyncio.Task[None] | None = None

    @property
    def num_bytes(self) -> int:
        """The size of its JSON, including the input that it continues."""
        return len(orjson.dumps(self.response)) + self.num_input_bytes

    @property
    def is_running(self) -> bool:
        """Whether it is still being made."""
        return self.response["status"] in ("queued", "in_progress")

    @property
    def conversation(self) -> list[JsonObject]:
        """The items that a request that continues it begins with."""
        return [*self.input_items, *self.response["output"]]


class KeptResponses:
    """The kept responses by id, finished or in progress. The newest finished one is kept whatever its size."""

    def __init__(self, max_kept: int = MAX_KEPT, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_kept = max_kept
        self._max_bytes = max_bytes
        self._running: dict[str, KeptResponse] = {}
        self._finished: OrderedDict[str, KeptResponse] = OrderedDict()  # the oldest first
        self._num_bytes: dict[str, int] = {}  # their sizes when they were stored; not in the foreground
        self._response_ids: dict[str, str] = {}  # by the ids of finished responses' output items
        self._total_bytes = 0

    def begin(self, kept: KeptResponse) -> None:
        """Keep a response while a client waits for it."""
        self._running[kept.response["id"]] = kept

    def begin_in_background(self, kept: KeptResponse, *, max_running: int = MAX_KEPT) -> None:
        """Keep a response in progress. max_running: how many there may be. Raises: Overloaded if there are too many, or
        too many of this owner."""
        num_bytes = kept.num_bytes
        running = {response_id: other for response_id, other in self._running.items() if response_id in self._num_bytes}
        sizes = [self._num_bytes[response_id] for response_id in running]
        own = [self._num_bytes[response_id] for response_id, other in running.items() if other.owner == kept.owner]
        num_free, bytes_free = min(self._max_kept, max_running) - len(sizes), self._max_bytes - sum(sizes)
        if num_free <= 0 or (sizes and num_bytes > bytes_free):
            raise Overloaded("Too many responses are being made in the background; try again later")
        if kept.owner and own and (len(own) >= num_free or sum(own) + num_bytes > bytes_free):
            raise Overloaded("Too many of your responses are being made in the background; try again later")
        self._put(kept, num_bytes)

    def finish(self, kept: KeptResponse) -> None:
        """Store the final state of a response, unless the response was dropped meanwhile."""
        if kept.response["id"] in self:
            self._put(kept, kept.num_bytes)

    def get(self, response_id: str, owner: str, param: str | None = None) -> KeptResponse:
        """A kept response of this owner. param: the request's field that names it. Raises: NotFound."""
        kept = self._running.get(response_id) or self._finished.get(response_id)
        if kept is None or kept.owner != owner:
            raise NotFound(f"Response with id {response_id[:200]!r} not found", param=param)
        return kept

    def finished(self, response_id: str, owner: str, param: str) -> KeptResponse:
        """A kept response that is no longer being made. Raises: NotFound, BadRequest."""
        kept = self.get(response_id, owner, param)
        if kept.is_running:
            message = f"{param}: the response {response_id!r} is still being made; wait for it, or cancel it"
            raise BadRequest(message, param=param)
        return kept

    def output_item(self, item_id: str, owner: str, param: str) -> JsonObject:
        """An item of a finished response's output. Raises: NotFound."""
        kept = self._finished.get(self._response_ids.get(item_id, ""))
        if kept is None or kept.owner != owner:
            message = f"{param}: no stored response has an output item with id {item_id[:200]!r}; send the item itself"
            raise NotFound(message, param=param)
        item: JsonObject = next(item for item in kept.response["output"] if item["id"] == item_id)
        return item

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._running or response_id in self._finished

    def cancel(self, response_id: str, owner: str) -> JsonObject:
        """Stop making a response in the background. Raises: NotFound, BadRequest."""
        kept = self.get(response_id, owner)
        if kept.task is None:
            raise BadRequest("Only a response made in the background can be cancelled", param="response_id")
        if kept.is_running:
            kept.task.cancel()
            kept.response = kept.response | {"status": "cancelled"}
            self.finish(kept)
        return kept.response

    def forget(self, response_id: str, owner: str) -> None:
        """Drop a response; one that is still being made is cancelled. Raises: NotFound."""
        kept = self.get(response_id, owner)
        if kept.task is not None:
            kept.task.cancel()
        self._drop(response_id)

    def abandon(self, response_id: str) -> None:
        """Drop a response that will never be finished, if it is still in progress."""
        if response_id in self._running:
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self._running.pop(response_id, None)
        finished = self._finished.pop(response_id, None)
        for item in finished.response["output"] if finished is not None else ():
            self._response_ids.pop(item["id"], None)
        self._total_bytes -= self._num_bytes.pop(response_id, 0)

    def _put(self, kept: KeptResponse, num_bytes: int) -> None:
        response_id = kept.response["id"]
        self._drop(response_id)
        self._num_bytes[response_id] = num_bytes
        self._total_bytes += num_bytes
        (self._running if kept.is_running else self._finished)[response_id] = kept
        if not kept.is_running:
            self._response_ids |= {item["id"]: response_id for item in kept.response["output"]}
        self._make_room()

    def _make_room(self) -> None:
        """Drop finished responses until the limits hold."""
        while self._finished and (len(self._num_bytes) > self._max_kept or self._total_bytes > self._max_bytes):
            if len(self._finished) == 1 and len(self._num_bytes) <= self._max_kept:
                return  # the newest one is too large, but stays
            self._drop(self._first_to_drop())

    def _first_to_drop(self) -> str:
        """The oldest finished response of the owner who has the most, in number or bytes, whichever is too large."""
        counts_bytes = len(self._num_bytes) <= self._max_kept
        shares: Counter[str] = Counter()
        for response_id, num_bytes in self._num_bytes.items():
            kept = self._running.get(response_id) or self._finished[response_id]
            shares[kept.owner] += num_bytes if counts_bytes else 1
        largest = max((kept.owner for kept in self._finished.values()), key=shares.__getitem__)
        return next(response_id for response_id, kept in self._finished.items() if kept.owner == largest)
