"""Decides how many replicas there should be. Pure logic: no input or output, and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from batchline.errors import UsageError

GROW_AFTER_S = 2.0
"""Requests must wait this long without a break before a replica is added: a short wait is no lack of replicas."""

IDLE_AFTER_S = 10.0
"""A replica without a request for this long is not needed any more, if no request waits."""


MAX_REPLICAS = 10_000


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How many replicas there may be. minimum: at least 1. maximum: at least `minimum`."""

    minimum: int
    maximum: int

    @classmethod
    def of(cls, given: int | str) -> PoolSize:
        """Of a number, or of bounds such as `2:8`. Raises: UsageError."""
        low, _, high = str(given).partition(":")
        parts = [part.strip() for part in (low, high or low)]
        minimum, maximum = (int(part) if part.isdecimal() else 0 for part in parts)
        if not 1 <= minimum <= maximum <= MAX_REPLICAS:
            raise UsageError(
                f"replicas: {given!r} is neither a number such as 4 nor bounds such as 2:8, from 1 to {MAX_REPLICAS:,}."
            )
        return cls(minimum, maximum)


@dataclass(frozen=True, slots=True)
class Load:
    """The pool at one moment. num_waiting: requests that no replica has a place for. in_flight: requests at each ready
    replica, in a fixed order. num_starting: replicas that are not ready yet. room: how many more the cluster can hold
    now. places: requests that one replica takes."""

    num_waiting: int
    in_flight: Sequence[tuple[int, int]]
    num_starting: int
    room: int
    places: int


@dataclass(slots=True)
class Autoscaler:
    """Follows the load over time. `grow` and `idle` are called one after the other, at any interval."""

    size: PoolSize
    _waiting_since: float | None = None
    _idle_since: dict[int, float] = field(default_factory=dict)

    def num_to_start(self, now: float, load: Load) -> int:
        """How many replicas to start: always up to the minimum, and more while requests wait and the cluster has room.

        Their number follows what waits, so a long queue gets all its replicas at once.
        """
        num_replicas = len(load.in_flight) + load.num_starting
        if num_replicas < self.size.minimum:
            return self.size.minimum - num_replicas
        if not load.num_waiting:
            self._waiting_since = None
            return 0
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since < GROW_AFTER_S:
            return 0
        num_useful = -(-load.num_waiting // load.places) - load.num_starting
        return max(0, min(num_useful, self.size.maximum - num_replicas, load.room))

    def to_stop(self, now: float, load: Load) -> list[int]:
        """The numbers of replicas to stop: those that have been idle for a while, down to the minimum."""
        idle = {number for number, num_in_flight in load.in_flight if not num_in_flight}
        if load.num_waiting:
            idle = set()
        self._idle_since = {number: self._idle_since.get(number, now) for number in sorted(idle)}
        long_idle = [number for number, since in self._idle_since.items() if now - since >= IDLE_AFTER_S]
        num_spare = len(load.in_flight) - self.size.minimum
        return sorted(long_idle, reverse=True)[: max(0, num_spare)]
