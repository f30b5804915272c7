"""Finds whether an output already exists, and its stamp, which changes when the output does.

This cannot be found for some outputs: standard output, a pipe, a presigned URL that only allows PUT. Their stamp is
None.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

from batchline.batch.locations import Location
from batchline.batch.options import RunOptions
from batchline.batch.progress import Reporter
from batchline.batch.remote import file_system, head, object_version
from batchline.batch.workspace import is_special
from batchline.errors import OutputUnwritable

logger = logging.getLogger(__name__)

Stamp = Mapping[str, str]
"""Names and values that change when the content at a place does."""

_BLOCK_BYTES = 1 << 20


async def account_for_older_outputs(options: RunOptions, reporter: Reporter) -> None:
    """Say which outputs of other runs this one will replace. Raises: OutputUnwritable if it must not."""
    for location in options.outputs:
        if options.overwrite is False:
            await _refuse_to_replace(location, reporter)
        elif options.overwrite is None and location.kind != "http" and await exists(location):  # few URLs tell
            reporter.phase(
                f"{location.display} exists and is not the result of this run. It is replaced when the new results are "
                "complete"
            )


async def _refuse_to_replace(location: Location, reporter: Reporter) -> None:
    is_there = await exists(location)
    if is_there:
        reason = "it exists and is not the result of this run. Give another output, or leave out --no-overwrite."
        raise OutputUnwritable(location.display, reason)
    if is_there is None:
        reporter.warn(f"Cannot find out whether {location.display} exists. If it does, it is replaced.")


async def exists(location: Location) -> bool | None:
    """Whether something is there that a delivery would replace; None if the place does not tell."""
    if location.path is not None:
        return location.path.is_file() and not is_special(location.path)
    if location.kind == "fsspec":
        return await asyncio.to_thread(_object_exists, location)
    if location.kind == "http":
        status, _ = await head(location)
        return True if status == 200 else False if status in (404, 410) else None
    return False


async def stamp(location: Location) -> Stamp | None:
    """The stamp of what is there now; None if nothing is, or the place does not tell."""
    if location.path is not None:
        return await asyncio.to_thread(_file_stamp, location.path)
    if location.kind == "fsspec":
        return await asyncio.to_thread(_object_stamp, location)
    if location.kind == "http":
        status, etag = await head(location)
        return {"etag": etag} if status == 200 and etag else None
    return None


async def is_unchanged(location: Location, before: Stamp) -> bool:
    """Whether the content is still the one that had the stamp `before`."""
    if location.path is not None:
        return await asyncio.to_thread(_is_unchanged_file, location.path, before)
    return await stamp(location) == before


def _file_stamp(path: Path) -> Stamp | None:
    try:
        if not path.is_file():
            return None
        size, mtime_ns = _size_and_time(path)
        return {"size": size, "mtime_ns": mtime_ns, "sha256": _digest(path)}
    except OSError:
        return None


def _is_unchanged_file(path: Path, before: Stamp) -> bool:
    """A file of another size or time is read whole only if its size is the same: it may have been copied or touched."""
    try:
        size, mtime_ns = _size_and_time(path)
        if not path.is_file() or size != before.get("size"):
            return False
        return mtime_ns == before.get("mtime_ns") or _digest(path) == before.get("sha256")
    except OSError:
        return False


def _size_and_time(path: Path) -> tuple[str, str]:
    found = path.stat()
    return str(found.st_size), str(found.st_mtime_ns)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _object_exists(location: Location) -> bool | None:
    try:
        fs, path = file_system(location)
        return bool(fs.exists(path))
    except Exception:  # each cloud client has an exception tree of its own
        logger.debug("cannot tell whether %s exists", location.display, exc_info=True)
        return None


def _object_stamp(location: Location) -> Stamp | None:
    """Size alone is no stamp."""
    try:
        version = object_version(*file_system(location))
    except Exception:  # each cloud client has an exception tree of its own
        logger.debug("cannot tell what is at %s", location.display, exc_info=True)
        return None
    known = {name: str(value) for name, value in version.items() if value is not None}
    return known if known.keys() - {"size"} else None
