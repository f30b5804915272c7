"""Which models are in memory: loads them when they are first asked for, and one after another where they do not fit
together.

Knows nothing of what a model does; it is given a loader. A model in use is never unloaded. Requests pass a door in
the order they came: one that waits for another model to be emptied out makes later ones wait too, so that no model is
starved.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """A loaded model."""

    def close(self) -> None:
        """Free its memory; called when nothing uses it."""


ModelT = TypeVar("ModelT", bound=Closable)


@dataclass(frozen=True, slots=True)
class Loadable(Generic[ModelT]):
    """A model that can be loaded.

    load: runs on a thread, may take minutes. needed_bytes: memory it will take; None when it cannot be told before,
    and then it never shares memory with another.
    """

    name: str
    load: Callable[[], ModelT]
    needed_bytes: int | None


@dataclass(slots=True)
class _Resident(Generic[ModelT]):
    model: ModelT
    users: int = 0


class ModelResidency(Generic[ModelT]):
    """The loaded models. free_bytes: memory that one more model could take, asked before each load."""

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        self._residents: dict[str, _Resident[ModelT]] = {}
        self._door = asyncio.Lock()
        self._someone_left = asyncio.Condition()

    @asynccontextmanager
    async def use(self, wanted: Loadable[ModelT]) -> AsyncIterator[ModelT]:
        """The loaded model, kept in memory until the block ends. Raises what its loader raises."""
        async with self._door:
            resident = self._residents.get(wanted.name)
            if resident is None:
                await self._make_room(wanted)
                resident = _Resident(await _in_own_thread(wanted.load))
                self._residents[wanted.name] = resident
            resident.users += 1
        try:
            yield resident.model
        finally:
            resident.users -= 1
            if resident.users == 0:
                async with self._someone_left:
                    self._someone_left.notify_all()

    def resident_models(self) -> list[ModelT]:
        """The models in memory."""
        return [resident.model for resident in self._residents.values()]

    def resident(self, name: str) -> ModelT | None:
        """The model of this name if it is in memory."""
        resident = self._residents.get(name)
        return None if resident is None else resident.model

    async def close(self) -> None:
        """Unload everything, in use or not."""
        for name in list(self._residents):
            await self._unload(name)

    async def _make_room(self, wanted: Loadable[ModelT]) -> None:
        while self._residents and not self._fits(wanted):
            idle = [name for name, resident in self._residents.items() if resident.users == 0]
            if idle:
                logger.info("unloading %s to make room for %s", idle[0], wanted.name)
                await self._unload(idle[0])
                await asyncio.to_thread(gc.collect)  # parts of a model may refer to each other
                continue
            async with self._someone_left:
                await self._someone_left.wait_for(lambda: any(r.users == 0 for r in self._residents.values()))

    def _fits(self, wanted: Loadable[ModelT]) -> bool:
        return wanted.needed_bytes is not None and wanted.needed_bytes <= self._free_bytes()

    async def _unload(self, name: str) -> None:
        await asyncio.to_thread(self._residents.pop(name).model.close)


async def _in_own_thread(load: Callable[[], ModelT]) -> ModelT:
    """What `load` returns, called on a thread that ends with it.

    OpenMP keeps a team for every thread that computes, as long as that thread lives. While the teams together are more
    than the cores, all of them sleep at their barriers instead of spinning, which costs the engine's thread a tenth of
    its speed: so the thread that loads must not stay, as those of asyncio's pool do.
    """
    executor = ThreadPoolExecutor(1, "batchline-loading")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, load)
    finally:
        executor.shutdown(wait=False)
