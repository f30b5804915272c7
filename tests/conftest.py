"""Settings of the whole suite, made before torch and the hub's client are imported.

Tiny models run several times faster on one thread, and no test may reach for the network.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from batchline.config import EngineConfig
    from batchline.testing import FakeBackend

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
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session")
def share(request: pytest.FixtureRequest) -> int:
    """Of a long test's cases, one in so many is tried."""
    return 1 if request.config.getoption("--thorough") else 4


@pytest.fixture(autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of runs of a test stay in a folder of its own, also those of processes that it starts."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / f"state-{os.urandom(8).hex()}"))


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
