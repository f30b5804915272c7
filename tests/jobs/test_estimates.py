from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from batchline.batch.rates import MeasuredRun
from batchline.jobs.estimates import Estimate, FileMeasure, Pace, Paces

CHAT = "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def chat(text: str = "x" * 400, model: str = "m", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def measure_of(*bodies: dict[str, Any]) -> FileMeasure:
    measure = FileMeasure()
    for position, body in enumerate(bodies):
        measure(position, CHAT, body)
    return measure


def running(pace: Pace, seconds: int, *, batch_id: str = "b", start: float = 0.0) -> None:
    """A batch that answers a request of 100 prompt tokens with 50 tokens each second."""
    for second in range(seconds + 1):
        pace.note_totals(batch_id, (second, 100 * second, 50 * second), start + second)
    pace.note_end(batch_id)


def test_without_a_measurement_no_time_is_invented() -> None:
    measure = measure_of(chat(), chat())
    assert Pace().estimate(measure.counts) == Estimate(input_tokens=200)
    fixed = measure_of(chat(max_tokens=7, ignore_eos=True))
    assert Pace().estimate(fixed.counts) == Estimate(input_tokens=100, output_tokens=7)


def test_a_batch_like_those_before_takes_as_long_per_request() -> None:
    pace = Pace()
    running(pace, 60)
    estimate = pace.estimate(measure_of(*[chat()] * 600).counts)
    assert (estimate.input_tokens, estimate.output_tokens) == (60_000, 30_000)
    assert estimate.seconds == pytest.approx(600, rel=1e-3)
    limited = pace.estimate(measure_of(*[chat(max_tokens=25)] * 600).counts)
    assert (limited.output_tokens, limited.seconds) == (15_000, pytest.approx(400, rel=1e-3))


def test_batches_at_once_count_their_time_once() -> None:
    pace = Pace()
    for second in range(61):
        for batch_id in ("a", "b"):
            pace.note_totals(batch_id, (second, 100 * second, 50 * second), float(second))
    assert pace.estimate(measure_of(*[chat()] * 600).counts).seconds == pytest.approx(300, rel=0.02)


def test_time_without_batches_and_results_of_an_earlier_process_do_not_count() -> None:
    pace = Pace()
    running(pace, 60)
    before = pace.estimate(measure_of(chat()).counts)
    pace.note_totals("resumed", (1_000_000, 10**9, 10**9), 9000.0)
    assert pace.estimate(measure_of(chat()).counts) == before


def test_newer_measurements_replace_older_ones() -> None:
    pace = Pace()
    running(pace, 600)
    for second in range(3601):
        pace.note_totals("slow", (second // 10, 10 * second, 5 * second), 1000.0 + second)
    assert pace.estimate(measure_of(chat()).counts).seconds == pytest.approx(10, rel=0.1)


def test_prompts_of_finished_batches_correct_the_guess() -> None:
    pace = Pace()
    pace.note_prompts(guessed=100, counted=150)
    assert pace.estimate(measure_of(chat()).counts).input_tokens == 150


def test_an_earlier_run_on_this_machine_is_a_start() -> None:
    run = MeasuredRun(
        model="folder",
        dtype="float32",
        quantization="none",
        device="cpu",
        requests=60,
        prompt_tokens=6000,
        output_tokens=3000,
        run_time_s=60.0,
        load_time_s=5.0,
        measured_at=datetime.now(timezone.utc),
    )
    paces = Paces()
    running(paces.of("measured"), 600)
    paces.begin_with({"m": run, "measured": run.model_copy(update={"run_time_s": 1e9})})
    for model in ("m", "measured"):
        assert paces.of(model).estimate(measure_of(chat()).counts).seconds == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    "bodies",
    [
        [chat(model="m"), chat(model="other")],
        [chat(), {"model": "m", "messages": [{"role": "user", "content": [IMAGE]}]}],
    ],
    ids=["several models", "an image"],
)
def test_files_whose_work_is_not_known_from_their_text_have_no_estimate(bodies: list[dict[str, Any]]) -> None:
    assert measure_of(chat()).model == "m"
    assert measure_of(*bodies).model is None


def test_a_line_that_is_too_odd_to_count_does_not_end_the_check() -> None:
    measure = measure_of(chat(), {"model": "m", "messages": [{"role": "user", "content": "a"}], "min_tokens": 10**400})
    assert measure.model == "m"
    assert measure.counts.prompt >= 100
