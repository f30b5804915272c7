from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchline.batch import sink
from batchline.batch.journal import Journal, Outcome, encode_record
from batchline.batch.locations import parse_location
from batchline.errors import OutputUnwritable, RunFailed, RunInterrupted

RECORDS = [(3, "200"), (0, "404"), (2, "200"), (1, "200"), (2, "200")]


@pytest.fixture
def journal(tmp_path: Path) -> Any:
    with closing(Journal.open(tmp_path / "journal", {})) as journal:
        for number, (position, status) in enumerate(RECORDS):
            journal.append(encode_record(Outcome(position, status), b"%d.%d" % (position, number)))
        yield journal


def staged(tmp_path: Path, name: str) -> sink.StagedFile:
    return sink.StagedFile.for_location(parse_location(str(tmp_path / name)), tmp_path)


def write(tmp_path: Path, journal: Journal, **options: Any) -> tuple[list[str], list[str]]:
    output, errors = staged(tmp_path, "out"), staged(tmp_path, "err")
    defaults: dict[str, Any] = {"num_lines": 4, "order": "input", "error_file": None, "scratch": tmp_path}
    if options.pop("with_error_file", False):
        defaults["error_file"] = errors
    sink.write_results(journal, output=output, **(defaults | options))
    return output.path.read_text().split(), errors.path.read_text().split() if errors.path.exists() else []


def test_results_are_written_in_input_order_each_once_the_first_one_counting(tmp_path: Path, journal: Journal) -> None:
    assert write(tmp_path, journal) == (["0.1", "1.3", "2.2", "3.0"], [])


def test_results_are_written_in_completion_order_each_once(tmp_path: Path, journal: Journal) -> None:
    assert write(tmp_path, journal, order="completion") == (["3.0", "0.1", "2.2", "1.3"], [])


def test_failed_results_go_to_the_error_file(tmp_path: Path, journal: Journal) -> None:
    assert write(tmp_path, journal, with_error_file=True) == (["1.3", "2.2", "3.0"], ["0.1"])


def test_a_journal_with_a_gap_is_never_passed_off_as_whole(tmp_path: Path, journal: Journal) -> None:
    with pytest.raises(RunFailed, match="4 results for 5 lines"):
        write(tmp_path, journal, num_lines=5)


def test_a_stop_interrupts_the_writing(tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "_STOP_CHECK_RESULTS", 1)
    with pytest.raises(RunInterrupted):
        write(tmp_path, journal, should_stop=lambda: True)


def test_a_full_disk_is_named(tmp_path: Path, journal: Journal) -> None:
    output = sink.StagedFile(Path("/dev/full"), parse_location(str(tmp_path / "out")))
    with pytest.raises(RunFailed, match="No space left on device"):
        sink.write_results(journal, num_lines=4, order="input", output=output, error_file=None, scratch=tmp_path)


async def test_a_staged_file_takes_the_place_of_an_older_output(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("older")
    file = staged(tmp_path, "out")
    file.path.write_text("newer")
    await sink.deliver(file)
    assert (tmp_path / "out").read_text() == "newer"
    assert not file.path.exists()


async def test_a_file_that_cannot_be_moved_stays_and_is_named(tmp_path: Path) -> None:
    file = staged(tmp_path, "out")
    file.path.write_text("results")
    (tmp_path / "out").mkdir()
    with pytest.raises(RunFailed, match="They are complete in") as caught:
        await sink.deliver(file)
    assert str(file.path) in str(caught.value)
    assert file.path.read_text() == "results"


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    location = parse_location(str(tmp_path / ("x" * 300)))
    with pytest.raises(OutputUnwritable, match="File name too long"):
        sink.refuse_unwritable(location, parse_location("-"))
