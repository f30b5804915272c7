"""Which models are in memory: loads each when it is first asked for, and one after another where they do not fit
together.

Knows nothing of what a model does; it is given a loader. A *life* is one stay of a model in memory, and only moves on:

    waiting (for its turn and for room) -> loading -> resident -> leaving (no new users) -> gone

Each life is a task of its own that all users share, so whoever stops waiting neither stops a load nor loses its result.
A model in use is never unloaded, unless its engine has ended. One load runs at a time, in the order of asking, and
users of other models in memory do not wait for it. A model that has to make room takes no new users: they wait for its
next life, so that no model is starved.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Protocol, TypeVar

from batchline.errors import BatchlineError, EngineLost, ModelLoadError

logger = logging.getLogger(__name__)

RELOAD_DELAYS_S = (1.0, 5.0)
"""Pauses before the second and third attempt to load a model again that has run before."""

MAX_FRUITLESS_ENDS = 20
"""How often a model's engine may end in a row without one good answer; every request that ends it is given up after a
few times, so this many mean that it ends whatever it is asked. An end that finds a culprit is not one of them."""

MAX_CULPRITS = 100
"""How many requests in a row may be found guilty without one good answer: more mean the same."""

FIRST_REFUSAL_S, LONGEST_REFUSAL_S = 1.0, 60.0
"""How long a model that could not be loaded is not tried again; doubles each time."""


class Residing(Protocol):
    """A loaded model."""

    def is_alive(self) -> bool:
        """Whether it still takes requests."""

    def close(self) -> None:
        """Free its memory. Called once, on a thread."""


ModelT = TypeVar("ModelT", bound=Residing)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Loadable(Generic[ModelT]):
    """A model that can be loaded. Both functions run on a thread.

    load: may take minutes. fits: whether there is memory for it beside the models that are loaded.
    """

    name: str
    load: Callable[[], ModelT]
    fits: Callable[[], bool]


@dataclass(slots=True, eq=False)
class _Life(Generic[ModelT]):
    """One stay in memory. users: who uses it or waits for it. last_use: a number that grows with each use.

    model: None until it is resident.
    """

    wanted: Loadable[ModelT]
    users: int = 0
    last_use: int = 0
    model: ModelT | None = None
    is_leaving: bool = False
    loading: asyncio.Task[None] = field(init=False)

    @property
    def has_ended(self) -> bool:
        """Whether its engine has, so that there is no use in waiting for its users."""
        return self.model is not None and not self.model.is_alive()

    @property
    def takes_users(self) -> bool:
        """Whether one more may use it or wait for it."""
        return not (self.is_leaving or self.has_ended or (self.loading.done() and self.model is None))


@dataclass(slots=True)
class _Record:
    """What became of a model's lives so far. fruitless_ends: engines that ended since the last good answer, less the
    `culprits` found since then.

    refusals: times in a row that it was given up. refused_until: when it may be loaded again, on the monotonic clock.
    refusal: why it was given up, until it is loaded again. retrying: loads it again without being asked.
    """

    was_loaded: bool = False
    fruitless_ends: int = 0
    culprits: int = 0
    refusals: int = 0
    refused_until: float = 0.0
    refusal: BatchlineError | None = None
    retrying: asyncio.Task[None] | None = None


class ModelResidency(Generic[ModelT]):
    """The models in memory.

    on_gone: gets each model that has been closed, in the same turn of the event loop that takes it off the list.
    """

    def __init__(
        self,
        on_gone: Callable[[ModelT], None] = lambda model: None,
        *,
        reload_delays_s: Sequence[float] = RELOAD_DELAYS_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_gone = on_gone
        self._reload_delays_s = reload_delays_s
        self._clock = clock
        self._uses = count()
        self._newest: dict[str, _Life[ModelT]] = {}
        self._residents: list[_Life[ModelT]] = []
        self._records: dict[str, _Record] = {}
        self._line = asyncio.Lock()
        self._someone_left = asyncio.Event()
        self._closed = asyncio.Event()

    @asynccontextmanager
    async def use(self, wanted: Loadable[ModelT]) -> AsyncIterator[ModelT]:
        """The loaded model, kept in memory until the block ends, or until its engine ends.

        Raises: BatchlineError, as the loader; ModelLoadError for whatever else it raises; EngineLost.
        """
        life = self._life(wanted)
        life.users += 1
        life.last_use = next(self._uses)
        try:
            if life.model is None:
                await asyncio.shield(life.loading)
            assert life.model is not None
            yield life.model
        finally:
            life.users -= 1
            self._someone_left.set()

    def note_good_answer(self, name: str) -> None:
        """The model has done what it is for: what happened before does not count against it any more."""
        record = self._records[name]
        record.fruitless_ends = record.culprits = 0

    def note_culprit(self, name: str) -> None:
        """The engine's last end is the fault of a request that was alone and is given up."""
        record = self._records[name]
        record.fruitless_ends -= 1
        record.culprits += 1

    def resident_models(self) -> list[ModelT]:
        """The models in memory."""
        return [life.model for life in self._residents if life.model is not None]

    def resident(self, name: str) -> ModelT | None:
        """The model of this name if it is in memory."""
        life = self._newest.get(name)
        return None if life is None else life.model

    def is_refused(self, name: str) -> bool:
        """Whether a model that has run before was given up, and has not been loaded again since."""
        record = self._records.get(name)
        return record is not None and record.was_loaded and record.refusal is not None

    async def close(self) -> None:
        """Unload everything, in use or not. A load that runs is waited for: threads cannot be stopped. Idempotent."""
        self._closed.set()
        self._someone_left.set()
        await asyncio.gather(
            *(life.loading for life in self._newest.values()),
            *(record.retrying for record in self._records.values() if record.retrying is not None),
            return_exceptions=True,
        )
        for life in list(self._residents):
            await self._unload(life)

    def _life(self, wanted: Loadable[ModelT]) -> _Life[ModelT]:
        """The model's present life, or its next one. Raises: BatchlineError where it may have none now."""
        self._raise_if_closed()
        life = self._newest.get(wanted.name)
        if life is not None and life.takes_users:
            return life
        record = self._records.setdefault(wanted.name, _Record())
        if life is not None and life.has_ended and not life.is_leaving:
            self._note_end(wanted, record)
            life.is_leaving = True
        if record.refusal is not None and self._clock() < record.refused_until:
            raise record.refusal.with_traceback(None)  # of earlier raises, which would add up
        life = self._newest[wanted.name] = _Life(wanted)
        life.loading = asyncio.create_task(self._load(life, record), name=f"loading {wanted.name}")
        return life

    def _note_end(self, wanted: Loadable[ModelT], record: _Record) -> None:
        record.fruitless_ends += 1
        logger.warning("the engine of %s has ended; its model is loaded again", wanted.name)
        if record.fruitless_ends >= MAX_FRUITLESS_ENDS or record.culprits >= MAX_CULPRITS:
            record.fruitless_ends = record.culprits = 0
            self._refuse(wanted, record, EngineLost(f"the engine of {wanted.name} ends whatever it is asked"))

    def _refuse(self, wanted: Loadable[ModelT], record: _Record, error: BatchlineError) -> None:
        delay_s = min(LONGEST_REFUSAL_S, FIRST_REFUSAL_S * 2**record.refusals)
        record.refusals += 1
        record.refused_until = self._clock() + delay_s
        record.refusal = error
        is_retrying = record.retrying is not None and not record.retrying.done()
        if record.was_loaded and not is_retrying and not self._closed.is_set():
            record.retrying = asyncio.create_task(self._retry(wanted, record), name=f"retrying {wanted.name}")

    async def _retry(self, wanted: Loadable[ModelT], record: _Record) -> None:
        """Load a model again that was given up, without a request: a server that reports itself unwell gets none.

        While other models have its memory, it is left to a request to take that from them.
        """
        while record.refusal is not None and not self._closed.is_set():
            await self._pause(record.refused_until - self._clock())
            if not self._closed.is_set() and await self._has_room_beside_others(wanted):
                with contextlib.suppress(BatchlineError):  # which is the next refusal
                    async with self.use(wanted):
                        break
            else:
                await self._pause(LONGEST_REFUSAL_S)

    async def _has_room_beside_others(self, wanted: Loadable[ModelT]) -> bool:
        async with self._line:  # behind loads that have been asked for
            if all(resident.has_ended or resident.is_leaving for resident in self._residents):
                return True
            with contextlib.suppress(BatchlineError):
                return await _in_own_thread(wanted.name, wanted.fits)
        return False

    async def _pause(self, delay_s: float) -> None:
        """Wait, but no longer than until the end."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._closed.wait(), delay_s)

    async def _load(self, life: _Life[ModelT], record: _Record) -> None:
        """A life's way into memory. Raises: BatchlineError."""
        async with self._line:
            if not life.users:
                return  # all of them went away before its turn came
            try:
                await self._make_room(life)
                life.model = await self._loaded(life.wanted, record)
            except BatchlineError as exc:
                if isinstance(exc, ModelLoadError):
                    exc.ran_before = record.was_loaded
                self._refuse(life.wanted, record, exc)
                raise
            self._residents.append(life)
        record.was_loaded = True
        record.refusals = 0
        record.refusal = None

    async def _loaded(self, wanted: Loadable[ModelT], record: _Record) -> ModelT:
        """The model. One that has run before gets more than one try: what it lacks now, it may have in a moment."""
        for delay_s in self._reload_delays_s if record.was_loaded else ():
            self._raise_if_closed()
            try:
                return await _in_own_thread(wanted.name, wanted.load)
            except BatchlineError as exc:
                logger.warning("%s could not be loaded again; there will be another try: %s", wanted.name, exc)
            await self._pause(delay_s)
        self._raise_if_closed()
        return await _in_own_thread(wanted.name, wanted.load)

    async def _make_room(self, life: _Life[ModelT]) -> None:
        while (resident := await self._in_the_way(life)) is not None:
            resident.is_leaving = True
            while resident.users and not resident.has_ended and not self._closed.is_set():
                self._someone_left.clear()
                await self._someone_left.wait()
            self._raise_if_closed()
            logger.info("unloading %s to make room for %s", resident.wanted.name, life.wanted.name)
            await self._unload(resident)

    async def _in_the_way(self, life: _Life[ModelT]) -> _Life[ModelT] | None:
        """A resident that has to go first: one that has ended or is leaving already, else, where memory lacks, the one
        that was asked for least lately, idle ones before others. None: there is room."""
        for resident in self._residents:
            if resident.has_ended or resident.is_leaving:
                return resident
        if not self._residents or await _in_own_thread(life.wanted.name, life.wanted.fits):
            return None
        return min(self._residents, key=lambda resident: (resident.users > 0, resident.last_use))

    async def _unload(self, life: _Life[ModelT]) -> None:
        model = life.model
        assert model is not None  # it is a resident
        try:
            await asyncio.to_thread(model.close)
        finally:
            life.model = None
            self._residents.remove(life)
            self._on_gone(model)
            del model
        await asyncio.to_thread(gc.collect)  # parts of a model may refer to each other

    def _raise_if_closed(self) -> None:
        if self._closed.is_set():
            raise EngineLost("the models have been unloaded")


