"""Files and batches for their callers: the store, the contents and the worker together.

Every method takes the owner of the request, and finds only that owner's objects. Knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from math import inf
from pathlib import Path
from time import monotonic
from typing import BinaryIO

import orjson

from batchline.backends.base import Backend, models_by_name
from batchline.batch.file_threads import in_file_thread
from batchline.batch.history import History
from batchline.batch.journal import saved_results
from batchline.batch.lines import readable_custom_id
from batchline.batch.progress import Progress
from batchline.errors import BadRequest, BatchStateConflict, NotFound, PayloadTooLarge, StorageUnavailable
from batchline.jobs.batch_run import is_locked
from batchline.jobs.contents import ArrivingContent, new_id
from batchline.jobs.database import log_failure
from batchline.jobs.input_check import InputCheck, check_input
from batchline.jobs.options import JobsOptions
from batchline.jobs.state_folder import LEFTOVER_AGE_S, JobsState
from batchline.jobs.states import RUNNING, BatchStatus
from batchline.jobs.store import Order, check_pending
from batchline.jobs.tables import BatchRecord, FileRecord, PartRecord, UploadRecord
from batchline.jobs.validation import compressed
from batchline.jobs.webhooks import Webhooks
from batchline.jobs.worker import Worker
from batchline.openai_api.batches import (
    BatchWebhook,
    CompleteUploadRequest,
    CreateBatchRequest,
    CreateUploadRequest,
    ExpiresAfter,
    retry_filename,
    window_s,
)
from batchline.openai_api.endpoint_table import is_batch_url, path_here

logger = logging.getLogger(__name__)

CLEAN_UP_S = 60.0
LEFTOVERS_S = 6 * 3600.0
"""How often contents without records are looked for. That lists all contents."""

UPLOAD_LIFETIME_S = 3600
NOTHING_FAILED = ", because none of its requests failed"
BATCH_INPUT = "batch"


class Jobs:
    """The Files and Batches of one server."""

    def __init__(self, state: JobsState, backend: Backend, options: JobsOptions) -> None:
        """backend: already running."""
        self.max_file_bytes = options.max_file_bytes
        self._store = state.store
        self._contents = state.contents
        self._clock = state.clock
        self._webhooks = Webhooks(state.store, options, clock=state.clock)
        on_end = self._webhooks.notice
        self._worker = Worker(state.store, state.contents, state.runs, backend, options, on_end, state.clock)
        self._backend = backend
        self._options = options
        self._runs = state.runs
        self._leftovers_due_at = monotonic() + LEFTOVERS_S

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Run batches, send webhooks and remove expired files while the block runs."""
        async with self._webhooks.delivering(), self._worker.working():
            cleaning = asyncio.create_task(self._clean_up_for_ever())
            try:
                yield
            finally:
                cleaning.cancel()

    # Files

    def arriving_file(self) -> tuple[str, ArrivingContent]:
        """The id of a new file, and its content, which the caller opens, fills and closes."""
        file_id = new_id("file-")
        return file_id, self._contents.arriving(file_id)

    async def add_file(
        self,
        owner: str,
        file_id: str,
        content: ArrivingContent,
        *,
        filename: str,
        purpose: str,
        expires_after: int | None = None,
    ) -> FileRecord:
        """Store a file whose content has arrived. Raises: BadRequest for an empty or compressed batch file."""
        file = _new_file(owner, file_id, content, filename, purpose, int(self._clock()), expires_after)

        def store() -> None:
            content.store()
            with self._removed_on_error(content):
                self._store.add_file(file)

        await in_file_thread(store)
        return file

    @contextlib.contextmanager
    def _removed_on_error(self, content: ArrivingContent) -> Iterator[None]:
        """Remove a stored content if the block cannot store its record.

        While the database is away, nobody knows whether it has the record: then the regular clean-up looks later.
        """
        try:
            yield
        except StorageUnavailable:
            raise
        except BaseException:
            self._contents.remove(content.name)
            raise

    async def file(self, file_id: str, owner: str) -> FileRecord:
        """Raises: NotFound."""
        file = await asyncio.to_thread(self._store.file, file_id, owner)
        if file.expires_at is not None and file.expires_at <= self._clock():
            raise NotFound(f"No such file: {file_id[:100]!r}", param="id")
        return file

    async def files(
        self, owner: str, *, limit: int, order: Order, after: str | None, purpose: str | None
    ) -> Sequence[FileRecord]:
        """A page of files. Raises: NotFound."""
        return await asyncio.to_thread(
            self._store.list_files, owner, self._clock(), limit=limit, order=order, after=after, purpose=purpose
        )

    async def filenames(self, file_ids: Sequence[str], owner: str) -> dict[str, str]:
        """The names of those of the files that exist, by id."""
        return await asyncio.to_thread(self._store.filenames, file_ids, owner, self._clock())

    async def remove_file(self, file_id: str, owner: str) -> None:
        """Raises: NotFound, FileInUse."""
        await self.file(file_id, owner)

        def remove() -> None:
            file = self._store.remove_file(file_id, owner)
            if file.content is not None:
                self._contents.remove(file.content)

        await asyncio.to_thread(remove)  # all of it, even if the client disconnects

    def path_of(self, file: FileRecord) -> Path | None:
        """Where a file's bytes are on this machine; None if they are elsewhere, or a batch still writes them."""
        return None if file.content is None else self._contents.path(file.content)

    def open(self, file: FileRecord) -> BinaryIO:
        """A reader of a file that no batch is writing. Blocks. Raises: OSError, StorageUnavailable."""
        assert file.content is not None
        return self._contents.open(file.content)

    async def results_so_far(self, file: FileRecord, max_s: float = inf) -> Iterator[bytes]:
        """The result lines that a running batch has for one of its files, in the order in which they were done.

        max_s: how long they are read at most. If the batch ends meanwhile, it can be that there are none: read the
        file's record again.
        """
        batch = await asyncio.to_thread(self._store.batch_writing, file.id)
        if batch is None:
            return iter(())
        wants_failures = file.id == batch.error_file_id
        journal = self._runs / f"{batch.id}.{batch.fence}" / "journal"
        lines = _lines_in(journal, wants_failures=wants_failures, max_s=max_s)
        first = await in_file_thread(next, lines, None)  # now the journal is open, and stays readable
        return iter(()) if first is None else chain((first,), lines)

    # Uploads

    async def create_upload(self, request: CreateUploadRequest, owner: str) -> UploadRecord:
        """Begin a file that arrives in parts. Raises: PayloadTooLarge."""
        if request.bytes > self.max_file_bytes:
            raise file_too_large(self.max_file_bytes, "bytes")
        now = int(self._clock())
        expiry = request.expires_after
        upload = UploadRecord(
            id=new_id("upload_"),
            owner=owner,
            filename=request.filename,
            purpose=request.purpose,
            bytes=request.bytes,
            status="pending",
            created_at=now,
            expires_at=now + UPLOAD_LIFETIME_S,
            file_expires_after=None if expiry is None else expiry.seconds,
        )
        await asyncio.to_thread(self._store.add_upload, upload)
        return upload

    async def upload(self, upload_id: str, owner: str) -> UploadRecord:
        """Raises: NotFound."""
        return await asyncio.to_thread(self._store.upload, upload_id, owner)

    def arriving_part(self) -> tuple[str, ArrivingContent]:
        """The id of a new part, and its content, which the caller opens, fills and closes."""
        part_id = new_id("part_")
        return part_id, self._contents.arriving(part_id)

    async def add_part(self, upload_id: str, owner: str, part_id: str, content: ArrivingContent) -> PartRecord:
        """Store a part whose content has arrived. Raises: NotFound, Conflict, BadRequest."""
        now = self._clock()
        part = PartRecord(id=part_id, upload_id=upload_id, bytes=content.num_bytes, created_at=int(now))

        def store() -> None:
            content.store()
            with self._removed_on_error(content):
                self._store.add_part(part, owner, now)

        await in_file_thread(store)
        return part

    async def complete_upload(
        self, upload_id: str, owner: str, request: CompleteUploadRequest
    ) -> tuple[UploadRecord, FileRecord]:
        """Join the parts to the file. Raises: NotFound, Conflict, BadRequest."""
        # before its status: another request may complete it meanwhile
        parts = {part.id: part for part in await asyncio.to_thread(self._store.parts, upload_id)}
        upload = await self.upload(upload_id, owner)
        if upload.status == "pending":
            _check_parts(upload, parts, request.part_ids)
        file_id, content = self.arriving_file()
        now = int(self._clock())
        expiry = upload.file_expires_after
        file = FileRecord(
            id=file_id,
            owner=owner,
            filename=upload.filename,
            purpose=upload.purpose,
            bytes=upload.bytes,
            created_at=now,
            expires_at=None if expiry is None else now + expiry,
            content=content.name,
        )

        def complete() -> UploadRecord:
            try:
                if upload.status == "pending":
                    self._contents.join(request.part_ids, content, request.md5)
                    _check_format(upload.purpose, content)
            except BaseException as exc:
                content.discard()
                self._contents.remove(content.name)
                if isinstance(exc, FileNotFoundError):  # another request has completed it and removed the parts
                    check_pending(self._store.upload(upload_id, owner), now)
                raise
            with self._removed_on_error(content):
                finished, part_ids = self._store.finish_upload(upload_id, owner, now, file)
            for part_id in part_ids:
                self._contents.remove(part_id)
            return finished

        return await in_file_thread(complete), file

    async def cancel_upload(self, upload_id: str, owner: str) -> UploadRecord:
        """Raises: NotFound, Conflict."""

        def cancel() -> UploadRecord:
            cancelled, part_ids = self._store.finish_upload(upload_id, owner, self._clock(), None)
            for part_id in part_ids:
                self._contents.remove(part_id)
            return cancelled

        return await asyncio.to_thread(cancel)  # all of it, even if the client disconnects

    async def check_input(self, file_id: str, owner: str) -> InputCheck:
        """What a batch of a file would find in it. The check ends early if this is cancelled.

        Raises: NotFound, RunFailed, StorageUnavailable.
        """
        file = await self.file(file_id, owner)
        content = file.content
        if content is None:
            raise NotFound("A running batch still writes this file", param="id")
        served = models_by_name(await self._backend.models())
        endpoints = await self._endpoints()

        is_over = threading.Event()

        def check() -> InputCheck:
            with tempfile.TemporaryDirectory(prefix="batchline-") as folder:
                scratch = Path(folder)
                return check_input(
                    self._contents.fetch(content, scratch / "input"),
                    served,
                    endpoints,
                    scratch=scratch,
                    takes_many_models=self._options.takes_many_models,
                    max_requests=self._options.max_requests,
                    text=self._options.text,
                    should_stop=is_over.is_set,
                )

        try:
            return await in_file_thread(check)
        finally:
            is_over.set()

    # Batches

    async def create_batch(
        self,
        request: CreateBatchRequest,
        owner: str,
        *,
        key: str | None = None,
    ) -> BatchRecord:
        """Store a new batch, which a worker soon runs. key: the client's `Idempotency-Key`.

        Raises: BadRequest, Conflict.
        """
        batch = await self._new_batch(request, owner)
        digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
        stored = await asyncio.to_thread(self._store.add_batch, batch, key, digest)
        self._worker.notice()
        return stored

    async def _new_batch(self, request: CreateBatchRequest, owner: str, *, retry_of: str | None = None) -> BatchRecord:
        """The record of a batch that is not stored yet. Raises: BadRequest."""
        endpoint, _ = path_here(request.endpoint)
        served = await self._endpoints()
        if endpoint not in served:
            raise BadRequest(
                f"Invalid value: {request.endpoint[:100]!r}. Supported values are: {', '.join(sorted(served))}",
                param="endpoint",
                code="invalid_value",
            )
        if request.webhook is not None:
            self._webhooks.check(request.webhook)
        window = window_s(request.completion_window)
        assert window is not None  # the schema has checked it
        expiry = request.output_expires_after
        now = int(self._clock())
        return BatchRecord(
            id=new_id("batch_"),
            owner=owner,
            status="validating",
            endpoint=endpoint,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            metadata=request.metadata,
            output_expires_after=None if expiry is None else expiry.seconds,
            created_at=now,
            expires_at=now + window,
            retry_of=retry_of,
            webhook=None if request.webhook is None else request.webhook.model_dump(),
        )

    async def retry_batch(self, batch_id: str, owner: str, *, key: str | None = None) -> BatchRecord:
        """A new batch with the requests that have failed or were not run. key: the client's `Idempotency-Key`.

        Raises: NotFound, Conflict.
        """
        digest = hashlib.sha256(f"retry {batch_id}".encode()).hexdigest()
        if key is not None:
            first = await asyncio.to_thread(self._store.batch_of_key, key, owner, digest)
            if first is not None:
                return first
        batch = await self.batch(batch_id, owner)
        if batch.status in RUNNING or batch.error_file_id is None:
            raise BatchStateConflict(batch_id, batch.status, "retry", "" if batch.status in RUNNING else NOTHING_FAILED)
        source, errors = await self.file(batch.input_file_id, owner), await self.file(batch.error_file_id, owner)
        file_id, content = self.arriving_file()
        retry = await self._new_batch(_retry_request(batch, file_id), owner, retry_of=batch_id)

        def store() -> BatchRecord:
            self._write_failed_lines(source, errors, content)
            file = _new_file(owner, file_id, content, retry_filename(source.filename), BATCH_INPUT, int(self._clock()))
            content.store()
            with self._removed_on_error(content):
                stored = self._store.add_batch(retry, key, digest, new_input=file)
            if stored.id != retry.id:  # another request with the key was faster
                self._contents.remove(content.name)
            return stored

        try:
            stored = await in_file_thread(store)
        finally:
            await asyncio.to_thread(content.discard)
        self._worker.notice()
        return stored

    def _write_failed_lines(self, source: FileRecord, errors: FileRecord, content: ArrivingContent) -> None:
        """Copy the lines of a batch's input that are in its error file. Raises: OSError, StorageUnavailable."""
        with self.open(errors) as file:
            failed = {parse_result(line) for line in file}
        content.open()
        with self.open(source) as file:
            for line in file:
                if not line.isspace() and readable_custom_id(line) in failed:
                    content.write(line if line.endswith(b"\n") else line + b"\n")
        content.close()

    async def batch(self, batch_id: str, owner: str) -> BatchRecord:
        """Raises: NotFound."""
        return await asyncio.to_thread(self._store.batch, batch_id, owner)

    async def batches(
        self,
        owner: str,
        *,
        limit: int,
        order: Order,
        after: str | None,
        statuses: Collection[BatchStatus] | None = None,
    ) -> Sequence[BatchRecord]:
        """A page of batches. statuses: those to list; None lists all. Raises: NotFound."""
        return await asyncio.to_thread(
            self._store.list_batches, owner, limit=limit, order=order, after=after, statuses=statuses
        )

    async def cancel_batch(self, batch_id: str, owner: str) -> BatchRecord:
        """Raises: NotFound, BatchStateConflict."""
        batch = await asyncio.to_thread(self._store.cancel, batch_id, owner, self._clock())
        self._worker.cancel(batch_id)
        self._worker.notice()
        return batch

    def progress_of(self, batch: BatchRecord) -> Progress | None:
        """How far a batch is that runs in this process."""
        run = self._worker.batch(batch.id)
        return None if run is None else run.progress

    def history_of(self, batch: BatchRecord) -> History | None:
        """How fast a batch went that runs in this process, or ended in it not long ago."""
        return self._worker.history(batch.id)

    async def failed_results(self, batch: BatchRecord, max_s: float) -> Iterator[bytes]:
        """The result lines of the requests of a batch that have failed so far. Read by a thread.

        max_s: how long they are looked for in a running batch. Raises: NotFound.
        """
        if batch.error_file_id is None:
            return iter(())
        file = await self.file(batch.error_file_id, batch.owner)
        if file.content is None:
            lines = await self.results_so_far(file, max_s)
            file = await self.file(file.id, batch.owner)
        return lines if file.content is None else self._lines_of(file)

    def _lines_of(self, file: FileRecord) -> Iterator[bytes]:
        with self.open(file) as lines:
            yield from lines

    async def _endpoints(self) -> set[str]:
        """Those that a batch may have."""
        return {path for model in await self._backend.models() for path in model.endpoints if is_batch_url(path)}

    async def _clean_up_for_ever(self) -> None:
        """Remove files that have expired."""
        while True:
            try:
                await in_file_thread(self._clean_up)
            except Exception:  # the database may be away for a while
                log_failure(logger, "expired files cannot be removed; trying again")
            await asyncio.sleep(CLEAN_UP_S)

    def _clean_up(self) -> None:
        """Raises: OSError, StorageUnavailable."""
        for file in self._store.remove_expired_files(self._clock()):
            if file.content is not None:
                self._contents.remove(file.content)
        for part in self._store.expire_uploads(self._clock()):
            self._contents.remove(part.id)
        self._remove_old_runs()
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove contents whose records could not be stored. Rarely, because all of them are listed for that.

        Raises: OSError, StorageUnavailable.
        """
        if monotonic() >= self._leftovers_due_at:
            self._leftovers_due_at = monotonic() + LEFTOVERS_S
            self._contents.remove_leftovers(lambda: set(self._store.contents()), LEFTOVER_AGE_S)

    def _remove_old_runs(self) -> None:
        """Remove what is left of batches that are over, because their worker was killed or lost its lease."""
        paths = {path: path.name.partition(".")[0] for path in self._runs.iterdir()}
        over = self._store.batches_over(list(set(paths.values())))
        for path, batch_id in paths.items():
            if batch_id not in over or self._worker.batch(batch_id) is not None or is_locked(path):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _new_file(
    owner: str,
    file_id: str,
    content: ArrivingContent,
    filename: str,
    purpose: str,
    now: int,
    expires_after: int | None = None,
) -> FileRecord:
    """The record of a file whose content has arrived. Raises: BadRequest for an empty or compressed batch file."""
    _check_format(purpose, content)
    return FileRecord(
        id=file_id,
        owner=owner,
        filename=filename,
        purpose=purpose,
        bytes=content.num_bytes,
        created_at=now,
        expires_at=None if expires_after is None else now + expires_after,
        content=content.name,
    )


def _check_format(purpose: str, content: ArrivingContent) -> None:
    """Raises: BadRequest for an empty or compressed batch file."""
    if purpose != BATCH_INPUT:
        return
    message = compressed(content.start)
    if not content.num_bytes:
        message = "Invalid file format for Batch API. Must be .jsonl"
    if message is not None:
        raise BadRequest(message, param="file", code="invalid_file_format")


def _retry_request(batch: BatchRecord, input_file_id: str) -> CreateBatchRequest:
    """What made a batch, for another input file."""
    expiry = batch.output_expires_after
    return CreateBatchRequest(
        input_file_id=input_file_id,
        endpoint=batch.endpoint,
        completion_window=batch.completion_window,
        metadata=None if batch.metadata is None else dict(batch.metadata),
        output_expires_after=None if expiry is None else ExpiresAfter(anchor="created_at", seconds=expiry),
        webhook=None if batch.webhook is None else BatchWebhook(**batch.webhook),
    )


def _check_parts(upload: UploadRecord, parts: Mapping[str, PartRecord], wanted: Sequence[str]) -> None:
    """Raises: BadRequest."""
    unknown = next((part_id for part_id in wanted if part_id not in parts), None)
    if unknown is not None:
        raise BadRequest(f"part_ids: the upload has no part {unknown[:100]!r}", param="part_ids")
    if len(set(wanted)) < len(wanted):
        raise BadRequest("part_ids: a part is listed twice", param="part_ids")
    num_bytes = sum(parts[part_id].bytes for part_id in wanted)
    if num_bytes != upload.bytes:
        message = f"The parts have {num_bytes:,} bytes, and the upload was announced with {upload.bytes:,}"
        raise BadRequest(message, param="part_ids")


def file_too_large(max_bytes: int, param: str) -> PayloadTooLarge:
    """The error of a file over the limit."""
    return PayloadTooLarge(f"The file is larger than {max_bytes:,} bytes (--max-file-size)", param=param)


def parse_result(line: bytes) -> str | None:
    """The `custom_id` of a result line."""
    custom_id: str | None = orjson.loads(line)["custom_id"]
    return custom_id


def _lines_in(journal: Path, *, wants_failures: bool, max_s: float) -> Iterator[bytes]:
    """Each position's first result, if it is of the wanted kind."""
    seen = bytearray()  # by position; a set would take fifty times the memory
    deadline = monotonic() + max_s
    with contextlib.suppress(FileNotFoundError):
        for outcome, line in saved_results(journal):
            if monotonic() > deadline:
                return
            if outcome.position >= len(seen):
                seen.extend(bytes(2 * outcome.position + 1024 - len(seen)))
            if not seen[outcome.position]:
                seen[outcome.position] = 1
                if outcome.is_failure == wants_failures:
                    yield line + b"\n"
