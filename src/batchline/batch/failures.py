"""Writes result lines without a backend: for invalid batch lines, and for requests that have ended the engine or its
process too often to be tried again."""

from __future__ import annotations

from collections.abc import Sequence

from batchline.backends.base import Answer
from batchline.batch import lines
from batchline.batch.check import CheckReport
from batchline.batch.crashes import LETHAL_CRASHES
from batchline.batch.index import LineReader, PositionSet
from batchline.batch.journal import Journal, Outcome, encode_record
from batchline.batch.plan import WorkItem
from batchline.batch.progress import Tally
from batchline.errors import InputChanged, InternalServerError, LineError, RunFailed
from batchline.openai_api.endpoint_table import error_body

_GROUP_BYTES = 1 << 20


def record_failed_lines(
    report: CheckReport, reader: LineReader, journal: Journal, done: PositionSet, tally: Tally
) -> None:
    """Write the result of every bad line that is not done yet into the journal, and count it. Raises: RunFailed."""
    records = bytearray()
    outcomes: list[Outcome] = []
    try:
        for position in report.bad:
            if position in done:
                continue
            outcome, result_line = _failed_line(position, report, reader)
            records += encode_record(outcome, result_line)
            outcomes.append(outcome)
            if len(records) >= _GROUP_BYTES:
                _commit(records, outcomes, journal, tally)
        _commit(records, outcomes, journal, tally)
    except OSError as exc:
        raise RunFailed(f"The results of bad lines cannot be saved: {exc.strerror or exc}.") from exc


def record_lethal_requests(
    items: Sequence[WorkItem], reader: LineReader, journal: Journal, done: PositionSet, tally: Tally
) -> list[tuple[str, int]]:
    """Answer requests that have ended engine or process `LETHAL_CRASHES` times, and their copies, with an error.

    Returns the (custom_id, line number) of each. Raises: RunFailed.
    """
    error = InternalServerError(
        f"The request ended the engine or its process {LETHAL_CRASHES} times and is not tried again.",
        code="process_crashed",
    )
    records = bytearray()
    outcomes: list[Outcome] = []
    lines_given_up: list[tuple[str, int]] = []
    for position in (position for item in items for position in (item.position, *item.copies)):
        batch_line, span = reader.batch_line(position)
        body = error_body(batch_line.url, error.body())
        answer = Answer(status_code=error.status_code, body=body, request_id=lines.new_id())
        outcome = Outcome(position, str(error.status_code))
        line = lines.answer_line(lines.new_id(), batch_line.custom_id, answer, lines.encode_body(answer.parsed_body()))
        records += encode_record(outcome, line)
        outcomes.append(outcome)
        lines_given_up.append((batch_line.custom_id, span.line_number))
        done.add(position)
    try:
        _commit(records, outcomes, journal, tally)
    except OSError as exc:
        raise RunFailed(f"The errors of requests that crash cannot be saved: {exc.strerror or exc}.") from exc
    return lines_given_up


def record_unrun_lines(error: LineError, reader: LineReader, journal: Journal, tally: Tally) -> None:
    """Write `error` as the result of every line that has none yet, and count it. Raises: RunFailed."""
    done = PositionSet()
    records = bytearray()
    outcomes: list[Outcome] = []
    try:
        for entry in journal.entries():
            done.add(entry.outcome.position)
        for position in (position for position in range(tally.total) if position not in done):
            batch_line, span = reader.batch_line(position)
            records += encode_record(
                Outcome(position, error.code),
                lines.error_line(lines.new_id(), batch_line.custom_id, error, span.line_number),
            )
            outcomes.append(Outcome(position, error.code))
            if len(records) >= _GROUP_BYTES:
                _commit(records, outcomes, journal, tally)
        _commit(records, outcomes, journal, tally)
    except OSError as exc:
        raise RunFailed(f"The lines that were not run cannot be noted: {exc.strerror or exc}.") from exc


def _commit(records: bytearray, outcomes: list[Outcome], journal: Journal, tally: Tally) -> None:
    if outcomes:
        journal.append(bytes(records))
    for outcome in outcomes:
        tally.add(outcome)
    records.clear()
    outcomes.clear()


def _failed_line(position: int, report: CheckReport, reader: LineReader) -> tuple[Outcome, bytes]:
    raw, span = reader.read(position)
    is_too_long = len(raw) >= lines.MAX_LINE_BYTES
    custom_id = None if is_too_long else lines.readable_custom_id(raw)
    if is_too_long:
        error = lines.too_long_error()
    elif position in report.duplicates:
        error = lines.duplicate_error(custom_id)
    else:
        error = _parse_error(position, reader)
    return Outcome(position, error.code), lines.error_line(lines.new_id(), custom_id, error, span.line_number)


def _parse_error(position: int, reader: LineReader) -> LineError:
    try:
        _, span = reader.batch_line(position)
    except LineError as error:
        return error
    raise InputChanged(span.line_number)
