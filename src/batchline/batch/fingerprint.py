"""Identifies a run, so that two different ones are never mixed in one result file."""

from __future__ import annotations

from collections.abc import Mapping

from batchline.batch.check import CheckReport
from batchline.batch.options import RunOptions
from batchline.errors import ResumeRefused

_INPUT = "input"


def run_identity(options: RunOptions, report: CheckReport) -> dict[str, str]:
    """Names and values that must be equal for a run to be resumed: the input's digest and the result's settings."""
    return {_INPUT: f"sha256:{report.digest}, {report.num_bytes} bytes", **options.settings}


def refuse_other_run(found: Mapping[str, str], wanted: Mapping[str, str], num_done: int) -> None:
    """Raises: ResumeRefused, which says what differs and what to do."""
    changes = [
        _change(name, found.get(name), wanted.get(name))
        for name in {**found, **wanted}
        if found.get(name) != wanted.get(name)
    ]
    if changes:
        raise ResumeRefused(
            f"An unfinished run with {num_done:,} finished results is beside this output, but it differs: "
            f"{'; '.join(changes)}. Use its input and settings to resume it, or pass --no-resume to start over."
        )


def _change(name: str, before: str | None, now: str | None) -> str:
    if name == _INPUT:
        return "the input file has changed"
    return f"{name} was {before or 'not set'}, is now {now or 'not set'}"
