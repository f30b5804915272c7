"""Settings of the whole suite, made before torch and the hub's client are imported.

Tiny models run several times faster on one thread, and no test may reach for the network.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from batchline.config import EngineConfig
    from batchline.testing import FakeBackend

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs the suite in the background ignores Ctrl-C, and so would every program that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined: they run on the CPU, slowly


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much is tried: the suite that each change passes takes a sample of its longest tests."""
    parser.addoption("--thorough", action="store_true", help="every case of the long tests, not a sample of them")
    parser.addoption("--load-minutes", type=float, default=0.1, help="minutes that tests/server/test_load.py takes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--thorough"):
        left_out = {item for item in items if item.get_closest_marker("thorough")} | set(_beside_samples(items))
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _beside_samples(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of the cases of each test marked `sample(n)`, all but every n-th."""
    seen: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("sample")) is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.args[0]:
                yield item
            seen[test] += 1


@pytest.fixture(scope="session")
def share(request: pytest.FixtureRequest) -> int:
    """Of a long test's cases, one in so many is tried."""
    return 1 if request.config.getoption("--thorough") else 6


@pytest.fixture(autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of runs of a test stay in a folder of its own, also those of processes that it starts."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / f"state-{os.urandom(8).hex()}"))


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """A command that sets up logging in this process does so for its own test only."""
    yield
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the code of a test's own thread wanted to sleep, in seconds; it does not."""
    seconds: list[float] = []
    sleep = asyncio.sleep
    thread = threading.get_ident()

    async def noted(delay: float) -> None:
        if threading.get_ident() != thread:  # a server of another test still runs in a thread of this process
            await sleep(delay)
            return
        seconds.append(delay)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    return seconds


@pytest.fixture
def use_fake_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], FakeBackend]], None]:
    """`use_fake_engine(make)`: fakes answer in place of the embedded engine, under its models' names and settings."""

    def use(make: Callable[[], FakeBackend]) -> None:
        from batchline.backends.base import ServedModel
        from batchline.backends.identity import result_settings
        from batchline.testing import FAKE_ENDPOINTS

        def embedded(engines: Sequence[EngineConfig]) -> FakeBackend:
            fake = make()
            name, *aliases = engines[0].model.names
            fake._served = ServedModel(name=name, aliases=tuple(aliases), endpoints=FAKE_ENDPOINTS)
            fake.identity = lambda: result_settings(engines)  # type: ignore[method-assign]
            return fake

        monkeypatch.setattr("batchline.backends.in_process.InProcessBackend", embedded)

    return use
