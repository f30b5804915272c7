"""What must be so after a server was killed and another one has brought everything to its end."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from crash_lives import ME, Log, Server, texts_of
from sqlalchemy import select

from batchline.batch.journal import saved_results
from batchline.errors import NotFound
from batchline.jobs.responses import ResponseStore
from batchline.jobs.state_folder import JobsState
from batchline.jobs.states import EDGES, RUNNING
from batchline.jobs.tables import BatchRecord, batches, files, response_items, responses, upload_parts


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was durable when a server began. over: the batches; saved: texts with results in journals, by batch.
    asked: the requests so far."""

    over: frozenset[str]
    saved: dict[str, set[str]]
    asked: Counter[str]

    @classmethod
    def of(cls, server: Server) -> Snapshot:
        """Read without opening the state."""
        state = server.folder / "state"
        saved: dict[str, set[str]] = {}
        for journal in state.glob("runs/*/journal"):
            texts = {json.loads(line)["custom_id"] for _, line in saved_results(journal)}
            saved.setdefault(journal.parent.name.partition(".")[0], set()).update(texts)
        over: list[str] = []
        if (state / "batchline.db").exists():
            with closing(sqlite3.connect(state / "batchline.db")) as database:
                if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'batches'").fetchone():
                    rows = database.execute("SELECT id, status FROM batches").fetchall()
                    over = [batch_id for batch_id, status in rows if status not in RUNNING]
        return cls(frozenset(over), saved, Counter(server.log.values("asked")))


def faults_in(state: JobsState, log: Log, before: Snapshot) -> list[str]:
    """What is wrong with the batches, each in a sentence. before: what the last server found."""
    with state.store.database.connect() as connection:
        ids = connection.scalars(select(batches.c.id)).all()
    found = [state.store.batch(batch_id, ME) for batch_id in ids]
    faults = [fault for batch in found for fault in _batch_faults(state, batch)]
    faults += _promise_faults(state, log, found)
    faults += _webhook_faults(log, found)
    return [*faults, *_repeats(state, log, found, before)]


def _batch_faults(state: JobsState, batch: BatchRecord) -> Iterator[str]:
    name = f"{batch.id} ({batch.status})"
    if batch.status in RUNNING:
        yield f"{name} is not over"
        return
    if batch.worker is not None and batch.lease_ends_at:
        yield f"{name} is still held"
    passed = {"validating"} | {status for status in EDGES if getattr(batch, f"{status}_at", None) is not None}
    for status in passed - {"validating"}:
        if not any(status in EDGES[earlier] for earlier in passed):  # type: ignore[index]
            yield f"{name} came to {status} from nowhere: {sorted(passed)}"
    if {status for status in passed if status not in RUNNING} != {batch.status}:
        yield f"{name} has ended more than once: {sorted(passed)}"
    results = results_of(state, batch)
    if batch.status == "failed":
        if not batch.errors or results:
            yield f"{name} has {len(results)} results and these errors: {batch.errors}"
        return
    file = state.store.file(batch.input_file_id, ME) if _exists(state, batch.input_file_id) else None
    if file is None or file.content is None or not _results_exist(state, batch):
        return  # the client has deleted it
    with state.contents.open(file.content) as content:
        expected = Counter(texts_of(content.read()))
    answered = Counter(result["custom_id"] for result in results)
    if answered != expected:
        yield f"{name} has the results {dict(answered)} of the requests {dict(expected)}"
    num_failed = sum(_is_failure(result) for result in results)
    counts = (batch.total, batch.completed, batch.failed)
    if counts != (len(results), len(results) - num_failed, num_failed):
        yield f"{name} counts {counts} of {len(results)} results, {num_failed} of which have failed"
    for result in results:
        yield from _result_faults(name, batch, result)


def _result_faults(name: str, batch: BatchRecord, result: dict[str, Any]) -> Iterator[str]:
    text = result["custom_id"]
    if not _is_failure(result):
        if result["response"]["body"]["choices"][0]["message"]["content"] != text:
            yield f"{name} has a wrong answer for {text!r}"
    elif result["error"] is not None and result["error"]["code"] not in (f"batch_{batch.status}", "batch_expired"):
        yield f"{name} has the error {result['error']} for {text!r}"
    elif result["error"] is None and not text.startswith("bad"):
        yield f"{name} has failed for {text!r}: {result['response']}"


def _is_failure(result: dict[str, Any]) -> bool:
    return result["error"] is not None or result["response"]["status_code"] != 200


def _exists(state: JobsState, file_id: str) -> bool:
    try:
        state.store.file(file_id, ME)
    except NotFound:
        return False
    return True


def _results_exist(state: JobsState, batch: BatchRecord) -> bool:
    return all(_exists(state, file_id) for file_id in (batch.output_file_id, batch.error_file_id) if file_id)


