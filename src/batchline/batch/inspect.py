"""Looking at a batch file without running it: what `batchline check` and `batchline plan` show.

Works on any input a run takes, in a temporary folder, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import heapq
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchline.batch.check import CheckReport, LineObserver, check_file
from batchline.batch.index import LineIndex, LineReader
from batchline.batch.locations import parse_location
from batchline.batch.plan import PlannedGroup, Planner
from batchline.batch.request_traits import prompt_content
from batchline.batch.source import refuse_unreadable, stage_input
from batchline.config import RequestLimits
from batchline.errors import BadRequest
from batchline.openai_api.endpoint_table import REQUEST_SCHEMAS
from batchline.openai_api.limits import check_limits

NO_MODEL_NAMED = "(no model named)"
"""Stands for the model of requests that name none: fine if only one model is served, which nobody says here."""

_TOP_GROUPS = 20
_SHOWN_CHARS = 400


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input as plain bytes, checked."""

    path: Path
    index: LineIndex
    report: CheckReport


@dataclass(frozen=True, slots=True)
class GroupOverview:
    """One group of a plan. prefix: the text its first requests share, shortened; prefix_chars: its whole length."""

    model: str
    url: str
    num_requests: int
    num_copies: int
    prefix: str
    prefix_chars: int
    prefix_tokens: int | None


@dataclass(frozen=True, slots=True)
class PlanOverview:
    """A plan, in numbers. largest: the groups with the most requests, the largest first."""

    num_requests: int
    num_copies: int
    num_groups: int
    largest: tuple[GroupOverview, ...]


class LimitObserver:
    """A `check.LineObserver` that counts lines over a limit, which will be answered with a 400."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._num_over = 0
        self._first = ""

    def __call__(self, position: int, url: str, body: dict[str, Any]) -> None:
        """Look at one line. position: among the requests, from 0."""
        schema = REQUEST_SCHEMAS.get(url)
        if schema is None:
            return
        try:
            check_limits(schema, body, self._limits)
        except BadRequest as exc:
            self._num_over += 1
            self._first = self._first or f"request {position + 1:,}: {exc.message}"

    def findings(self) -> list[str]:
        """What will fail, in a sentence; empty where nothing will."""
        if not self._num_over:
            return []
        lines = "1 request" if self._num_over == 1 else f"{self._num_over:,} requests"
        return [f"{lines} over a limit, the first being {self._first}."]


@contextmanager
def checked_input(
    input_file: str, *, default_model: str | None = NO_MODEL_NAMED, observer: LineObserver | None = None
) -> Iterator[InputFile]:
    """Check an input of any kind; its plain bytes are there until the block ends.

    default_model: as for `check_file`. Raises: UsageError.
    """
    location = parse_location(input_file)
    refuse_unreadable(location)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchline-")))
        path = asyncio.run(stage_input(location, scratch, should_stop=lambda: False))
        index = LineIndex(scratch / "index")
        stack.callback(index.close)
        report = check_file(path, index, scratch=scratch, default_model=default_model, observer=observer)
        yield InputFile(path, index, report)


def plan_overview(
    input_file: str,
    *,
    dedup: bool,
    observer: LineObserver | None = None,
    count_tokens: Callable[[str], int] | None = None,
) -> PlanOverview:
    """Plan an input without running it. observer: sees every good line too. count_tokens: of a text.

    Raises: UsageError.
    """
    with tempfile.TemporaryDirectory(prefix="batchline-") as scratch, ExitStack() as stack:
        planner = Planner(Path(scratch), dedup=dedup)
        stack.callback(planner.close)

        def observe(position: int, url: str, body: dict[str, Any]) -> None:
            planner.add(position, url, body)
            if observer is not None:
                observer(position, url, body)

        checked = stack.enter_context(checked_input(input_file, observer=observe))
        plan = planner.plan(skip=checked.report.bad)
        reader = LineReader(checked.path, checked.index, NO_MODEL_NAMED)
        stack.callback(reader.close)
        largest = heapq.nlargest(_TOP_GROUPS, plan.groups(), key=lambda group: group.num_requests)
        return PlanOverview(
            num_requests=plan.num_requests,
            num_copies=plan.num_copies,
            num_groups=sum(1 for _ in plan.groups()),
            largest=tuple(_group_overview(group, reader, count_tokens) for group in largest),
        )


def _group_overview(
    group: PlannedGroup, reader: LineReader, count_tokens: Callable[[str], int] | None
) -> GroupOverview:
    sampled = [reader.batch_line(position)[0] for position in group.samples]
    texts = [_prompt_text(line.body) for line in sampled]
    prefix = _common_start(texts) if len(texts) > 1 else ""
    return GroupOverview(
        model=sampled[0].model,
        url=sampled[0].url,
        num_requests=group.num_requests,
        num_copies=group.num_copies,
        prefix=prefix[:_SHOWN_CHARS],
        prefix_chars=len(prefix),
        prefix_tokens=count_tokens(prefix) if count_tokens and prefix else None,
    )


def _common_start(texts: list[str]) -> str:
    """The longest start that all texts have: that of the first and last in sorted order."""
    first, last = min(texts), max(texts)
    length = next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


def _prompt_text(body: dict[str, Any]) -> str:
    """The prompt's text for people to read: message contents one after another."""
    content = prompt_content(body)
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    return "\n".join(str(part.get("content")) if isinstance(part, dict) else str(part) for part in parts)
