"""Models in memory: loaded once, never unloaded in use, one after another where they do not fit."""

from __future__ import annotations

import asyncio
import threading

import pytest

from batchline.backends.residency import Loadable, ModelResidency


class Recorded:
    """A model that notes its life in a shared list."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.events = events
        events.append(f"load {name}")

    def close(self) -> None:
        self.events.append(f"unload {self.name}")


class Shelf:
    """Memory for `room` bytes, and models that take 1 each unless said otherwise."""

    def __init__(self, room: int) -> None:
        self.events: list[str] = []
        self.residency: ModelResidency[Recorded] = ModelResidency(lambda: room - len(self.residency.resident_models()))

    def model(self, name: str, needed_bytes: int | None = 1) -> Loadable[Recorded]:
        return Loadable(name, lambda: Recorded(name, self.events), needed_bytes)


async def test_a_model_is_loaded_once_and_shared() -> None:
    shelf = Shelf(room=1)
    async with shelf.residency.use(shelf.model("a")) as first, shelf.residency.use(shelf.model("a")) as second:
        assert first is second
    assert shelf.events == ["load a"]


async def test_the_thread_that_loads_a_model_ends_and_takes_its_computing_threads_along() -> None:
    loading: list[threading.Thread] = []

    def load() -> Recorded:
        loading.append(threading.current_thread())
        return Recorded("a", [])

    async with Shelf(room=1).residency.use(Loadable("a", load, 1)):
        (thread,) = loading
        assert thread is not threading.current_thread()
        thread.join(timeout=60)
        assert not thread.is_alive()


async def test_models_that_fit_together_stay_together() -> None:
    shelf = Shelf(room=2)
    for name in "abab":
        async with shelf.residency.use(shelf.model(name)):
            pass
    assert shelf.events == ["load a", "load b"]


@pytest.mark.parametrize("needed_bytes", [1, None])
async def test_a_model_that_does_not_fit_beside_an_idle_one_replaces_it(needed_bytes: int | None) -> None:
    shelf = Shelf(room=1)
    for name in "ab":
        async with shelf.residency.use(shelf.model(name, needed_bytes)):
            pass
    assert shelf.events == ["load a", "unload a", "load b"]


async def test_a_model_in_use_is_not_unloaded_and_later_requests_wait_behind_the_one_that_needs_room() -> None:
    shelf = Shelf(room=1)
    entered, leave = asyncio.Event(), asyncio.Event()
    order: list[str] = []

    async def use(name: str, until: asyncio.Event | None = None) -> None:
        async with shelf.residency.use(shelf.model(name)):
            order.append(name)
            entered.set()
            if until is not None:
                await until.wait()

    first = asyncio.create_task(use("a", leave))
    await entered.wait()
    second, third = asyncio.create_task(use("b")), asyncio.create_task(use("a"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert shelf.events == ["load a"]
    leave.set()
    await asyncio.gather(first, second, third)
    assert order == ["a", "b", "a"]
    assert shelf.events == ["load a", "unload a", "load b", "unload b", "load a"]


async def test_a_loader_that_fails_leaves_room_for_the_next() -> None:
    shelf = Shelf(room=1)

    def fail() -> Recorded:
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        async with shelf.residency.use(Loadable("broken", fail, 1)):
            pass
    async with shelf.residency.use(shelf.model("a")) as model:
        assert model.name == "a"


async def test_close_unloads_everything() -> None:
    shelf = Shelf(room=2)
    for name in "ab":
        async with shelf.residency.use(shelf.model(name)):
            pass
    await shelf.residency.close()
    assert shelf.events[-2:] == ["unload a", "unload b"]
    assert shelf.residency.resident_models() == []
