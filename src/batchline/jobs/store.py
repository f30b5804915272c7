"""The records of files and batches in a database (`database.py`).

Every change of a batch's state is one guarded update, see `states.py`. Whatever a worker writes also holds its fence,
so a worker that has lost its lease changes nothing. A change that depends on what it has read first holds a row
(`_hold`), because other threads and servers change the same rows. All methods block; the event loop calls them on
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, fields
from time import time
from typing import Any, Literal

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    RowMapping,
    Table,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from batchline.errors import BadRequest, BatchStateConflict, Conflict, FileInUse, LeaseLost, NotFound
from batchline.jobs.contents import new_id
from batchline.jobs.database import is_shared, open_database, time_of
from batchline.jobs.line import Entry
from batchline.jobs.states import RUNNING, BatchStatus, sources_of
from batchline.jobs.tables import (
    BatchRecord,
    DueWebhook,
    FileRecord,
    PartRecord,
    UploadRecord,
    UploadStatus,
    WebhookRecord,
    batches,
    facts,
    files,
    idempotency,
    responses,
    upload_parts,
    uploads,
    webhooks,
)

Order = Literal["asc", "desc"]

KEY_LIFETIME_S = 30 * 24 * 3600
"""How long an idempotency key is known."""

LONGEST_RETRY_S = 300.0
"""How long a batch waits at most for its next try. A longer wait means that the clock was set back."""

LONGEST_WEBHOOK_WAIT_S = 5 * 3600.0
"""The same for a webhook."""

LONGEST_LEASE_S = 600.0
"""The same for a lease: no worker takes a longer one."""


class Store:
    """Files and batches of all owners. An owner never learns of another one's objects."""

    def __init__(self, url: str, clock: Callable[[], float] = time) -> None:
        """url: see `open_database`. clock: this server's time. Creates or updates the tables. Raises: StoreUnusable."""
        self._engine = open_database(url)
        self._clock = clock

    @property
    def is_shared(self) -> bool:
        """Whether other servers may use the store at the same time."""
        return is_shared(self._engine)

    @property
    def database(self) -> Engine:
        """For what other modules keep there."""
        return self._engine

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def now(self) -> float:
        """The time by which leases are measured: that of the database."""
        return time_of(self._engine, self._clock)

    def first_value(self, name: str, value: str, on_first: Callable[[], None] = lambda: None) -> str:
        """The value that a fact got first. on_first: called in the first process, before another one learns the value.

        Raises: what `on_first` does; the fact then has no value yet.
        """
        try:
            with self._engine.begin() as connection:
                connection.execute(insert(facts).values(name=name, value=value))
                on_first()
                return value
        except IntegrityError:
            with self._engine.connect() as connection:
                return str(connection.scalar(select(facts.c.value).where(facts.c.name == name)))

    # Files

    def add_file(self, file: FileRecord) -> None:
        """Store a new file's record."""
        with self._engine.begin() as connection:
            connection.execute(insert(files).values(asdict(file)))

    def file(self, file_id: str, owner: str) -> FileRecord:
        """Raises: NotFound."""
        with self._engine.connect() as connection:
            return _file_of(_row(connection, files, file_id, owner, "file"))

    def list_files(
        self,
        owner: str,
        now: float,
        *,
        limit: int,
        order: Order,
        after: str | None = None,
        purpose: str | None = None,
    ) -> list[FileRecord]:
        """A page of an owner's files that have not expired. Raises: NotFound for an unknown `after`."""
        filters = [_is_kept(now)] if purpose is None else [_is_kept(now), files.c.purpose == purpose]
        return [_file_of(row) for row in self._page(files, owner, limit, order, after, "file", filters)]

    def filenames(self, file_ids: Sequence[str], owner: str, now: float) -> dict[str, str]:
        """The names of those of the files that exist and have not expired, by id."""
        columns = (files.c.id, files.c.owner, files.c.filename, files.c.expires_at)
        with self._engine.connect() as connection:  # SQLite would read all of the owner's files if it knew the owner
            found = connection.execute(select(*columns).where(files.c.id.in_(file_ids))).all()
        own = (row for row in found if row.owner == owner)
        return {row.id: row.filename for row in own if row.expires_at is None or row.expires_at > now}

    def remove_file(self, file_id: str, owner: str) -> FileRecord:
        """Remove a file's record. Raises: NotFound; FileInUse if a batch that is not over reads or writes it."""
        with self._engine.begin() as connection:
            _hold(connection, files, file_id)
            file = _file_of(_row(connection, files, file_id, owner, "file"))
            uses = or_(
                batches.c.input_file_id == file_id,
                batches.c.output_file_id == file_id,
                batches.c.error_file_id == file_id,
            )
            user = connection.scalar(select(batches.c.id).where(uses, batches.c.status.in_(RUNNING)).limit(1))
            if user is not None:
                raise FileInUse(file_id, user)
            connection.execute(delete(files).where(files.c.id == file_id))
            return file

    def remove_expired_files(self, now: float) -> list[FileRecord]:
        """Remove the records of files that have expired, except those of batches that are not over."""
        with self._engine.begin() as connection:
            used = [
                select(column).where(batches.c.status.in_(RUNNING), column.is_not(None))
                for column in (batches.c.input_file_id, batches.c.output_file_id, batches.c.error_file_id)
            ]
            is_over = [files.c.expires_at <= now, *(files.c.id.not_in(ids) for ids in used)]
            removed = connection.execute(delete(files).where(*is_over).returning(files))
            return [_file_of(row) for row in removed.mappings()]

    def contents(self) -> list[str]:
        """The names of all stored contents."""
        with self._engine.connect() as connection:
            of_files = connection.scalars(select(files.c.content).where(files.c.content.is_not(None)))
            return [*of_files, *connection.scalars(select(upload_parts.c.id))]

    # Batches

    def add_batch(
        self, batch: BatchRecord, key: str | None = None, request: str = "", new_input: FileRecord | None = None
    ) -> BatchRecord:
        """Store a new batch. key: the client's; the same request with it again gets the batch of the first one.

        request: a digest of the request. new_input: the batch's input file, if it is stored together with the batch.
        Raises: Conflict for another request with the same key.
        """
        try:
            with self._engine.begin() as connection:
                if new_input is not None:
                    connection.execute(insert(files).values(asdict(new_input)))
                if key is not None:
                    row = {"owner": batch.owner, "key": key, "request": request, "batch_id": batch.id}
                    connection.execute(insert(idempotency).values(**row, created_at=batch.created_at))
                _hold(connection, files, batch.input_file_id)
                connection.execute(insert(batches).values(asdict(batch)))
                return batch
        except IntegrityError:
            first = None if key is None else self.batch_of_key(key, batch.owner, request)
            if first is None:
                raise
            return first

    def batch_of_key(self, key: str, owner: str, request: str) -> BatchRecord | None:
        """The batch of the first request with a key; None if there was none. request: as in `add_batch`.

        Raises: Conflict for another request with the same key.
        """
        with self._engine.connect() as connection:
            first = select(idempotency).where(idempotency.c.owner == owner, idempotency.c.key == key)
            found = connection.execute(first).mappings().first()
        if found is None:
            return None
        if found["request"] != request:
            raise Conflict("The Idempotency-Key was used for another request", code="idempotency_key_reused")
        return self.batch(found["batch_id"], owner)

    def batch(self, batch_id: str, owner: str) -> BatchRecord:
        """Raises: NotFound."""
        with self._engine.connect() as connection:
            return _batch_of(_row(connection, batches, batch_id, owner, "batch"))

    def list_batches(
        self,
        owner: str,
        *,
        limit: int,
        order: Order,
        after: str | None = None,
        statuses: Collection[BatchStatus] | None = None,
    ) -> list[BatchRecord]:
        """A page of an owner's batches. statuses: those to list; None lists all. Raises: NotFound for an unknown
        `after`."""
        filters = [] if statuses is None else [batches.c.status.in_(statuses)]
        return [_batch_of(row) for row in self._page(batches, owner, limit, order, after, "batch", filters)]

    def batches_over(self, batch_ids: Sequence[str]) -> set[str]:
        """Those of the batches that are over."""
        query = select(batches.c.id).where(batches.c.id.in_(batch_ids), batches.c.status.not_in(RUNNING))
        with self._engine.connect() as connection:
            return set(connection.scalars(query))

    def batch_writing(self, file_id: str) -> BatchRecord | None:
        """The batch whose results a file gets; None if no batch writes it."""
        writes = or_(batches.c.output_file_id == file_id, batches.c.error_file_id == file_id)
        with self._engine.connect() as connection:
            row = connection.execute(select(batches).where(writes)).mappings().first()
            return None if row is None else _batch_of(row)

    def cancel(self, batch_id: str, owner: str, now: float) -> BatchRecord:
        """Ask for the end of a batch. One that is being cancelled or was cancelled stays as it is.

        Raises: NotFound, BatchStateConflict.
        """
        with self._engine.begin() as connection:
            _row(connection, batches, batch_id, owner, "batch")
            _change(connection, batch_id, "cancelling", now, {"retry_at": 0.0})
            batch = _batch_of(_row(connection, batches, batch_id, owner, "batch"))
        if batch.status not in ("cancelling", "cancelled"):
            raise BatchStateConflict(batch_id, batch.status, "cancel")
        return batch

    # Uploads

    def add_upload(self, upload: UploadRecord) -> None:
        """Store a new upload."""
        with self._engine.begin() as connection:
            connection.execute(insert(uploads).values(asdict(upload)))

    def upload(self, upload_id: str, owner: str) -> UploadRecord:
        """Raises: NotFound."""
        with self._engine.connect() as connection:
            return _upload_of(_row(connection, uploads, upload_id, owner, "upload"))

    def parts(self, upload_id: str) -> list[PartRecord]:
        """The parts of an upload, as they came."""
        query = select(upload_parts).where(upload_parts.c.upload_id == upload_id).order_by(upload_parts.c.number)
        with self._engine.connect() as connection:
            return [PartRecord(**_without_number(row)) for row in connection.execute(query).mappings()]

    def add_part(self, part: PartRecord, owner: str, now: float) -> None:
        """Raises: NotFound; Conflict if the upload takes no more parts, BadRequest if it would become too large."""
        with self._engine.begin() as connection:
            _hold(connection, uploads, part.upload_id)
            upload = _upload_of(_row(connection, uploads, part.upload_id, owner, "upload"))
            check_pending(upload, now)
            total = select(func.coalesce(func.sum(upload_parts.c.bytes), 0)).where(
                upload_parts.c.upload_id == part.upload_id
            )
            if (connection.scalar(total) or 0) + part.bytes > upload.bytes:
                raise BadRequest(f"The parts have more than the announced {upload.bytes:,} bytes", param="data")
            connection.execute(insert(upload_parts).values(asdict(part)))

    def finish_upload(
        self, upload_id: str, owner: str, now: float, file: FileRecord | None
    ) -> tuple[UploadRecord, list[str]]:
        """Complete an upload with its file, or cancel it (None). Raises: NotFound, Conflict.

        Returns the ids of its parts too, which are no longer needed.
        """
        status: UploadStatus = "cancelled" if file is None else "completed"
        with self._engine.begin() as connection:
            _hold(connection, uploads, upload_id)
            check_pending(_upload_of(_row(connection, uploads, upload_id, owner, "upload")), now)
            change = update(uploads).where(uploads.c.id == upload_id)
            connection.execute(change.values(status=status, file_id=None if file is None else file.id))
            if file is not None:
                connection.execute(insert(files).values(asdict(file)))
            parts = delete(upload_parts).where(upload_parts.c.upload_id == upload_id).returning(upload_parts.c.id)
            part_ids = list(connection.scalars(parts))
            return _upload_of(_row(connection, uploads, upload_id, owner, "upload")), part_ids

    def expire_uploads(self, now: float) -> list[PartRecord]:
        """End the uploads that were not completed in time. Returns their parts, which are no longer needed."""
        with self._engine.begin() as connection:
            late = update(uploads).where(uploads.c.status == "pending", uploads.c.expires_at <= now)
            ids = list(connection.scalars(late.values(status="expired").returning(uploads.c.id)))
            of_late = delete(upload_parts).where(upload_parts.c.upload_id.in_(ids)).returning(upload_parts)
            found = [PartRecord(**_without_number(row)) for row in connection.execute(of_late).mappings()]
            old = idempotency.c.created_at <= now - KEY_LIFETIME_S
            connection.execute(delete(idempotency).where(old))
            return found

    # What workers do

    def claimable(self, now: float, per_owner: int = 1000) -> list[BatchRecord]:
        """The batches that no worker holds, and that may be tried now, the oldest first.

        per_owner: at most so many of its oldest ones, of those whose windows end first, of those that are being
        cancelled, and of those that are not checked yet.
        """
        may_try = _is_due(batches.c.retry_at, now, LONGEST_RETRY_S)
        is_free = [batches.c.status.in_(RUNNING), _is_due(batches.c.lease_ends_at, now, LONGEST_LEASE_S), may_try]
        number, status = batches.c.number, batches.c.status
        orders: tuple[tuple[Any, ...], ...] = (
            (number,),
            (batches.c.expires_at, number),
            (status != "cancelling", number),
            (status != "validating", number),
        )
        places = [func.row_number().over(partition_by=batches.c.owner, order_by=order) for order in orders]
        free = select(batches.c.number, *(place.label(f"place_{n}") for n, place in enumerate(places)))
        found = free.where(*is_free).subquery()
        first = or_(*(found.c[f"place_{n}"] <= per_owner for n in range(len(places))))
        query = select(batches).where(batches.c.number.in_(select(found.c.number).where(first)))
        with self._engine.connect() as connection:
            return [_batch_of(row) for row in connection.execute(query.order_by(batches.c.number)).mappings()]

    def line(self) -> list[Entry]:
        """All batches that are not over."""
        columns = [batches.c[field.name] for field in fields(Entry)]
        with self._engine.connect() as connection:
            rows = connection.execute(select(*columns).where(batches.c.status.in_(RUNNING)))
            return [Entry(**row) for row in rows.mappings()]

    def claim(self, batch: BatchRecord, worker: str, now: float, lease_ends_at: float) -> BatchRecord | None:
        """Take a batch from `claimable`; None if another worker was faster."""
        change = (
            update(batches)
            .where(batches.c.id == batch.id, batches.c.fence == batch.fence, batches.c.status.in_(RUNNING))
            .where(_is_due(batches.c.lease_ends_at, now, LONGEST_LEASE_S))
            .values(worker=worker, fence=batch.fence + 1, lease_ends_at=lease_ends_at)
        )
        with self._engine.begin() as connection:
            if connection.execute(change).rowcount != 1:
                return None
            return _batch_of(_row(connection, batches, batch.id, batch.owner, "batch"))

    def renew(self, batch: BatchRecord, lease_ends_at: float) -> BatchRecord:
        """Keep a batch for longer, and learn its state. Raises: LeaseLost."""
        return self._write(batch, {"lease_ends_at": lease_ends_at})

    def release(self, batch: BatchRecord, retry_at: float = 0.0) -> None:
        """Give a batch back. retry_at: when a worker may take it again. Raises: LeaseLost."""
        self._write(batch, {"worker": None, "lease_ends_at": 0.0, "retry_at": retry_at})

    def release_all(self) -> None:
        """End every lease. Only for the process that is the only one to use the store, when it starts."""
        with self._engine.begin() as connection:
            connection.execute(update(batches).values(worker=None, lease_ends_at=0.0, retry_at=0.0))
            lost = update(responses).where(responses.c.running_until.is_not(None))
            connection.execute(lost.values(running_until=0.0))

    def count(self, batch: BatchRecord, counts: Mapping[str, Any]) -> None:
        """Store how far a batch is, unless it is further already: its last counts may have come meanwhile.

        Raises: LeaseLost.
        """
        num_done = counts["completed"] + counts["failed"]
        with self._engine.begin() as connection:
            _hold(connection, batches, batch.id)
            found = select(batches.c.completed + batches.c.failed).where(*_held(batch))
            num_stored = connection.scalar(found)
            if num_stored is None:
                raise LeaseLost(batch.id)
            if num_stored <= num_done:
                connection.execute(update(batches).where(*_held(batch)).values(**counts))

    def refuse(
        self,
        batch: BatchRecord,
        now: float,
        errors: Sequence[Mapping[str, Any]],
        num_errors: int,
        total: int = 0,
        *,
        tells_operator: bool = False,
    ) -> BatchRecord:
        """The input file is not valid: the batch has failed, or is cancelled if somebody asked for that meanwhile.

        tells_operator: whether the operator's webhook reports it. Raises: LeaseLost.
        """
        values: dict[str, Any] = {
            "errors": list(errors),
            "num_errors": num_errors,
            "worker": None,
            "lease_ends_at": 0.0,
        }
        if total:  # else it is not known, or was counted before the file was damaged
            values["total"] = total
        with self._engine.begin() as connection:
            status: BatchStatus = "failed"
            if not _change(connection, batch.id, status, now, values, fence=batch.fence):
                status = "cancelled"
                if not _change(connection, batch.id, status, now, values, fence=batch.fence):
                    raise LeaseLost(batch.id)
            for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
                connection.execute(delete(files).where(files.c.id == file_id))
            nothing_written = {"output_file_id": None, "error_file_id": None}
            connection.execute(update(batches).where(batches.c.id == batch.id).values(nothing_written))
            return _ended(connection, batch, now, tells_operator=tells_operator)

    def begin(
        self,
        batch: BatchRecord,
        now: float,
        *,
        total: int,
        model: str | None,
        results: Sequence[FileRecord],
        estimate: Mapping[str, Any] | None = None,
    ) -> BatchRecord:
        """The input file is valid: the requests run from now on. results: the records of the output and the error file.
        estimate: values of the columns about it.

        Changes only the numbers of a batch that is being cancelled. Raises: LeaseLost.
        """
        output, errors = results
        values = {"total": total, "model": model, "output_file_id": output.id, "error_file_id": errors.id}
        values |= estimate or {}
        with self._engine.begin() as connection:
            if not _change(connection, batch.id, "in_progress", now, {}, fence=batch.fence):
                status = connection.scalar(select(batches.c.status).where(*_held(batch)))
                if status != "cancelling":
                    raise LeaseLost(batch.id)
            if connection.execute(update(batches).where(*_held(batch)).values(values)).rowcount != 1:
                raise LeaseLost(batch.id)
            connection.execute(insert(files), [asdict(file) for file in results])
            return _batch_of(_row(connection, batches, batch.id, batch.owner, "batch"))

    def finalize(self, batch: BatchRecord, now: float, counts: Mapping[str, Any]) -> None:
        """Every line has its result. A batch that is being cancelled keeps its state. Raises: LeaseLost."""
        with self._engine.begin() as connection:
            _change(connection, batch.id, "finalizing", now, {}, fence=batch.fence)
            if connection.execute(update(batches).where(*_held(batch)).values(counts)).rowcount != 1:
                raise LeaseLost(batch.id)

    def finish(
        self,
        batch: BatchRecord,
        status: BatchStatus,
        now: float,
        *,
        counts: Mapping[str, Any],
        contents: Mapping[str, tuple[str, int] | None],
        tells_operator: bool = False,
    ) -> BatchRecord:
        """The results are stored: the batch is over. status: its last state; a batch that somebody has cancelled
        meanwhile becomes `cancelled`.

        contents: by the id of the batch's result file, the name and size of its bytes; None for a file without lines,
        which is removed. tells_operator: as for `refuse`. Raises: LeaseLost.
        """
        with self._engine.begin() as connection:
            values: dict[str, Any] = {**counts, "worker": None, "lease_ends_at": 0.0}
            for name in ("output_file_id", "error_file_id"):
                if contents.get(getattr(batch, name)) is None:
                    values[name] = None
            if not _change(connection, batch.id, status, now, values, fence=batch.fence) and not _change(
                connection, batch.id, "cancelled", now, values, fence=batch.fence
            ):
                raise LeaseLost(batch.id)
            for file_id, stored in contents.items():
                if stored is None:
                    connection.execute(delete(files).where(files.c.id == file_id))
                    continue
                content, size = stored
                expiry = None if batch.output_expires_after is None else int(now) + batch.output_expires_after
                change = update(files).where(files.c.id == file_id)
                connection.execute(change.values(content=content, bytes=size, expires_at=expiry))
            return _ended(connection, batch, now, tells_operator=tells_operator)

    # Webhooks

    def due_webhooks(self, now: float, limit: int, per_owner: int = 1000) -> list[DueWebhook]:
        """Those that are to be tried now, the one that has waited longest first.

        per_owner: at most so many of one owner's batches, and as many of the operator's.
        """
        owner = case((webhooks.c.url.is_(None), None), else_=batches.c.owner).label("owner")
        place = func.row_number().over(partition_by=owner, order_by=webhooks.c.next_at).label("place")
        due = (
            select(webhooks, owner, place)
            .join(batches, batches.c.id == webhooks.c.batch_id)
            .where(_is_due(webhooks.c.next_at, now, LONGEST_WEBHOOK_WAIT_S))
            .subquery()
        )
        columns = [due.c[field.name] for field in fields(DueWebhook)]
        query = select(*columns).where(due.c.place <= per_owner).order_by(due.c.next_at).limit(limit)
        with self._engine.connect() as connection:
            return [DueWebhook(**row) for row in connection.execute(query).mappings()]

    def take_webhook(self, webhook: WebhookRecord, next_at: float) -> bool:
        """Begin a try. next_at: when the next one is due. Returns False if another process has begun it."""
        is_first = [webhooks.c.id == webhook.id, webhooks.c.attempts == webhook.attempts]
        change = update(webhooks).where(*is_first).values(attempts=webhook.attempts + 1, next_at=next_at)
        with self._engine.begin() as connection:
            return connection.execute(change).rowcount == 1

    def end_webhook(self, webhook_id: str) -> None:
        """It is delivered, or not tried again. Idempotent."""
        with self._engine.begin() as connection:
            connection.execute(delete(webhooks).where(webhooks.c.id == webhook_id))

    def _write(self, batch: BatchRecord, values: Mapping[str, Any]) -> BatchRecord:
        with self._engine.begin() as connection:
            if connection.execute(update(batches).where(*_held(batch)).values(**values)).rowcount != 1:
                raise LeaseLost(batch.id)
            return _batch_of(_row(connection, batches, batch.id, batch.owner, "batch"))

    def _page(
        self,
        table: Table,
        owner: str,
        limit: int,
        order: Order,
        after: str | None,
        what: str,
        filters: Sequence[ColumnElement[bool]],
    ) -> list[RowMapping]:
        query = select(table).where(table.c.owner == owner, *filters)
        number = table.c.number
        with self._engine.connect() as connection:
            if after is not None:
                start = _row(connection, table, after, owner, what, "after")["number"]
                query = query.where(number > start if order == "asc" else number < start)
            query = query.order_by(number if order == "asc" else number.desc()).limit(limit)
            return list(connection.execute(query).mappings())


