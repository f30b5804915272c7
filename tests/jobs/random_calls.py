"""Two workers and two owners under random calls, with a model that says what must come of them.

The workers share one database, as two servers do, and run only while a rule waits for something. Their time is the
test's own. Requests whose text begins with "wait" are answered while the gate is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, precondition, rule
from random_parts import CHAT, LEASE_S, Batch, Clock, Gate, Server, StorageSwitch, Upload, bad_lines, line, reachable

from batchline.errors import BatchStateConflict, Conflict, FileInUse, NotFound
from batchline.jobs.options import JobsOptions
from batchline.jobs.service import Jobs
from batchline.jobs.state_folder import state_in
from batchline.jobs.states import EDGES, RUNNING, BatchStatus
from batchline.jobs.store import Store
from batchline.jobs.tables import BatchRecord
from batchline.jobs.worker_store import LONGEST_LEASE_S
from batchline.openai_api.batches import CreateBatchRequest, ExpiresAfter, window_s

T = TypeVar("T")

UNKNOWN = "file-" + "0" * 32
LIMIT_S = 90.0
"""How long a rule waits for the workers, in real time."""

LONG_S = 3600
"""Longer than a lease, any pause before another try, and a file's life, but not than every window."""

MANY = 100
"""More batches than a test makes."""

OWNERS = st.sampled_from(["ann", "bob"])
KINDS = st.lists(st.sampled_from(["ok", "bad", "wait"]), min_size=1, max_size=4)
WINDOWS = st.sampled_from(["1m", "2h", "30d"])


