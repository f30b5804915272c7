"""Sends each request to a replica, and runs it again elsewhere when that replica is lost.

Requests wait here, not at the replicas: a replica has at most as many in flight as keep it busy. A request that may
have ended a replica is a suspect. Suspects share one replica, the ward, while the others go on with other requests:
first a few at a time, then one at a time, as after the end of an embedded engine (`supervision.Company`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from batchline.backends.balancing import Balancer, Member
from batchline.backends.base import Answer, EndpointRequest
from batchline.backends.replicas.channel import Channel
from batchline.backends.replicas.messages import Recalled, ReplicaLost
from batchline.backends.supervision import MAX_ENDS, Company
from batchline.callers import engine_progress
from batchline.errors import BackendUnavailable, InternalServerError, RequestError, ServiceUnavailable
from batchline.openai_api.endpoint_table import error_body

logger = logging.getLogger(__name__)

GIVEN_UP = "Every replica that worked on this request failed"
STREAM_BROKEN_OFF = "The replica that worked on this stream failed; send the request again"


@dataclass(eq=False, slots=True, kw_only=True)
class Replica(Member):
    """A replica that is ready. number: counts all replicas of a run, from 1. where: its machine."""

    number: int
    where: str
    channel: Channel
    company: Company = field(default_factory=Company)


@dataclass(slots=True)
class _Attempts:
    """What a request has been through. num_ends: replicas that it may have ended. leaves_home: whether it was taken
    back from its lane's replica, because another one has more room."""

    request: EndpointRequest
    num_ends: int = 0
    leaves_home: bool = False