async def _in_own_thread(name: str, work: Callable[[], T]) -> T:
    """What `work` for the model `name` returns, called on a thread that ends with it. Raises: BatchlineError.

    OpenMP keeps a team for every thread that computes, as long as that thread lives. While the teams together are more
    than the cores, all of them sleep at their barriers instead of spinning, which costs the engine's thread a tenth of
    its speed: so the thread that loads must not stay, as those of asyncio's pool do.
    """

    def guarded() -> T:
        failure: BatchlineError
        try:
            return work()
        except BatchlineError as exc:
            failure = exc
        except BaseException as exc:  # the code of models raises whatever it likes, `SystemExit` too
            logger.exception("loading %s failed", name)
            failure = ModelLoadError(name, f"it failed with a {type(exc).__name__}; the log has the details")
            failure.__cause__ = exc
        _free_what_it_made(failure)
        raise failure

    executor = ThreadPoolExecutor(1, "batchline-loading")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, guarded)
    finally:
        executor.shutdown(wait=False)


def _free_what_it_made(failure: BaseException | None) -> None:
    """Forget the calls that failed, whose variables are half a model maybe: whoever keeps the error would keep that."""
    while failure is not None:
        traceback.clear_frames(failure.__traceback__)  # for those who have kept it, a log maybe
        failure.__traceback__ = None
        failure = failure.__cause__ or failure.__context__
    gc.collect()  # parts of a model may refer to each other
