"""Makes the import of torch shorter, for a process that belongs to Batchline.

Two parts of the import take half of its time. The system links hundreds of megabytes of libraries: it can do that on
another thread, while Python imports something else. And torch registers functions that compute shapes without numbers
(on the meta device), in Python, beside those that it has in C++. Only its compiler and few models need them: they are
imported when one of these does.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

_SHAPE_FUNCTIONS = "torch._meta_registrations"
_OF_COMPILER = "torch._dynamo.config"
"""A module that torch's compiler imports, and nothing else."""

_LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_python.so", ctypes.RTLD_LOCAL))
"""In the order and with the modes in which torch loads them itself."""


def prepare_torch() -> None:
    """Start loading its libraries, and put off its functions for shapes. No effect if torch is imported already."""
    if "torch" in sys.modules:
        return
    sys.modules[_SHAPE_FUNCTIONS] = _PutOff(_SHAPE_FUNCTIONS)
    sys.meta_path = [_ForCompiler(), *sys.meta_path]
    threading.Thread(target=_load_libraries, name="batchline-torch-libraries").start()


def with_shapes(make: Callable[[], T]) -> T:
    """What `make` returns: something that is made on the meta device. If that needs the functions that were put off, it
    is made again with them."""
    try:
        return make()
    except NotImplementedError:
        if not import_shape_functions():
            raise
    return make()


def import_shape_functions() -> bool:
    """Import what was put off. False if nothing was."""
    if not isinstance(sys.modules.get(_SHAPE_FUNCTIONS), _PutOff):
        return False
    del sys.modules[_SHAPE_FUNCTIONS]
    importlib.import_module(_SHAPE_FUNCTIONS)
    return True


class _PutOff(ModuleType):
    """Stands for a module until something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of the import system
            raise AttributeError(name)
        import_shape_functions()
        return getattr(sys.modules[_SHAPE_FUNCTIONS], name)


class _ForCompiler(MetaPathFinder):
    """Imports what was put off before the compiler, which needs all of it. Finds no module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Always None."""
        if fullname == _OF_COMPILER:
            import_shape_functions()
        return None


def _load_libraries() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    folder = Path(spec.origin).with_name("lib")
    try:
        dlopen = ctypes.CDLL(None).dlopen  # `ctypes.CDLL(path)` would hold Python's lock
    except (AttributeError, OSError, TypeError):  # a system without it
        return
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    for name, mode in _LIBRARIES:
        if dlopen(os.fsencode(folder / name), mode | os.RTLD_NOW) is None:  # torch will find and report the error
            return
