"""A batch at a service, as the progress of a run: what its counts say, and how fast they grow."""

from __future__ import annotations

from batchline.backends.base import BackendStats
from batchline.batch.progress import Reporter, Tally
from batchline.client.objects import BatchObject


class BatchProgress:
    """Shows a batch through the reporter of a run."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._status = ""
        self._tally: Tally | None = None

    def look(self, batch: BatchObject) -> None:
        """Show a state of the batch."""
        counts = batch.counts
        if batch.status != self._status:
            self._status = batch.status
            self._reporter.phase(f"{batch.id}: {batch.status}")
        if not counts.total:
            return
        if self._tally is None:
            self._tally = Tally(counts.total)
        self._tally.total = counts.total
        self._tally.done = min(counts.total, counts.completed + counts.failed)
        self._tally.failed = counts.failed
        usage = batch.usage or {}
        tokens = [
            number if isinstance(number := usage.get(name), int) else 0 for name in ("input_tokens", "output_tokens")
        ]
        self._reporter.progress(self._tally.snapshot(BackendStats(prompt_tokens=tokens[0], output_tokens=tokens[1])))
