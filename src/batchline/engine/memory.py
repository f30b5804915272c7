"""How much memory is free where models run."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
"""Where a container sees its own limits (cgroup v2)."""


def free_bytes(device_type: str | None = None) -> int:
    """Bytes that could still be taken on the GPU or the machine; None takes the GPU where there is one."""
    import torch  # for seconds: whoever starts up wants this module without it

    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        return torch.cuda.mem_get_info()[0]
    available = int(psutil.virtual_memory().available)
    room = _container_room()
    return available if room is None else min(available, room)


def _container_room() -> int | None:
    """Bytes left under the container's limit; None without one. Cached files give way, so they do not count."""
    try:
        limit = int((CGROUP / "memory.max").read_text())  # "max" is no limit
        used = int((CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, limit - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0)))
