"""How much memory counts as free."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from batchline.engine import memory

MIB = 1024**2


def container(folder: Path, limit: str, current: int, cached: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 0\n")
    return folder


def test_a_containers_limit_counts_and_its_cached_files_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", container(tmp_path, str(100 * MIB), 80 * MIB, 30 * MIB))
    assert memory.free_bytes("cpu") == 50 * MIB


@pytest.mark.parametrize("limit", ["max", str(2**60)])
def test_without_a_smaller_limit_the_machines_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(memory, "CGROUP", container(tmp_path, limit, MIB, 0))
    assert MIB < memory.free_bytes("cpu") <= psutil.virtual_memory().total


def test_a_container_that_is_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", container(tmp_path, str(MIB), 2 * MIB, 0))
    assert memory.free_bytes("cpu") == 0
