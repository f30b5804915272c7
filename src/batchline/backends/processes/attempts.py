"""One request's way to its answer, on one life of an engine after another (see `backend.py`)."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from batchline.backends.balancing import Balancer
from batchline.backends.base import Answer, EndpointRequest
from batchline.backends.http.calls import prefix_of
from batchline.backends.processes.life import Life
from batchline.backends.processes.peer import PeerLost
from batchline.backends.processes.replica import Replica
from batchline.backends.supervision import GIVEN_UP, MAX_ENDS, STREAM_BROKEN_OFF
from batchline.errors import EngineLost, InternalServerError, ServiceUnavailable

logger = logging.getLogger(__name__)


class ProcessAttempts:
    """One request's way to its answer, on one engine after another."""

    def __init__(self, balancer: Balancer[Replica], request: EndpointRequest) -> None:
        self._balancer = balancer
        self._request = request
        self._replica: Replica | None = None
        self._num_ends = 0

    async def answer(self) -> Answer:
        """Raises: InternalServerError for a request that ends engines; ServiceUnavailable; EngineLost."""
        while True:
            replica = self._taken()
            try:
                answer = await self._attempt(replica)
            finally:
                self._balancer.give_back(replica)
            if answer is not None:
                return answer

    async def stream(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """Raises: as `answer` does, and RequestError, all before the first chunk."""
        has_begun = False
        while True:
            replica = self._taken()
            try:
                life = await replica.life()
                async with life.company.join(self._num_ends), aclosing(life.peer.stream(self._request)) as chunks:
                    if not life.is_alive:
                        continue
                    try:
                        async for chunk in chunks:
                            life.note_output()
                            has_begun = True
                            yield chunk
                    except PeerLost as exc:
                        if has_begun:
                            yield ServiceUnavailable(STREAM_BROKEN_OFF, code="engine_ended").body()
                        else:
                            await self._note_lost(replica, life, exc)
                            continue
                    replica.note_good_answer()
                return
            finally:
                self._balancer.give_back(replica)

    async def _attempt(self, replica: Replica) -> Answer | None:
        """The answer; None if the engine ended."""
        life = await replica.life()
        async with life.company.join(self._num_ends):
            if not life.is_alive:
                return None  # it ended while this request waited for its turn
            try:
                answer = await life.peer.answer(self._request)
            except PeerLost as exc:
                await self._note_lost(replica, life, exc)
                return None
            if answer.status_code >= 500 and await life.is_dying():
                self._note_end(replica)
                return None
        life.note_output()
        if not answer.is_error:
            replica.note_good_answer()
        return answer

    def _taken(self) -> Replica:
        """The replica for the next attempt, where it now has a place. A request that saw an engine end stays with that
        engine's successors.

        Raises: EngineLost, ModelLoadError if no engine is left.
        """
        replica = self._replica
        if replica is None or replica.is_refused:
            replica = self._choice()
        self._balancer.take(replica)
        return replica

    def _choice(self) -> Replica:
        members = [replica for replica in self._balancer.members if not replica.is_refused]
        if not members:
            members = self._balancer.members
        if not members:
            raise EngineLost("it is not started")
        ready = [replica for replica in members if replica.current is not None] or members
        prefix = prefix_of(self._request.body)
        return self._balancer.choose(time.monotonic(), prefix, among=ready) or min(ready, key=lambda one: one.load)

    async def _note_lost(self, replica: Replica, life: Life, exc: PeerLost) -> None:
        """Raises: ServiceUnavailable if only the connection broke; InternalServerError."""
        if not await life.is_dying():
            raise ServiceUnavailable("The connection to the engine broke") from exc
        self._note_end(replica)

    def _note_end(self, replica: Replica) -> None:
        """Raises: InternalServerError once too many engines have ended."""
        self._num_ends += 1
        self._replica = replica
        logger.info("%s ended under request %s", replica.name, self._request.request_id)
        if self._num_ends >= MAX_ENDS:
            logger.error("request %s ended %d engines and is not tried again", self._request.request_id, MAX_ENDS)
            replica.note_culprit()
            raise InternalServerError(GIVEN_UP)
