"""The live progress bar of a terminal, with warnings and log records above it."""

from __future__ import annotations

import logging
from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from batchline.batch import progress
from batchline.cli.terminal import duration


class LiveBar:
    """A `batch.progress.Reporter` for terminals. Use as a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[counts]}"),
            TextColumn("{task.fields[rates]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("Starting", total=None, counts="", rates="")
        self._handler = RichHandler(console=self._console, show_path=False, level=logging.WARNING)

    def __enter__(self) -> LiveBar:
        logging.getLogger().addHandler(self._handler)
        self._bar.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError, ValueError):  # a terminal that is gone
            self._bar.stop()
        logging.getLogger().removeHandler(self._handler)

    def phase(self, text: str) -> None:
        """Shown before the bar, and left standing above it."""
        self._console.print(escape(text), style="dim", highlight=False)
        self._bar.update(self._task, description=escape(text))

    def warn(self, text: str) -> None:
        """Shown above the bar."""
        self._console.print(f"[yellow]Warning:[/] {escape(text)}", highlight=False)

    def progress(self, progress: progress.Progress) -> None:
        """The bar's new state."""
        rates = (
            f"{progress.failed:,} failed  {progress.requests_per_s:,.1f} req/s  "
            f"{progress.prompt_tokens_per_s:,.0f} prompt tok/s  {progress.output_tokens_per_s:,.0f} output tok/s"
        )
        if progress.eta_s is not None:
            rates += f"  {duration(progress.eta_s)} left"
        counts = f"{progress.done:,}/{progress.total:,}"
        self._bar.update(self._task, total=progress.total, completed=progress.done, counts=counts, rates=rates)
