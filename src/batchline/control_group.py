"""Reads this process's control group in the Linux kernel: how much memory is left, and how often the lack of it killed.

Reads control groups of version 1 and 2. A process is in one group per hierarchy; the limits of the groups above its own
apply to it, too. In a container, its own group may appear as the root.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class _Files:
    """Names of a version's files. cached: entries of `memory.stat` for cached files, which can be dropped."""

    limit: str
    used: str
    events: str
    cached: tuple[str, str]


_VERSION_1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", ("total_inactive_file", "total_active_file")
)
_VERSION_2 = _Files("memory.max", "memory.current", "memory.events", ("inactive_file", "active_file"))


def memory_room() -> int | None:
    """Bytes left under the limits of this process's groups; None without any limit."""
    rooms = []
    for own, root, files in _memory_groups():
        for folder in (own, *own.parents):
            with suppress(OSError, ValueError, KeyError):  # "max" means no limit
                rooms.append(_room(folder, files))
            if folder == root:
                break
    return min(rooms, default=None)


def oom_kills() -> tuple[int, int] | None:
    """(group, number of its processes that the kernel killed for lack of memory); None if that cannot be read.

    group: an inode, which distinguishes a new group under the same path.
    """
    for own, _, files in _memory_groups():
        events = own / files.events
        with suppress(OSError, ValueError, KeyError):
            return events.stat().st_ino, int(_entries(events)["oom_kill"])
    return None


def _memory_groups() -> Iterator[tuple[Path, Path, _Files]]:
    """(the group's folder, its hierarchy's root, its files) in each hierarchy that may account for memory."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or "memory" in controllers.split(","):
            root, files = (MOUNT, _VERSION_2) if number == "0" else (MOUNT / "memory", _VERSION_1)
            own = root / path.lstrip("/")
            yield own if own.is_dir() else root, root, files


def _room(folder: Path, files: _Files) -> int:
    limit = int((folder / files.limit).read_text())
    used = int((folder / files.used).read_text())
    stat = _entries(folder / "memory.stat")
    return max(0, limit - used + sum(int(stat.get(name, 0)) for name in files.cached))


def _entries(path: Path) -> Mapping[str, str]:
    """A file of lines with a name and a value each."""
    return dict(line.split() for line in path.read_text().splitlines())