class RandomCalls(RuleBasedStateMachine):
    """The rules. `template`: a state folder with empty tables, which is copied."""

    template: Path

    uploads = Bundle("uploads")
    batches = Bundle("batches")

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path(tempfile.mkdtemp())
        shutil.copytree(self.template, self._folder / "state")
        self._runner = asyncio.Runner()
        self._stack = contextlib.ExitStack()
        self.clock = Clock()
        options = JobsOptions(state_dir=self._folder / "state", max_running=MANY)
        state = self._stack.enter_context(state_in(options, self.clock))
        self.storage = StorageSwitch(state.contents)
        store = Store(f"sqlite:///{self._folder / 'state/batchline.db'}", self.clock)
        self._stack.callback(store.close)
        self.state = state
        self.gate = self._run(self._make_gate())
        states = [state, replace(state, store=store)]
        self.servers = [Server(state, options, self.gate) for state in states]
        for server in self.servers:
            self._run(server.backend.start())
        self.known_files: dict[str, Upload] = {}
        self.deleted: set[str] = set()
        self.known_batches: dict[str, Batch] = {}
        self.keys: dict[tuple[str, str], tuple[Any, str]] = {}
        self.num_texts = 0
        self.max_running = MANY

    async def _make_gate(self) -> Gate:
        return Gate()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    @property
    def jobs(self) -> Jobs:
        return self.servers[0].jobs

    # Calls

    @initialize(target=uploads, max_running=st.sampled_from([1, MANY]))
    def begin(self, max_running: int) -> str:
        """There is always a file."""
        for server in self.servers:
            server.options = replace(server.options, max_running=max_running)
        self.max_running = max_running
        return self.upload("ann", ["ok", "bad", "wait"], None, expires=False)

    @rule(
        target=uploads,
        owner=OWNERS,
        kinds=KINDS,
        fault=st.sampled_from([None, None, None, None, "json", "twice", "model"]),
        expires=st.booleans(),
    )
    def upload(self, owner: str, kinds: list[str], fault: str | None, *, expires: bool) -> str:
        """A new file."""
        texts = [f"{kind} {self.num_texts + n}" for n, kind in enumerate(kinds)]
        self.num_texts += len(texts)
        lines = [line(text) for text in texts]
        content = b"".join(lines) if fault is None else bad_lines(fault, lines)
        file_id, arriving = self.jobs.arriving_file()
        arriving.open()
        arriving.write(content)
        arriving.close()
        expiry = LONG_S if expires else None
        work = self.jobs.add_file(owner, file_id, arriving, filename="in", purpose="batch", expires_after=expiry)
        file = self._run(work)
        self.known_files[file.id] = Upload(file.id, owner, None if fault else texts, file.expires_at)
        return file.id

    @rule(
        target=batches,
        file_id=st.one_of(uploads, uploads, uploads, uploads, st.just(UNKNOWN)),
        is_own=st.sampled_from([True, True, True, True, False]),
        window=WINDOWS,
        expires=st.booleans(),
        key=st.sampled_from([None, None, "one", "two"]),
    )
    def create(self, file_id: str, window: str, key: str | None, *, is_own: bool, expires: bool) -> Any:
        """A new batch, or an earlier one with the same key. is_own: whether the file's owner makes it."""
        file = self.known_files.get(file_id)
        owner = file.owner if file is not None and is_own else "bob"
        expiry = ExpiresAfter(anchor="created_at", seconds=LONG_S) if expires else None
        request = CreateBatchRequest(
            input_file_id=file_id, endpoint=CHAT, completion_window=window, output_expires_after=expiry
        )
        earlier = None if key is None else self.keys.get((owner, key))
        work = self.jobs.create_batch(request, owner, key=key)
        if earlier is not None:
            if earlier[0] == request:
                assert self._run(work).id == earlier[1]
            else:
                with pytest.raises(Conflict):
                    self._run(work)
            return multiple()
        record = self._run(work)
        assert record.expires_at == int(self.clock.now) + (window_s(window) or 0)
        if key is not None:
            self.keys[owner, key] = request, record.id
        return self._note(record, self._texts_of(file_id, owner))

    def _texts_of(self, file_id: str, owner: str) -> Sequence[str] | None:
        file = self.known_files.get(file_id)
        return file.texts if file is not None and self._is_there(file) and file.owner == owner else None

    def _is_there(self, file: Upload) -> bool:
        return not file.is_gone and (file.expires_at is None or file.expires_at > self.clock.now)

    def _note(self, record: BatchRecord, texts: Sequence[str] | None) -> str:
        assert record.status == "validating"
        self.known_batches[record.id] = Batch(record.id, record.owner, texts, record, is_delayed=self.storage.is_broken)
        return record.id

    @rule(target=batches, owner=OWNERS, kinds=KINDS, window=WINDOWS)
    def submit(self, owner: str, kinds: list[str], window: str) -> Any:
        """A new file and its batch."""
        file_id = self.upload(owner, kinds, None, expires=False)
        return self.create(file_id, window, None, is_own=True, expires=False)

    @rule(batch_id=batches)
    def cancel(self, batch_id: str) -> None:
        """Cancel a batch, which is over only if another call has seen that."""
        batch = self.known_batches[batch_id]
        before = self._look(batch)
        if before in ("completed", "failed", "expired"):
            with pytest.raises(BatchStateConflict, match=f"Cannot cancel a batch with status '{before}'"):
                self._run(self.jobs.cancel_batch(batch_id, batch.owner))
            return
        try:
            self._run(self.jobs.cancel_batch(batch_id, batch.owner))
        except BatchStateConflict:
            assert self._look(batch) in ("completed", "failed", "expired"), "it ended meanwhile"
            return
        batch.is_cancelled = True
        is_tried = any(server.is_working for server in self.servers)  # a try that fails now sets another time
        batch.is_delayed = self.storage.is_broken or (batch.is_delayed and is_tried)
        assert self._look(batch) in ("cancelling", "cancelled")

    @rule(target=batches, batch_id=batches)
    def retry(self, batch_id: str) -> Any:
        """Run the failed lines of a batch again. Returns the new batch, or else the same: the number of batches must
        not depend on which call comes first."""
        batch = self.known_batches[batch_id]
        self._look(batch)
        work = self.jobs.retry_batch(batch_id, batch.owner)
        try:
            record = self._run(work)
        except BatchStateConflict:
            assert not batch.is_over or batch.record.error_file_id is None
            return batch_id
        except Conflict:
            assert batch.is_over
            ids = batch.record.input_file_id, batch.record.error_file_id
            assert not all(self._finds(file_id, batch.owner) for file_id in ids)
            return batch_id
        self._look(batch)
        assert batch.is_over
        failed = {result["custom_id"] for result in self._lines_of(batch.record.error_file_id, batch.owner)}
        assert batch.texts is not None
        texts = [text for text in batch.texts if text in failed]
        assert record.retry_of == batch_id
        self.known_files[record.input_file_id] = Upload(record.input_file_id, batch.owner, texts, None)
        assert [r["custom_id"] for r in self._lines_of(record.input_file_id, batch.owner)] == texts
        return self._note(record, texts)

    @rule(file_id=uploads)
    def delete(self, file_id: str) -> None:
        """Delete an input."""
        file = self.known_files[file_id]
        self._delete(file_id, file.owner, is_there=self._is_there(file))

    @rule(batch_id=batches, kind=st.sampled_from(["output_file_id", "error_file_id"]))
    def delete_results(self, batch_id: str, kind: str) -> None:
        """Delete a batch's results."""
        batch = self.known_batches[batch_id]
        self._look(batch)
        file_id = getattr(batch.record, kind)
        if file_id is not None:
            self._delete(file_id, batch.owner, is_there=self._finds(file_id, batch.owner))

    def _delete(self, file_id: str, owner: str, *, is_there: bool) -> None:
        is_input = file_id in self.known_files
        with pytest.raises(NotFound):
            self._run(self.jobs.remove_file(file_id, "nobody"))
        try:
            self._run(self.jobs.remove_file(file_id, owner))
        except FileInUse as exc:
            user = self.known_batches[exc.batch_id]
            assert not is_input or user.record.input_file_id == file_id
            return
        except NotFound:
            for batch in self.known_batches.values():
                self._look(batch)
            results = {
                file for b in self.known_batches.values() for file in (b.record.output_file_id, b.record.error_file_id)
            }
            has_just_gone = not is_input and file_id not in results  # its batch ended meanwhile, without a line for it
            assert has_just_gone or not is_there
            return
        assert is_there
        self.deleted.add(file_id)
        for batch in self.known_batches.values():
            self._look(batch)
            assert batch.is_over or file_id != batch.record.input_file_id
        if is_input:
            self.known_files[file_id].is_gone = True
        assert not self._finds(file_id, owner)

    # What happens around them

    @rule(seconds=st.sampled_from([-2 * LONG_S, -61, -1, 1, 61, LONG_S + 1, 24 * LONG_S]))
    def jump(self, seconds: int) -> None:
        """The clock jumps."""
        self.clock.now += seconds
        for batch in self._unfinished():
            batch.was_late |= self.clock.now >= batch.record.expires_at
            batch.num_disturbed += 2
            if abs(seconds) >= LONG_S and not self.storage.is_broken:
                batch.is_delayed = False
            if batch.kept_until is not None and not 0 < batch.kept_until - self.clock.now <= LONGEST_LEASE_S:
                batch.kept_until = None
        for file in self.known_files.values():
            if file.expires_at is not None and not file.is_gone and self._is_there(file):
                file.is_gone = not self._finds(file.id, file.owner)  # it may have expired before a jump back

    @rule(number=st.integers(0, 1))
    def start_or_stop(self, number: int) -> None:
        """A worker starts, or stops as on a signal."""
        server = self.servers[number]
        if server.is_working:
            self._run(server.stop())
            for batch in self._unfinished():
                batch.num_disturbed += 1
        else:
            self._run(server.start())

    @rule(batch_id=batches)
    def steal(self, batch_id: str) -> None:
        """Another worker takes a batch, and dies."""
        batch = self.known_batches[batch_id]
        if self._look(batch) in RUNNING:
            now = self.clock.now
            if self.state.store.claim(batch.record, "thief", 1e12, now + LEASE_S) is not None:
                batch.kept_until = now + LEASE_S
                batch.num_disturbed += 1

    @rule(is_open=st.booleans())
    def turn_gate(self, *, is_open: bool) -> None:
        """Open or close the gate."""
        if is_open:
            self.gate.opened.set()
        else:
            self.gate.opened.clear()

    @precondition(lambda self: self.known_batches)
    @rule(is_broken=st.booleans())
    def turn_storage(self, *, is_broken: bool) -> None:
        """The contents of files can be read, or not."""
        self.storage.is_broken = is_broken
        if is_broken:
            self.storage.was_broken = True
            for batch in self._unfinished():
                batch.is_delayed = True

    # What must be so

    @rule()
    def settle(self) -> None:
        """The workers bring every batch as far as the model says."""
        if not any(server.is_working for server in self.servers):
            return
        deadline = time.monotonic() + LIMIT_S
        while waiting := [batch for batch in self._unfinished() if not self._is_settled(batch)]:
            assert time.monotonic() < deadline, f"these are stuck: {waiting}"
            self._run(asyncio.sleep(0.002))
            for batch in waiting:
                self._look(batch)
                batch.is_delayed |= self.storage.was_broken and batch.record.retry_at > self.clock.now

    def _is_settled(self, batch: Batch) -> bool:
        """Whether a batch that is not over needs nothing more for now."""
        if batch.is_delayed or batch.kept_until is not None:
            return True
        must_end = batch.texts is None or batch.is_cancelled or self.clock.now >= batch.record.expires_at
        if must_end or self.gate.opened.is_set():
            return False
        may_wait = self.max_running < MANY or any(text.startswith("wait") for text in batch.texts or ())
        return may_wait and batch.record.status == "in_progress"

    @rule(owner=OWNERS, limit=st.integers(1, 3))
    def lists(self, owner: str, limit: int) -> None:
        """Pages in both orders have exactly what is there."""
        self.settle()
        own = [batch for batch in self.known_batches.values() if batch.owner == owner]
        asc, desc = (
            self._pages(lambda **page: self.jobs.batches(owner, **page), limit, order) for order in ("asc", "desc")
        )
        assert asc == desc[::-1] == [batch.id for batch in own]
        is_quiet = all(not batch.is_delayed and batch.kept_until is None for batch in self._unfinished())
        for purpose in ("batch", None) if is_quiet else ("batch",):  # otherwise results may come and go meanwhile
            asc, desc = (
                self._pages(lambda **page: self.jobs.files(owner, purpose=purpose, **page), limit, order)  # noqa: B023
                for order in ("asc", "desc")
            )
            uploads = [file.id for file in self.known_files.values() if file.owner == owner and self._is_there(file)]
            assert asc == desc[::-1]
            assert [file_id for file_id in asc if file_id in self.known_files] == uploads
            of_batches = {file_id for batch in own for file_id in self._result_ids(batch)} if purpose is None else set()
            assert set(asc) - set(uploads) == {file_id for file_id in of_batches if self._finds(file_id, owner)}

    def _pages(self, page: Callable[..., Coroutine[Any, Any, Sequence[Any]]], limit: int, order: str) -> list[str]:
        found: list[str] = []
        while more := self._run(page(limit=limit, order=order, after=found[-1] if found else None)):
            assert len(more) <= limit
            found += [record.id for record in more]
        assert len(set(found)) == len(found)
        return found

    def _result_ids(self, batch: Batch) -> list[str]:
        self._look(batch)
        return self._result_ids_of(batch.record)

    def _result_ids_of(self, record: BatchRecord) -> list[str]:
        return [i for i in (record.output_file_id, record.error_file_id) if i is not None]

    @rule(file_id=uploads, batch_id=batches)
    def strangers_find_nothing(self, batch_id: str, file_id: str) -> None:
        """A file is there until it is deleted or has expired, and for another owner nothing exists."""
        file = self.known_files[file_id]
        assert self._finds(file_id, file.owner) == self._is_there(file)
        calls: Mapping[str, Callable[[str, str], Coroutine[Any, Any, object]]] = {
            "batch": self.jobs.batch,
            "cancel": self.jobs.cancel_batch,
            "retry": self.jobs.retry_batch,
        }
        for call in calls.values():
            with pytest.raises(NotFound):
                self._run(call(batch_id, "nobody"))
        assert not self._finds(file_id, "nobody")
        with pytest.raises(NotFound):
            self._run(self.jobs.batches("nobody", limit=1, order="asc", after=batch_id))

    @rule(batch_id=batches)
    def get(self, batch_id: str) -> None:
        """A batch, and the results that it has so far."""
        batch = self.known_batches[batch_id]
        self._look(batch)
        for file_id in self._result_ids(batch):
            if self._finds(file_id, batch.owner):
                results = self._lines_of(file_id, batch.owner)  # some may say that a cancelled request was not run
                batch.done |= {result["custom_id"] for result in results if result["error"] is None}

    def _look(self, batch: Batch) -> BatchStatus:
        """Compare a batch with what was last seen of it."""
        old, new = batch.record, self.state.store.batch(batch.id, batch.owner)
        assert new.status in reachable(old.status), f"{old.status} to {new.status}"
        if new.status != "failed":
            assert (new.total, new.completed, new.failed) >= (old.total, old.completed, old.failed)
            assert new.completed >= old.completed
            assert new.failed >= old.failed
        times = {status for status in EDGES if getattr(new, f"{status}_at", None) is not None}
        assert all(status == new.status or status in RUNNING for status in times), f"it has ended as {times}"
        batch.record = new
        if batch.is_over and old.status in RUNNING:
            self._check_end(batch)
        return new.status

    def _check_end(self, batch: Batch) -> None:
        record = batch.record
        if batch.texts is None:
            assert record.status == ("cancelled" if batch.is_cancelled else "failed"), record
            assert record.errors
            assert not self._result_ids_of(record)
            return
        allowed = {"cancelled"} if batch.is_cancelled else {"completed", "expired"} if batch.was_late else {"completed"}
        assert record.status in allowed, record
        gone = {file_id for file_id in self._result_ids_of(record) if not self._finds(file_id, batch.owner)}
        if gone:  # it may have ended just before they were deleted
            assert record.output_expires_after is not None or gone <= self.deleted
            return
        succeeded, failed = (
            {r["custom_id"]: r for r in self._lines_of(file_id, batch.owner)}
            for file_id in (record.output_file_id, record.error_file_id)
        )
        assert sorted([*succeeded, *failed]) == sorted(batch.texts)
        assert (record.total, record.completed, record.failed) == (len(batch.texts), len(succeeded), len(failed))
        unrun = {text for text, result in failed.items() if result["error"] is not None}
        assert not unrun or record.status != "completed"
        assert not batch.done & unrun
        assert all(text.startswith("bad") for text in set(failed) - unrun)
        assert not any(text.startswith("bad") for text in succeeded)

    def _lines_of(self, file_id: str | None, owner: str) -> list[Any]:
        """The lines of a file, as far as they are there."""
        if file_id is None:
            return []
        file = self.state.store.file(file_id, owner)
        if file.content is None:
            return [json.loads(result) for result in self._runner.run(self.jobs.results_so_far(file))]
        with self.jobs.open(file) as content:
            return [json.loads(result) for result in content]

    def _finds(self, file_id: str | None, owner: str) -> bool:
        try:
            self._run(self.jobs.file(file_id or UNKNOWN, owner))
        except NotFound:
            return False
        return True

    def _unfinished(self) -> list[Batch]:
        return [batch for batch in self.known_batches.values() if not batch.is_over]

    def teardown(self) -> None:
        """In the end, every batch is over, and no line has run more often than disturbances explain."""
        try:
            self._end()
        finally:
            for server in self.servers:
                if server.is_working:
                    self._run(server.stop())
            self._stack.close()
            self._runner.close()
            shutil.rmtree(self._folder)

    def _end(self) -> None:
        self.turn_gate(is_open=True)
        self.turn_storage(is_broken=False)
        if not self.servers[0].is_working:
            self._run(self.servers[0].start())
        for _ in range(2):  # after the first jump, a worker may still put off a batch that it could not read before
            self.jump(LONG_S)
            self.settle()
        assert all(batch.is_over for batch in self.known_batches.values())
        allowed: Counter[str] = Counter()
        for batch in self.known_batches.values():
            allowed.update(dict.fromkeys(batch.texts or (), 1 + batch.num_disturbed))
        assert not self.gate.asked - allowed
