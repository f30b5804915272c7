"""Shares a backend among the runs on it: how many requests may be in flight at once, and how many bytes of them.

The run that has the fewest requests in flight gets the next free place, so no run starves. All runs that share a
capacity are on one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque

MAX_INFLIGHT_BYTES = 256 * 1024 * 1024
"""Limit on the bytes of batch lines in flight, so that a file of images does not fill the memory. A single request may
exceed it."""


class Capacity:
    """The places for requests at one backend.

    num_places: how many requests it takes at once. num_bytes: the limit on the bytes of all their lines.
    """

    def __init__(self, num_places: int, num_bytes: int | None = None) -> None:
        self.num_places = num_places
        self._num_bytes = MAX_INFLIGHT_BYTES if num_bytes is None else num_bytes
        self._num_grants = 0
        self._shares: list[Share] = []

    def share(self, *, is_exclusive: bool = False) -> Share:
        """The share of one more run. is_exclusive: while one of its requests is in flight, no other request is."""
        share = Share(self, self.num_places if is_exclusive else 1)
        self._shares.append(share)
        return share

    def grant(self) -> None:
        """Give the free places to waiting requests. Smaller requests do not overtake one that needs much room. To be
        called when a share has changed."""
        self._shares = [share for share in self._shares if not share.is_over]
        while waiting := [share for share in self._shares if share.is_waiting()]:
            share = min(waiting, key=lambda share: (share.num_held, share.last_grant))
            used_places = sum(share.num_held * share.places_per_request for share in self._shares)
            used_bytes = sum(share.held_bytes for share in self._shares)
            has_places = used_places + share.places_per_request <= self.num_places
            has_bytes = not used_bytes or used_bytes + share.next_bytes <= self._num_bytes
            if not (has_places and has_bytes):
                return
            self._num_grants += 1
            share.admit(self._num_grants)


class Share:
    """One run's part of a capacity. num_held: its requests in flight. held_bytes: of their lines."""

    def __init__(self, capacity: Capacity, places_per_request: int) -> None:
        self.places_per_request = places_per_request
        self.num_held = 0
        self.held_bytes = 0
        self.last_grant = 0
        self._capacity = capacity
        self._waiting: deque[tuple[int, asyncio.Future[bool]]] = deque()
        self._is_closed = False

    def is_waiting(self) -> bool:
        """Whether a request waits for a place."""
        while self._waiting and self._waiting[0][1].done():  # cancelled
            self._waiting.popleft()
        return bool(self._waiting)

    @property
    def next_bytes(self) -> int:
        """The length of the request that has waited longest."""
        return self._waiting[0][0]

    @property
    def is_over(self) -> bool:
        """Whether it holds no place and takes none."""
        return self._is_closed and not self.num_held

    async def take(self, num_bytes: int) -> bool:
        """Wait for a place for a request. Returns whether it got one, which is False once the share is closed."""
        if self._is_closed:
            return False
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, place))
        self._capacity.grant()
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.result():
                self.give_back(num_bytes)
            self._capacity.grant()  # others may have waited behind a large request
            raise

    def admit(self, number: int) -> None:
        """Give a place to the request that has waited longest. number: counts all grants of the capacity."""
        num_bytes, place = self._waiting.popleft()
        self.num_held += 1
        self.held_bytes += num_bytes
        self.last_grant = number
        place.set_result(True)

    def give_back(self, num_bytes: int) -> None:
        """Free the place of a request."""
        self.num_held -= 1
        self.held_bytes -= num_bytes
        self._capacity.grant()

    def close(self) -> None:
        """Take no more places; requests that wait get none. Idempotent."""
        self._is_closed = True
        while self.is_waiting():
            self._waiting.popleft()[1].set_result(False)
        self._capacity.grant()
