"""torch's libraries are loaded ahead, and torch works afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

PREPARE = """
import sys, threading
from pathlib import Path
from batchline.checkpoints import torch_libraries
def loaded():
    return "libtorch_cpu.so" in Path("/proc/self/maps").read_text()
def wait():
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only on Linux")


def output_of(code: str) -> str:
    command = [sys.executable, "-c", PREPARE + code]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def test_the_libraries_are_loaded_without_an_import() -> None:
    code = """
torch_libraries._FOR_GPUS = ()
torch_libraries.load_torch_libraries()
wait()
print(loaded(), "torch" in sys.modules)
import torch
print(torch.ones(3).sum().item(), torch.Generator().manual_seed(7).initial_seed())
"""
    assert output_of(code) == "True False\n3.0 7"


@pytest.mark.parametrize(
    "change",
    [
        "torch_libraries._FOR_GPUS = ('libtorch_cpu.so',)",  # a build for GPUs has such a file
        "sys.platform = 'darwin'",
        "sys.modules['torch'] = None",
        "torch_libraries.importlib.util.find_spec = lambda name: None",
        "torch_libraries._LIBRARIES = (('libmissing.so', 0), ('libtorch_cpu.so', 0))",
    ],
)
def test_otherwise_nothing_is_loaded(change: str) -> None:
    assert output_of(f"{change}\ntorch_libraries.load_torch_libraries()\nwait()\nprint(loaded())") == "False"
