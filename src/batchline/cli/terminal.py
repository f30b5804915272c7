"""How a run shows itself: a live bar on a terminal, a line every few seconds anywhere else.

All of it goes to standard error: standard output may be the result file.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from batchline.batch.progress import Progress, Reporter

LINE_INTERVAL_S = 5.0


@contextmanager
def open_reporter() -> Iterator[Reporter]:
    """The reporter that suits standard error, with log records shown beside it."""
    if sys.stderr is not None and sys.stderr.isatty():
        from batchline.cli.live_bar import LiveBar  # rich is only needed on a terminal

        with LiveBar() as bar:
            yield bar
        return
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    yield LineReporter()


def tell(text: str) -> None:
    """One line on standard error; if that is closed or nobody reads it any more, nothing."""
    with suppress(OSError, ValueError):
        typer.echo(text, err=True)


class LineReporter:
    """Quiet lines for logs: phases, warnings, and progress every few seconds."""

    def __init__(self) -> None:
        self._next_line_at = 0.0

    def phase(self, text: str) -> None:
        """One line."""
        tell(text)

    def warn(self, text: str) -> None:
        """One line."""
        tell(f"Warning: {text}")

    def progress(self, progress: Progress) -> None:
        """One line, at most every `LINE_INTERVAL_S`, and one at the end."""
        now = time.monotonic()
        if now >= self._next_line_at or progress.done == progress.total:
            self._next_line_at = now + LINE_INTERVAL_S
            tell(progress_text(progress))


def progress_text(progress: Progress) -> str:
    """`120/500 done, 2 failed, 34.1 requests/s, ...`."""
    parts = [
        f"{progress.done:,}/{progress.total:,} done",
        f"{progress.failed:,} failed",
        f"{progress.requests_per_s:,.1f} requests/s",
        f"{progress.prompt_tokens_per_s:,.0f} prompt tokens/s",
        f"{progress.output_tokens_per_s:,.0f} output tokens/s",
    ]
    if progress.eta_s is not None and progress.done < progress.total:
        parts.append(f"{duration(progress.eta_s)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03`, or `1.2 s` below a minute."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
