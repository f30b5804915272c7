"""Lines that cannot be requests, over a whole run: their results are written first, in groups, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_files import RecordingReporter, chat_line, contents, read_lines, write_lines
from faulty_disk import FaultyDisk

from batchline.backends.base import EndpointRequest
from batchline.errors import EngineDead, RunFailed, UsageError
from batchline.testing import FakeBackend

Run = Any

NUM_BAD = 8000
"""Enough for several groups of results."""


class Interfering(RecordingReporter):
    """Does something as soon as a run says that it has come to a certain phase."""

    def __init__(self, phase: str, interfere: Callable[[], object]) -> None:
        super().__init__()
        self._phase = phase
        self._interfere = interfere

    def phase(self, text: str) -> None:
        super().phase(text)
        if text.startswith(self._phase):
            self._interfere()


@pytest.fixture
def mostly_bad(tmp_path: Path) -> Path:
    bad = [b'{"custom_id": "bad %d", "method": "GET"}' % n for n in range(NUM_BAD)]
    return write_lines(tmp_path / "in", [chat_line("good"), *bad, chat_line("better")])


def test_many_bad_lines_have_a_result_each_in_input_order(mostly_bad: Path, tmp_path: Path, run_file: Run) -> None:
    summary = run_file(mostly_bad, tmp_path / "out")
    results = read_lines(tmp_path / "out")
    assert [r["custom_id"] for r in results] == ["good", *(f"bad {n}" for n in range(NUM_BAD)), "better"]
    assert {r["error"]["message"] for r in results[1:-1]} == {"Invalid 'method': expected 'POST', but got 'GET'."}
    assert [r["error"]["line"] for r in results[1:-1]] == list(range(2, NUM_BAD + 2))
    assert summary.failures_by_code == {"invalid_value": NUM_BAD}


@pytest.mark.parametrize("call", [1, 2])
def test_a_disk_that_fills_up_with_bad_lines_is_told_and_the_same_command_finishes(
    mostly_bad: Path, tmp_path: Path, run_file: Run, call: int
) -> None:
    backend = FakeBackend()
    with pytest.raises(RunFailed, match="The results of bad lines cannot be saved: No space left on device"):
        run_file(mostly_bad, tmp_path / "out", disk=FaultyDisk("short", call), backend=backend)
    assert not backend.requests
    assert run_file(mostly_bad, tmp_path / "out").failed == NUM_BAD
    found = Counter(result["custom_id"] for result in read_lines(tmp_path / "out"))
    assert (len(found), found.most_common(1)[0][1]) == (NUM_BAD + 2, 1)


def test_bad_lines_of_a_run_that_broke_off_are_not_written_again(tmp_path: Path, run_file: Run) -> None:
    asked: list[EndpointRequest] = []

    async def die(request: EndpointRequest) -> None:
        asked.append(request)
        if len(asked) > 1:
            raise EngineDead("gone")

    batch = write_lines(tmp_path / "in", [chat_line("a", "a"), b"bad", chat_line("a", "a"), chat_line("b", "b")])
    with pytest.raises(RunFailed, match=r"3 of 4 requests are done and saved\."):
        run_file(batch, tmp_path / "out", backend=FakeBackend(before_answer=die), max_inflight=1)
    journal = (tmp_path / "out.partial" / "journal").read_bytes()
    assert run_file(batch, tmp_path / "out").resumed == 3
    results = read_lines(tmp_path / "out")
    assert [(r["error"] or {}).get("code") for r in results] == [None, "invalid_json_line", "duplicate_custom_id", None]
    assert sum(result["id"].encode() in journal for result in results) == 3


def test_a_line_over_the_longest_length_is_answered_without_being_read(
    tmp_path: Path, run_file: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchline.batch.lines.MAX_LINE_BYTES", 300)
    monkeypatch.setattr("batchline.batch.index.MAX_LINE_BYTES", 300)
    run_file(write_lines(tmp_path / "in", [chat_line("a", "x" * 5000), chat_line("b")]), tmp_path / "out")
    too_long, answered = read_lines(tmp_path / "out")
    assert too_long["custom_id"] is None
    assert too_long["error"]["message"].startswith("This line is longer than")
    assert answered["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("phase", "is_good_first", "told"),
    [
        ("Checked", False, "changed while the run was reading it"),
        ("Running", True, "changed or went away while the run was reading it"),
    ],
)
def test_an_input_that_changes_under_the_run_ends_it(
    tmp_path: Path, run_file: Run, phase: str, is_good_first: bool, told: str
) -> None:
    batch = write_lines(tmp_path / "in", [chat_line("a"), chat_line("b")])
    good = batch.read_bytes()
    bad = b"x" + good[1:]
    batch.write_bytes(good if is_good_first else bad)
    reporter = Interfering(phase, lambda: batch.write_bytes(bad if is_good_first else good))
    with pytest.raises(RunFailed, match=told):
        run_file(batch, tmp_path / "out", reporter=reporter)
    assert not (tmp_path / "out").exists()


def test_output_and_error_file_may_not_be_one(tmp_path: Path, run_file: Run) -> None:
    batch = write_lines(tmp_path / "in", [chat_line("a")])
    (tmp_path / "link").symlink_to(tmp_path)
    for output, errors in [
        (tmp_path / "out", tmp_path / "link" / "out"),
        ("memory://box/out?a", "memory://box/out?b"),
    ]:
        with pytest.raises(UsageError, match="names the same place as the output"):
            run_file(batch, output, error_file=str(errors))
    run_file(batch, tmp_path / "out", error_file=str(tmp_path / "err"))
    assert contents(read_lines(tmp_path / "out")) == {"a": "hello"}
    assert (tmp_path / "err").read_bytes() == b""
