"""Requests about files and batches that meet each other, or the end of a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchline.backends.base import running
from batchline.errors import Conflict, StorageUnavailable
from batchline.jobs.options import JobsOptions
from batchline.jobs.service import Jobs
from batchline.jobs.state_folder import JobsState, state_in
from batchline.jobs.tables import PartRecord
from batchline.openai_api.batches import CompleteUploadRequest, CreateUploadRequest
from batchline.testing import FakeBackend

CONTENT = b"12345"


@pytest.fixture
def options(tmp_path: Path) -> JobsOptions:
    return JobsOptions(state_dir=tmp_path / "state")


@pytest.fixture
def state(options: JobsOptions) -> Iterator[JobsState]:
    with state_in(options) as opened:
        yield opened


async def begin_upload(jobs: Jobs) -> tuple[str, CompleteUploadRequest]:
    """The id of an upload with its only part, and the request that completes it."""
    request = CreateUploadRequest(filename="in", purpose="batch", bytes=len(CONTENT), mime_type="text/jsonl")
    upload = await jobs.create_upload(request, "me")
    return upload.id, CompleteUploadRequest(part_ids=[(await add_part(jobs, upload.id)).id])


async def add_part(jobs: Jobs, upload_id: str, data: bytes = CONTENT) -> PartRecord:
    part_id, content = jobs.arriving_part()
    content.open()
    content.write(data)
    content.close()
    return await jobs.add_part(upload_id, "me", part_id, content)


def stored(state: JobsState) -> list[str]:
    return [name for name, _ in state.contents.stored() if name.startswith(("file-", "part_"))]


async def test_an_upload_that_is_completed_twice_at_once_has_one_file(
    state: JobsState, options: JobsOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the second request no longer found the parts, and got a 500."""
    async with running(FakeBackend()) as backend:
        jobs = Jobs(state, backend, options)
        upload_id, request = await begin_upload(jobs)
        loop, join = asyncio.get_running_loop(), state.contents.join
        files: list[str] = []

        def overtaken(*arguments: Any) -> None:
            monkeypatch.setattr(state.contents, "join", join)
            first = asyncio.run_coroutine_threadsafe(jobs.complete_upload(upload_id, "me", request), loop)
            files.append(first.result(30)[1].id)
            join(*arguments)

        monkeypatch.setattr(state.contents, "join", overtaken)
        with pytest.raises(Conflict, match="completed"):
            await jobs.complete_upload(upload_id, "me", request)
    assert stored(state) == files
    assert (await jobs.upload(upload_id, "me")).file_id == files[0]


async def test_a_part_that_comes_while_its_upload_is_completed_is_removed(
    state: JobsState, options: JobsOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: its record went with the upload, and its content stayed until a restart."""
    async with running(FakeBackend()) as backend:
        jobs = Jobs(state, backend, options)
        upload_id, request = await begin_upload(jobs)
        loop, join = asyncio.get_running_loop(), state.contents.join

        def late(*arguments: Any) -> None:
            asyncio.run_coroutine_threadsafe(add_part(jobs, upload_id, b""), loop).result(30)
            join(*arguments)

        monkeypatch.setattr(state.contents, "join", late)
        _, file = await jobs.complete_upload(upload_id, "me", request)
    assert stored(state) == [file.id]


@pytest.mark.parametrize(("error", "stays"), [(RuntimeError("no"), False), (StorageUnavailable("away"), True)])
async def test_the_content_of_an_upload_whose_record_is_refused_is_removed(
    state: JobsState, options: JobsOptions, monkeypatch: pytest.MonkeyPatch, error: Exception, stays: bool
) -> None:
    """Bug: it was removed, too, while the database was away, which may have stored the record after all."""

    def refuse(*_arguments: object) -> None:
        raise error

    async with running(FakeBackend()) as backend:
        jobs = Jobs(state, backend, options)
        upload_id, request = await begin_upload(jobs)
        monkeypatch.setattr(state.store, "finish_upload", refuse)
        with pytest.raises(type(error)):
            await jobs.complete_upload(upload_id, "me", request)
    assert any(name.startswith("file-") for name in stored(state)) == stays