def _held(batch: BatchRecord) -> list[Any]:
    """The condition that the worker that took this record still holds the batch."""
    return [batches.c.id == batch.id, batches.c.fence == batch.fence, batches.c.worker == batch.worker]


def _change(
    connection: Connection,
    batch_id: str,
    status: BatchStatus,
    now: float,
    values: Mapping[str, Any],
    *,
    fence: int | None = None,
) -> bool:
    """Change a batch's state in one guarded update. Returns whether its state allowed that."""
    allowed = [batches.c.id == batch_id, batches.c.status.in_(sources_of(status))]
    if fence is not None:
        allowed.append(batches.c.fence == fence)
    change = update(batches).where(*allowed).values({**values, "status": status, f"{status}_at": int(now)})
    return connection.execute(change).rowcount == 1


def _ended(connection: Connection, batch: BatchRecord, now: float, *, tells_operator: bool) -> BatchRecord:
    """The record of a batch that is over, whose webhooks are noted to be sent."""
    ended = _batch_of(_row(connection, batches, batch.id, batch.owner, "batch"))
    receivers: list[Mapping[str, str]] = [{}] if tells_operator else []
    if ended.webhook is not None:
        receivers.append(ended.webhook)
    for receiver in receivers:
        webhook = WebhookRecord(
            id=new_id("evt_"),
            batch_id=ended.id,
            type=f"batch.{ended.status}",
            created_at=int(now),
            url=receiver.get("url"),
            secret=receiver.get("secret"),
            next_at=now,
        )
        connection.execute(insert(webhooks).values(asdict(webhook)))
    return ended


