"""Loads torch's largest shared library ahead, on a thread.

When torch is imported, the system links hundreds of megabytes, for which it does not need Python. So a command that
will need torch lets the system begin while Python imports other modules.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path

_LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_cpu.so", ctypes.RTLD_LOCAL))
"""In the order and with the modes in which torch loads them. Neither of them uses Python."""

_FOR_GPUS = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")


def load_torch_libraries() -> None:
    """Start loading it. No effect if torch is imported already, on other systems than Linux, or if torch is built for
    GPUs: it then has other libraries to load first."""
    if "torch" in sys.modules or sys.platform != "linux":
        return
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).with_name("lib")
    if not any((folder / name).exists() for name in _FOR_GPUS):
        threading.Thread(target=_load, args=(folder,), name="batchline-torch-libraries").start()


def _load(folder: Path) -> None:
    try:
        dlopen = ctypes.CDLL(None).dlopen  # `ctypes.CDLL(path)` would hold Python's lock
    except (AttributeError, OSError):  # a C library that has it elsewhere
        return
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    for name, mode in _LIBRARIES:
        if dlopen(os.fsencode(folder / name), mode | os.RTLD_NOW) is None:  # torch will find and report the error
            return
