"""The summary at the end of a run, for people, on standard error."""

from __future__ import annotations

from datetime import datetime

from batchline.batch.summary import RunSummary
from batchline.cli.terminal import duration, tell


def print_summary(summary: RunSummary) -> None:
    """The end of a run, for people."""
    for line in summary_lines(summary):
        tell(line)


def summary_lines(summary: RunSummary) -> list[str]:
    """The summary's lines; what is zero is left out."""
    codes = ", ".join(f"{count:,} x {code}" for code, count in summary.failures_by_code.items())
    lines = [] if summary.finished_before is None else [_already_complete(summary.finished_before)]
    lines += [
        f"Requests       {summary.requests:,}",
        f"Succeeded      {summary.succeeded:,}",
        f"Failed         {summary.failed:,}" + (f" ({codes})" if codes else ""),
        f"Prompt tokens  {summary.prompt_tokens:,} ({summary.prefix_cache_hit_rate:.1%} from the prefix cache)",
        f"Output tokens  {summary.output_tokens:,}",
    ]
    if summary.deduplicated:
        lines.append(f"Deduplicated   {summary.deduplicated:,} requests served by an identical one's answer")
    if summary.resumed:
        lines.append(f"Resumed        {summary.resumed:,} requests done by an earlier run")
    lines += [f"Model          {model.text}" for model in summary.models]
    lines.append(f"Wall time      {duration(summary.wall_time_s)}")
    lines.append(f"Output         {'standard output' if summary.output == '-' else summary.output}")
    if summary.error_file:
        lines.append(f"Failed lines   {summary.error_file}")
    if summary.has_only_failures:
        lines.append("Every request failed (exit code 3).")
    return lines


def _already_complete(finished_at: datetime) -> str:
    when = finished_at.astimezone().strftime("%Y-%m-%d %H:%M")
    return f"Already complete: finished on {when}, the output is unchanged. --overwrite computes it again."