class ReplicaPool:
    """The replicas that are ready, and the requests that wait for one."""

    def __init__(self, on_culprit: Callable[[], None] = lambda: None) -> None:
        """on_culprit: called when a request is found that ends replicas."""
        self._balancer: Balancer[Replica] = Balancer()
        self._homes: dict[int, Replica] = {}
        self._waiting: deque[tuple[_Attempts, asyncio.Future[Replica]]] = deque()
        self._ward: Replica | None = None
        self._num_suspects = 0
        self._failure: BackendUnavailable | None = None
        self._on_culprit = on_culprit

    @property
    def replicas(self) -> list[Replica]:
        """Those that are ready."""
        return self._balancer.members

    @property
    def num_waiting(self) -> int:
        """Requests without a place at a replica."""
        return len(self._waiting)

    def add(self, replica: Replica) -> None:
        """Let a replica get requests."""
        self._failure = None
        self._balancer.add(replica)
        self._admit()

    def remove(self, replica: Replica) -> None:
        """Let it get no more requests. Idempotent."""
        replica.is_dead = True
        if replica in self._balancer.members:
            self._balancer.remove(replica)
            self._homes = {lane: home for lane, home in self._homes.items() if home is not replica}
        if self._ward is replica:
            self._ward = None
        self._admit()

    def fail(self, failure: BackendUnavailable) -> None:
        """End the requests that wait, and all that come until a replica is added."""
        self._failure = failure
        while self._waiting:
            _, place = self._waiting.popleft()
            if not place.done():
                place.set_exception(BackendUnavailable(str(failure)))

    def rebalance(self) -> None:
        """If a replica has much less to do than the mean, and nothing waits here, take requests back from those that
        have more and have not begun them. This happens when a replica joins, and at the end of a run."""
        replicas = [replica for replica in self.replicas if replica is not self._ward]
        if self._waiting or len(replicas) < 2:
            return
        fair = -(-sum(replica.num_in_flight for replica in replicas) // len(replicas))
        if min(replica.num_in_flight for replica in replicas) > fair // 2:
            return
        for replica in replicas:
            if replica.num_in_flight > fair:
                replica.channel.recall(replica.num_in_flight - fair)

    async def answer(self, request: EndpointRequest) -> Answer:
        """Raises: BackendUnavailable, ModelLoadError."""
        with self._attempts(request) as attempts:
            while True:
                replica = await self._enter(attempts)
                try:
                    return await replica.channel.answer(request)
                except Recalled:
                    attempts.leaves_home = True
                except ReplicaLost as loss:
                    self._note_loss(attempts, replica, loss)
                except RequestError as error:
                    return _error_answer(request, error)
                finally:
                    self._leave(replica)
                if attempts.num_ends >= MAX_ENDS:
                    return _error_answer(request, InternalServerError(GIVEN_UP))

    async def stream(self, request: EndpointRequest) -> AsyncGenerator[Mapping[str, Any], None]:
        """Raises: as `Backend.stream`."""
        has_begun = False
        with self._attempts(request) as attempts:
            while True:
                replica = await self._enter(attempts)
                try:
                    async with aclosing(replica.channel.stream(request)) as chunks:
                        async for chunk in chunks:
                            has_begun = True
                            yield chunk
                    return
                except ReplicaLost as loss:
                    self._note_loss(attempts, replica, loss)
                finally:
                    self._leave(replica)
                if has_begun:
                    yield ServiceUnavailable(STREAM_BROKEN_OFF, code="engine_ended").body()
                    return
                self._refuse_culprit(attempts)

    async def check(self, request: EndpointRequest) -> None:
        """Raises: as `Backend.check`."""
        with self._attempts(request) as attempts:
            while True:
                replica = await self._enter(attempts)
                try:
                    await replica.channel.check(request)
                    return
                except ReplicaLost as loss:
                    self._note_loss(attempts, replica, loss)
                finally:
                    self._leave(replica)
                self._refuse_culprit(attempts)

    @contextmanager
    def _attempts(self, request: EndpointRequest) -> Iterator[_Attempts]:
        """The attempts of one request. After those of the last suspect, the ward takes other requests again."""
        attempts = _Attempts(request)
        try:
            yield attempts
        finally:
            if attempts.num_ends:
                self._num_suspects -= 1
                if not self._num_suspects:
                    self._ward = None
                    self._admit()

    async def _enter(self, attempts: _Attempts) -> Replica:
        """Wait for a turn at a replica, which `_leave` ends. Raises: BackendUnavailable."""
        while True:
            replica = await self._place(attempts)
            try:
                await replica.company.enter(attempts.num_ends)
            except asyncio.CancelledError:
                self._give_back(replica)
                raise
            if not replica.is_dead:
                return replica
            self._leave(replica)  # it was lost while this request waited for its turn

    def _leave(self, replica: Replica) -> None:
        replica.company.leave()
        self._give_back(replica)

    def _give_back(self, replica: Replica) -> None:
        self._balancer.give_back(replica)
        self._admit()

    async def _place(self, attempts: _Attempts) -> Replica:
        """Wait for a replica with a free place, and take the place. Raises: BackendUnavailable."""
        if self._failure is not None:
            raise BackendUnavailable(str(self._failure))
        replica = None if self._waiting and not attempts.num_ends else self._choose(attempts)
        if replica is not None:
            self._balancer.take(replica)
            return replica
        if (progress := engine_progress.get()) is not None:
            progress.is_queued, progress.has_started = True, False
        place: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        if attempts.num_ends:
            self._waiting.appendleft((attempts, place))
        else:
            self._waiting.append((attempts, place))
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._give_back(place.result())
            raise

    def _admit(self) -> None:
        """Give free places to waiting requests, in order."""
        while self._waiting:
            attempts, place = self._waiting[0]
            if not place.done():
                replica = self._choose(attempts)
                if replica is None:
                    return
                self._balancer.take(replica)
                place.set_result(replica)
            self._waiting.popleft()

    def _choose(self, attempts: _Attempts) -> Replica | None:
        """A replica with a free place, if possible the one that has the request's prefix."""
        if attempts.num_ends:
            if self._ward is None:
                self._ward = min(self.replicas, key=lambda one: one.num_in_flight, default=None)
            return self._ward
        lane = attempts.request.lane
        home = None if lane is None or attempts.leaves_home else self._homes.get(lane)
        if home is not None and home.can_take(0.0) and home is not self._ward:
            return home
        found = self._balancer.choose(0.0, avoid=() if self._ward is None else (self._ward,))
        if lane is not None and found is not None:
            self._homes[lane] = found
        return found

    def _note_loss(self, attempts: _Attempts, replica: Replica, loss: ReplicaLost) -> None:
        request_id = attempts.request.request_id
        logger.info("replica %d was lost under request %s: %s", replica.number, request_id, loss.reason)
        if loss.is_suspicious:
            self._num_suspects += not attempts.num_ends
            attempts.num_ends += 1
        if attempts.num_ends >= MAX_ENDS:
            logger.error("request %s ended %d replicas and is not tried again", request_id, MAX_ENDS)
            self._on_culprit()

    def _refuse_culprit(self, attempts: _Attempts) -> None:
        """Raises: InternalServerError for a request that has ended too many replicas."""
        if attempts.num_ends >= MAX_ENDS:
            raise InternalServerError(GIVEN_UP)


def _error_answer(request: EndpointRequest, error: RequestError) -> Answer:
    body = error_body(request.url, error.body())
    return Answer(status_code=error.status_code, body=body, request_id=request.request_id)
