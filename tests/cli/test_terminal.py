from __future__ import annotations

import pytest

from batchline.batch.progress import Progress
from batchline.cli import terminal
from batchline.cli.live_bar import LiveBar


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.0 s"), (59.94, "59.9 s"), (60, "1:00"), (3599, "59:59"), (3723, "1:02:03")]
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert terminal.duration(seconds) == text


def test_progress_names_everything_a_waiting_person_wants() -> None:
    progress = Progress(
        done=120,
        total=5000,
        failed=2,
        resumed=0,
        requests_per_s=34.11,
        prompt_tokens_per_s=1200.4,
        output_tokens_per_s=800.0,
        eta_s=143.0,
    )
    assert terminal.progress_text(progress) == (
        "120/5,000 done, 2 failed, 34.1 requests/s, 1,200 prompt tokens/s, 800 output tokens/s, 2:23 left"
    )


def test_lines_come_every_few_seconds_and_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    reporter = terminal.LineReporter()
    for done in range(1, 12):
        reporter.progress(Progress(done=done, total=11, failed=0, resumed=0))
        now += 1.0
    shown = [text.split("/")[0] for text in capsys.readouterr().err.splitlines()]
    assert shown == ["1", "6", "11"]


def test_the_live_bar_shows_counts_rates_and_warnings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    with LiveBar() as bar:
        bar.phase("Running [3] requests")
        bar.warn("line 2 is [bad]")
        bar.progress(Progress(done=1, total=3, failed=1, resumed=0, requests_per_s=2.0, eta_s=1.0))
    shown = capsys.readouterr().err
    assert "line 2 is [bad]" in shown
    assert "Running [3] requests" in shown
    assert "1 failed  2.0 req/s" in shown
