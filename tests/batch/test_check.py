from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest
from batch_files import chat_line, write_lines

from batchline.batch import check as check_module
from batchline.batch.check import CheckReport, check_file, findings_of, refuse_over_limits
from batchline.batch.index import LineIndex, LineReader
from batchline.batch.options import Limits
from batchline.batch.sorting import RowSorter
from batchline.errors import InputUnreadable, RunInterrupted, UsageError


def check(path: Path, **options: Any) -> CheckReport:
    with closing(LineIndex(path.parent / "index")) as index:
        return check_file(path, index, scratch=path.parent, **options)


def test_good_lines_are_counted_by_model_and_endpoint(tmp_path: Path) -> None:
    completion = chat_line("c") | {"url": "https://host/v1/completions"}
    path = write_lines(tmp_path / "in", [chat_line("a"), chat_line("b"), completion])
    report = check(path)
    counts = {key: (group.count, group.first_line) for key, group in report.groups.items()}
    assert counts == {("fake", "/v1/chat/completions"): (2, 1), ("fake", "/v1/completions"): (1, 3)}
    assert (report.num_lines, report.num_faults) == (3, 0)


def test_the_digest_and_size_are_those_of_the_file(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in", [chat_line(f"r{n}", "x" * 3000) for n in range(1000)])
    data = path.read_bytes()
    report = check(path)
    assert (report.digest, report.num_bytes) == (hashlib.sha256(data).hexdigest(), len(data))


def test_blank_lines_are_not_counted_but_numbered(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in", [b"", chat_line("a"), b"  \t\r", b"bad", b""])
    report = check(path)
    assert (report.num_lines, report.num_faults) == (2, 1)
    assert [(fault.line_number, fault.code) for fault in report.faults] == [(4, "invalid_json_line")]


def test_a_byte_order_mark_and_a_missing_last_newline_are_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\xef\xbb\xbf" + orjson.dumps(chat_line("a")) + b"\n" + orjson.dumps(chat_line("b")))
    with closing(LineIndex(tmp_path / "index")) as index:
        report = check_file(path, index, scratch=tmp_path)
        with closing(LineReader(path, index)) as reader:
            read = [orjson.loads(reader.read(position)[0])["custom_id"] for position in range(2)]
    assert (report.num_faults, read) == (0, ["a", "b"])


def test_a_carriage_return_alone_does_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(orjson.dumps(chat_line("a")).replace(b",", b",\r") + b"\r\n")
    assert check(path).num_lines == 1


def test_every_repeat_of_a_custom_id_is_a_duplicate_and_the_first_is_not(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in", [chat_line(name) for name in "abacab"])
    report = check(path)
    assert sorted(report.duplicates) == [2, 4, 5]
    assert [(fault.line_number, fault.custom_id, fault.code) for fault in report.faults] == [
        (3, "a", "duplicate_custom_id"),
        (5, "a", "duplicate_custom_id"),
        (6, "b", "duplicate_custom_id"),
    ]


def test_duplicates_are_exact_in_a_file_larger_than_the_memory_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small_sorter(*args: Any, **options: Any) -> Any:
        return RowSorter(*args, **options, memory_bytes=500)

    monkeypatch.setattr(check_module, "RowSorter", small_sorter)
    names = [f"r{n}" for n in range(700)] + ["r3", "r699"]
    report = check(write_lines(tmp_path / "in", [chat_line(name) for name in names]))
    assert sorted(report.duplicates) == [700, 701]


def test_a_bad_line_with_a_known_custom_id_keeps_its_own_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in", [chat_line("a"), chat_line("a") | {"method": "PUT"}])
    assert check(path).faults_by_code == {"invalid_value": 1}


def test_a_line_after_a_bad_one_with_its_custom_id_is_a_duplicate(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in", [chat_line("a") | {"method": "PUT"}, chat_line("a")])
    assert check(path).faults_by_code == {"invalid_value": 1, "duplicate_custom_id": 1}


def test_faults_are_kept_up_to_a_cap_first_lines_first_and_counted_beyond(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_module, "MAX_FAULTS_KEPT", 3)
    lines = [chat_line("a"), b"bad", chat_line("a"), b"bad", chat_line("a"), b"bad", b"bad"]
    report = check(write_lines(tmp_path / "in", lines))
    assert [fault.line_number for fault in report.faults] == [2, 3, 4]
    assert report.num_faults == 6
    assert report.faults_by_code == {"invalid_json_line": 4, "duplicate_custom_id": 2}


def test_lines_that_miss_different_fields_are_different_kinds(tmp_path: Path) -> None:
    """They were listed together as lines without the field that the first of them misses."""
    (tmp_path / "in").write_bytes(
        b'{"custom_id":"a","url":"/v1","body":{}}\n{"custom_id":"b","method":"POST","body":{}}\n'
    )
    kinds = check(tmp_path / "in").fault_kinds.values()
    assert [kind.message for kind in kinds] == [
        "Missing required parameter: 'method'.",
        "Missing required parameter: 'url'.",
    ]


def test_a_line_over_the_longest_length_is_a_fault_and_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchline.batch.lines.MAX_LINE_BYTES", 300)
    path = write_lines(tmp_path / "in", [chat_line("a", "x" * 5000), chat_line("b")])
    report = check(path)
    assert [(fault.line_number, fault.code) for fault in report.faults] == [(1, "invalid_json_line")]
    assert report.groups["fake", "/v1/chat/completions"].first_line == 2


def test_the_observer_sees_each_good_line_with_its_position(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    path = write_lines(tmp_path / "in", [b"bad", chat_line("a", "x"), chat_line("b", "y")])
    check(path, observer=lambda position, _url, body: seen.append((position, body["messages"][0]["content"])))
    assert seen == [(1, "x"), (2, "y")]


def test_a_stop_interrupts_a_check_whose_lines_take_long(tmp_path: Path) -> None:
    """It was asked for every 4,096 lines, and under --strict each of them may compile a constraint for seconds."""
    path = write_lines(tmp_path / "in.jsonl", [chat_line(f"r{n}") for n in range(3)])
    seen: list[int] = []
    with pytest.raises(RunInterrupted):
        check(path, observer=lambda position, _url, _body: seen.append(position), should_stop=lambda: bool(seen))
    assert seen == [0]


def test_a_stop_interrupts_the_check(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in", [b"bad"] * 5000)
    with pytest.raises(RunInterrupted):
        check(path, should_stop=lambda: True)


def test_an_input_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputUnreadable, match="No such file"):
        check(tmp_path / "none")


def test_findings_name_bad_lines_unknown_endpoints_and_unknown_models(tmp_path: Path) -> None:
    lines = [chat_line("a"), chat_line("b") | {"url": "/v1/nonsense"}, chat_line("c", model="other"), b"bad"]
    report = check(write_lines(tmp_path / "in", lines))
    found = findings_of(report, ("fake",))
    assert found[0].startswith("1 bad line, the first being line 4: This line is not valid JSON")
    assert found[1] == "1 request to the unknown endpoint /v1/nonsense, first on line 2."
    assert found[2] == "1 request to the unknown model 'other', first on line 3."
    assert len(findings_of(report, None)) == 2


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(max_requests=2), "3 requests, over the limit of 2"),
        (Limits(max_file_bytes=100), "bytes, over the limit of 100"),
    ],
)
def test_an_input_over_a_limit_is_refused_with_the_way_out(tmp_path: Path, limits: Limits, message: str) -> None:
    report = check(write_lines(tmp_path / "in", [chat_line(name) for name in "abc"]))
    with pytest.raises(UsageError, match=message) as caught:
        refuse_over_limits(report, limits)
    assert "batchline split" in str(caught.value)


def test_an_input_at_its_limits_is_accepted(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in", [chat_line(name) for name in "abc"])
    refuse_over_limits(check(path), Limits(max_requests=3, max_file_bytes=path.stat().st_size))
