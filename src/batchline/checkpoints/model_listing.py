"""Remembers which names every model file of `transformers` exports.

While it is imported, `transformers` reads its thousands of model files for these names, twice. That takes almost a
second, much of the time until the first answer of a small model. So the names are kept as a record in the user's state
folder. A record is valid only for the same files: their paths, sizes and times of change.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

import orjson

from batchline.user_state import user_state_dir, write_record

logger = logging.getLogger(__name__)

_READER = "transformers.utils.import_utils"
_FUNCTION = "define_import_structure"
_MAX_RECORDS = 4
"""Installations of `transformers` whose names are kept."""

Names = dict[frozenset[str], dict[str, set[str]]]
"""By the libraries that they need: by module, such as `llama.modeling_llama`, its names."""


@contextmanager
def remembered_names() -> Iterator[None]:
    """Inside the block, an import of `transformers` takes the names of its models from a record, or makes one."""
    finder = _PatchingFinder()
    sys.meta_path = [finder, *sys.meta_path]
    try:
        yield
    finally:
        sys.meta_path = [other for other in sys.meta_path if other is not finder]


class _PatchingFinder(MetaPathFinder):
    """Finds the module that reads the model files, as Python does, and gives it a loader that changes it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for any other module."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _READER else None
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(Loader):
    """Loads the module that reads the model files, and replaces its function."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module, and replaces its function if it still has it."""
        self._own.exec_module(module)
        read = getattr(module, _FUNCTION, None)
        if read is not None:
            setattr(module, _FUNCTION, _remembering(read))


def _remembering(read: Callable[..., Names]) -> Callable[..., Names]:
    """`define_import_structure`, which reads the folder of all models only if there is no record of it."""

    def names_of(module_path: str, prefix: str | None = None) -> Names:
        folder = Path(module_path)
        if folder.name == "__init__.py":
            folder = folder.parent
        if folder.parts[-2:] != ("transformers", "models"):
            return read(module_path, prefix)
        record = _record_of(folder)
        names = _recorded(record)
        if names is None:
            names = read(str(folder))
            _keep(names, record)
        if prefix is None:
            return names
        return {needs: {f"{prefix}.{name}": of for name, of in by.items()} for needs, by in names.items()}

    return names_of


def _recorded(record: Path | None) -> Names | None:
    """The names on record; None if there is no usable record."""
    if record is None:
        return None
    try:
        digest, _, content = record.read_bytes().partition(b"\n")
    except OSError:  # most often there is none yet
        return None
    if digest != _digest(content):
        return None
    return {frozenset(needs): {name: set(of) for name, of in by.items()} for needs, by in orjson.loads(content)}


def _keep(names: Names, record: Path | None) -> None:
    """Write a record, if it can be written: a line with a digest of the JSON that follows."""
    if record is None:
        return
    parts = [[sorted(needs), {name: sorted(of) for name, of in by.items()}] for needs, by in names.items()]
    content = orjson.dumps(parts)
    try:
        write_record(record, _digest(content) + b"\n" + content, max_records=_MAX_RECORDS)
    except OSError:
        logger.debug("the names in transformers cannot be recorded", exc_info=True)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _record_of(folder: Path) -> Path | None:
    """Where the record of a folder of models is, if there is one; None if there cannot be one."""
    state = user_state_dir()
    try:
        return None if state is None else state / "transformers" / f"{_fingerprint(folder)}.json"
    except OSError:
        return None


def _fingerprint(folder: Path) -> str:
    """Of the paths, sizes and times of change of all files. Raises: OSError."""
    digest = hashlib.sha256()
    folders = [os.fspath(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if not entry.is_dir():
                    stat = entry.stat()
                    digest.update(f"{entry.path!r} {stat.st_size} {stat.st_mtime_ns}\n".encode())
                elif entry.name != "__pycache__":
                    folders.append(entry.path)
    return digest.hexdigest()[:32]