def _is_kept(now: float) -> ColumnElement[bool]:
    """The condition that a file has not expired."""
    return or_(files.c.expires_at.is_(None), files.c.expires_at > now)


def _is_due(column: Column[float], now: float, longest_s: float) -> ColumnElement[bool]:
    """The condition that a time has come, or is further away than any wait, because the clock was set back."""
    return or_(column <= now, column > now + longest_s)


def _row(connection: Connection, table: Table, object_id: str, owner: str, what: str, param: str = "id") -> RowMapping:
    """param: where the request names the object. Raises: NotFound."""
    query = select(table).where(table.c.id == object_id, table.c.owner == owner)
    row = connection.execute(query).mappings().first()
    if row is None:
        raise NotFound(f"No such {what}: {object_id[:100]!r}", param=param)
    return row


def _hold(connection: Connection, table: Table, object_id: str) -> None:
    """Let no other transaction change a row before this one ends. A `SELECT ... FOR UPDATE` that SQLite has too."""
    connection.execute(update(table).where(table.c.id == object_id).values(id=table.c.id))


def check_pending(upload: UploadRecord, now: float) -> None:
    """Raises: Conflict for an upload that is over."""
    status = "expired" if upload.status == "pending" and upload.expires_at <= now else upload.status
    if status != "pending":
        raise Conflict(f"The upload has the status '{status}'", code="invalid_upload_status")


def _file_of(row: RowMapping) -> FileRecord:
    return FileRecord(**_without_number(row))


def _upload_of(row: RowMapping) -> UploadRecord:
    return UploadRecord(**_without_number(row))


def _batch_of(row: RowMapping) -> BatchRecord:
    return BatchRecord(**_without_number(row))


def _without_number(row: RowMapping) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "number"}
