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

_FOR_GPUS = "libtorch_cuda.so"

_LIBRARIES = (("libtorch_global_deps.so", ctypes.RTLD_GLOBAL), ("libtorch_python.so", ctypes.RTLD_LOCAL))
"""In the order and with the modes in which torch loads them itself."""


def prepare_torch() -> None:
    """Start loading its libraries, and put off its functions for shapes. No effect if torch is imported already, on
    other systems than Linux, or if torch is built for GPUs, whose compilers may need the functions."""
    if "torch" in sys.modules or sys.platform != "linux":
        return
    folder = _library_folder()
    if folder is None or (folder / _FOR_GPUS).exists():
        return
    sys.modules[_SHAPE_FUNCTIONS] = _PutOff(_SHAPE_FUNCTIONS)
    sys.meta_path = [_ForCompiler(), *sys.meta_path]
    threading.Thread(target=_load_libraries, args=(folder,), name="batchline-torch-libraries").start()


def with_shapes(make: Callable[[], T]) -> T:
    """What `make` returns: a model. If torch fails because of what was put off, the model is made again with it."""
    try:
        return make()
    except Exception as exc:
        if not _may_need_shapes(exc) or not import_shape_functions():
            raise
    return make()


def _may_need_shapes(exc: BaseException | None) -> bool:
    """Whether torch has raised this exception or what caused it. Missing shapes are a NotImplementedError, and torch's
    random generators fail with a RuntimeError without them. Memory that is missing is another matter."""
    while exc is not None:
        if isinstance(exc, RuntimeError):
            return "out of memory" not in str(exc)
        exc = exc.__cause__
    return False


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


def _library_folder() -> Path | None:
    """Where the libraries are, if torch is installed."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).with_name("lib")


def _load_libraries(folder: Path) -> None:
    try:
        dlopen = ctypes.CDLL(None).dlopen  # `ctypes.CDLL(path)` would hold Python's lock
    except (AttributeError, OSError, TypeError):  # another C library
        return
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    for name, mode in _LIBRARIES:
        if dlopen(os.fsencode(folder / name), mode | os.RTLD_NOW) is None:  # torch will find and report the error
            return
