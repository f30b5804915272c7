"""Settings of the whole suite, made before torch and the hub's client are imported.

Tiny models run several times faster on one thread, and no test may reach for the network.
"""

from __future__ import annotations

import os
import shutil

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined: they run on the CPU, slowly


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the load check of the server lasts."""
    parser.addoption("--load-minutes", type=float, default=0.1, help="minutes that tests/server/test_load.py takes")


@pytest.fixture(autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of runs of a test stay in a folder of its own, also those of processes that it starts."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / f"state-{os.urandom(8).hex()}"))