def results_of(state: JobsState, batch: BatchRecord) -> list[dict[str, Any]]:
    """All result lines of a batch that is over, of both files."""
    found = []
    for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
        if _exists(state, file_id):
            content = state.store.file(file_id, ME).content
            assert content is not None, "the results of a batch that is over have no content"
            with state.contents.open(content) as file:
                found += [json.loads(line) for line in file]
    return found


def _promise_faults(state: JobsState, log: Log, found: list[BatchRecord]) -> Iterator[str]:
    """What the client was told must still be so."""
    status_of = {batch.id: batch.status for batch in found}
    for batch_id in set(log.values("batch")) - set(status_of):
        yield f"{batch_id} is lost"
    for batch_id in log.values("cancelled"):
        if status_of.get(batch_id) != "cancelled":
            yield f"{batch_id} was cancelled, and is {status_of.get(batch_id)}"
    for entry in log.values("over"):
        batch_id, status = entry.split()
        if status_of.get(batch_id) != status:
            yield f"{batch_id} was {status}, and is {status_of.get(batch_id)}"
    for file_id in log.values("deleted"):
        if _exists(state, file_id):
            yield f"{file_id} was deleted, and is back"
    for file_id in set(log.values("file")) - set(log.values("deleting")):
        if not _exists(state, file_id):
            yield f"{file_id} is lost"


def _webhook_faults(log: Log, found: list[BatchRecord]) -> Iterator[str]:
    """Each batch's end is reported, several times at most as the same event."""
    events = {(event["data"]["id"], event["type"], event["id"]) for event in map(json.loads, log.values("webhook"))}
    reported = Counter((batch_id, kind) for batch_id, kind, _ in events)
    expected = Counter((batch.id, f"batch.{batch.status}") for batch in found)
    if reported != expected:
        yield f"the webhooks are {dict(reported)}, not {dict(expected)}"


def _repeats(state: JobsState, log: Log, found: list[BatchRecord], before: Snapshot) -> Iterator[str]:
    """The last server asks once for each line without a durable result, and for no other line."""
    allowed: Counter[str] = Counter()
    for batch in found:
        if batch.id not in before.over and batch.status != "failed":
            content = state.store.file(batch.input_file_id, ME).content
            assert content is not None
            with state.contents.open(content) as file:
                allowed.update(set(texts_of(file.read())) - before.saved.get(batch.id, set()))
    asked = Counter(log.values("asked")) - before.asked
    for text, number in (asked - allowed).items():
        yield f"{text!r} was run {number} times more than it had to be"


def leftovers_in(state: JobsState) -> list[str]:
    """Records without contents, and contents without records."""
    with state.store.database.connect() as connection:
        of_files = set(connection.scalars(select(files.c.content).where(files.c.content.is_not(None))))
        named = of_files | set(connection.scalars(select(upload_parts.c.id)))
        result_files = connection.scalars(select(files.c.id).where(files.c.purpose == "batch_output")).all()
        of_batches = connection.execute(select(batches.c.output_file_id, batches.c.error_file_id)).all()
        lost = connection.scalars(
            select(response_items.c.id).where(response_items.c.response_id.not_in(select(responses.c.id)))
        ).all()
    stored = {name for name, _ in state.contents.stored() if not name.startswith("batchline-")}
    faults = [f"{name} has a record and no content" for name in named - stored]
    faults += [f"{name} has a content and no record" for name in stored - named]
    faults += [f"{name} belongs to no batch" for name in set(result_files) - {i for row in of_batches for i in row}]
    faults += [f"the item {name} belongs to no response" for name in lost]
    return faults + [f"{path.name} is left of a run" for path in state.runs.iterdir()]


def expired_files(server: Server) -> list[str]:
    """Files that the clean-up is still to remove."""
    with server.state.store.database.connect() as connection:
        return list(connection.scalars(select(files.c.id).where(files.c.expires_at <= server.clock())))


async def response_faults(server: Server) -> list[str]:
    """What is wrong with the responses."""
    store, log = ResponseStore(server.state.store.database), server.log
    finished, forgotten, stopped = (set(log.values(kind)) for kind in ("finished", "forgotten", "stopped"))
    faults = []
    for name in ("one", "two", "three", "four", "five"):
        try:
            status = store.get(name, ME, server.clock()).response["status"]
        except NotFound:
            if name in (finished | set(log.values("begun"))) - {"two"}:
                faults.append(f"the response {name} is lost")
            continue
        if name in forgotten or status not in ("completed", "cancelled", "failed"):
            faults.append(f"the response {name} is there, {status}")
        if (name in finished and status != "completed") or (name in stopped and status != "cancelled"):
            faults.append(f"the response {name} is {status}")
        items = store.output_items([f"msg_{name}"], ME)
        if (status == "completed") != bool(items):
            faults.append(f"the response {name} is {status}, with the items {items}")
    return faults
