"""Which servers may use a state folder, a database and the contents of files together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchline.errors import UsageError
from batchline.jobs.options import JobsOptions
from batchline.jobs.state_folder import LEFTOVER_AGE_S, state_in

NAME = "file-" + "0" * 32


def options(folder: Path, **values: Any) -> JobsOptions:
    return JobsOptions(state_dir=folder, **values)


def test_a_folder_with_sqlite_belongs_to_one_server(tmp_path: Path, database: str) -> None:
    with state_in(options(tmp_path)):
        for other in (options(tmp_path), options(tmp_path, state_url=database)):
            with pytest.raises(UsageError, match=f"Another server .process {os.getpid()}. uses the state folder"):
                state_in(other).__enter__()


def test_sqlite_is_refused_as_a_shared_database(tmp_path: Path) -> None:
    """Bug: the folder was not locked then, so two servers with one SQLite file ended each other's leases."""
    path = tmp_path / "shared.db"
    with pytest.raises(UsageError, match=r"--state-url: only postgresql:// is supported. .* --state-dir"):
        state_in(options(tmp_path / "state", state_url=f"sqlite:///{path}")).__enter__()
    assert not path.exists()


def test_servers_with_one_postgresql_may_share_the_folder(tmp_path: Path, database: str) -> None:
    with state_in(options(tmp_path, state_url=database)) as one, state_in(options(tmp_path, state_url=database)) as two:
        assert (one.runs, one.contents.display) == (two.runs, two.contents.display)
        with pytest.raises(UsageError, match="Another server"):
            state_in(options(tmp_path)).__enter__()


def test_servers_with_one_postgresql_must_share_the_files(tmp_path: Path, database: str) -> None:
    """Bug: a server on another machine took batches over, and failed them because it did not find their input."""
    with state_in(options(tmp_path / "one", state_url=database)):
        with pytest.raises(UsageError, match="All servers that share a database must share the files"):
            state_in(options(tmp_path / "two", state_url=database)).__enter__()
        contents = str(tmp_path / "one/files")
        with state_in(options(tmp_path / "two", state_url=database, contents_url=contents)) as two:
            assert two.contents.display == contents


def test_files_of_another_database_are_refused_and_kept(
    tmp_path: Path, database: str, new_database: Callable[[], str]
) -> None:
    """Bug: they had no records in this database, so they were removed."""
    with state_in(options(tmp_path)) as state:
        content = state.contents.path(NAME)
        assert content is not None
        content.write_bytes(b"x")
    for _ in range(2):
        with pytest.raises(UsageError, match="belong to another database"):
            state_in(options(tmp_path, state_url=database)).__enter__()
    assert content.exists()


def test_what_a_crash_left_behind_is_removed_when_a_server_starts(tmp_path: Path) -> None:
    with state_in(options(tmp_path)) as state:
        arriving = state.contents.arriving(NAME)
        arriving.open()
    paths = [tmp_path / "files" / NAME, tmp_path / "files" / "notes.txt"]
    for path in paths:
        path.write_bytes(b"x")
    with state_in(options(tmp_path)):
        assert [path.exists() for path in paths] == [False, True], "only files with names of ours are removed"
        assert list((tmp_path / "files/arriving").iterdir()) == []
    arriving.discard()


def test_what_another_server_may_be_storing_stays(tmp_path: Path, database: str) -> None:
    shared = options(tmp_path, state_url=database)
    with state_in(shared) as state:
        arriving = state.contents.arriving(NAME)
        arriving.open()
        old, young = tmp_path / "files" / NAME, tmp_path / "files" / f"{NAME}.7"
        for path in (old, young):
            path.write_bytes(b"x")
        os.utime(old, times=(0, old.stat().st_mtime - LEFTOVER_AGE_S - 1))
        with state_in(shared):
            assert [old.exists(), young.exists()] == [False, True]
        arriving.close()
        arriving.store()
        assert state.contents.exists(NAME)


def test_a_place_for_files_that_is_no_folder_and_no_file_system_is_refused(tmp_path: Path) -> None:
    for url, said in [
        ("https://host/folder", "give a folder, or a URL such as s3://bucket/folder"),
        ("nosuch://host/folder", "Cannot use 'nosuch://host/folder': Protocol not known"),
    ]:
        with pytest.raises(UsageError, match=said):
            state_in(options(tmp_path, contents_url=url)).__enter__()
