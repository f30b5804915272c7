"""Checks a stored file before a batch is made of it, by the same rules as the batch's own check."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchline.batch.check import CheckReport, check_file
from batchline.batch.index import LineIndex
from batchline.batch.locations import Location
from batchline.batch.source import stage_input
from batchline.errors import InputUnreadable
from batchline.jobs.validation import LineJudge, Refused, refuse_invalid, unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class InputCheck:
    """What a batch of the file would find.

    endpoint: that of the first request; None if there is none. models: how many requests name each model. errors,
    num_errors: as in a batch object. warnings: sentences about what is unusual and does no harm.
    """

    endpoint: str | None
    num_lines: int
    models: dict[str, int]
    errors: list[dict[str, Any]]
    num_errors: int
    warnings: list[str]


class _FirstEndpoint:
    """Judges all lines by the endpoint of the first one."""

    def __init__(self, served: Collection[str], *, takes_many_models: bool) -> None:
        self.endpoint: str | None = None
        self._served = served
        self._takes_many_models = takes_many_models
        self._judge: LineJudge | None = None

    def judge(self, position: int, url: str, body: dict[str, Any]) -> None:
        """Raises: LineError."""
        if self._judge is None:
            self.endpoint = url
            self._judge = LineJudge(url, self._served, takes_many_models=self._takes_many_models)
        self._judge.judge(url, str(body["model"]))


def check_input(
    path: Path,
    served: Collection[str],
    endpoints: Collection[str],
    *,
    takes_many_models: bool,
    max_requests: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> InputCheck:
    """Read a file and judge it. served: the names of the models; endpoints: those that a batch may have.

    Raises: RunFailed on a full disk, RunInterrupted when `should_stop`.
    """
    first = _FirstEndpoint(served, takes_many_models=takes_many_models)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchline-")))
        index = stack.enter_context(contextlib.closing(LineIndex(scratch / "index")))
        try:
            plain = asyncio.run(stage_input(Location(str(path), "path", path), scratch, should_stop))
        except InputUnreadable as exc:
            refused = unreadable(exc, path)
            return InputCheck(endpoint=None, num_lines=0, models={}, errors=refused.errors, num_errors=1, warnings=[])
        report = check_file(plain, index, scratch=scratch, observer=first.judge, should_stop=should_stop)
    errors, num_errors = _errors(report, max_requests)
    if not errors and first.endpoint not in endpoints:
        message = f"No model here serves {first.endpoint!r}. Batches may be for: {', '.join(sorted(endpoints))}"
        errors, num_errors = [{"code": "invalid_value", "message": message, "param": "endpoint", "line": None}], 1
    models: dict[str, int] = {}
    for group in report.groups.values():
        models[group.model] = models.get(group.model, 0) + group.count
    return InputCheck(
        endpoint=first.endpoint,
        num_lines=report.num_lines,
        models=models,
        errors=errors,
        num_errors=num_errors,
        warnings=report.unknown_fields.warnings(),
    )


def _errors(report: CheckReport, max_requests: int) -> tuple[list[dict[str, Any]], int]:
    try:
        refuse_invalid(report, max_requests)
    except Refused as refused:
        return refused.errors, refused.num_errors
    return [], 0
