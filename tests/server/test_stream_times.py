"""The mean time between a stream's chunks is that of its output, whatever stands around it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from batchline.backends.base import BackendStats
from batchline.server.metrics import Metrics


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


@pytest.mark.parametrize(
    "outputs",
    [
        [delta(reasoning="a"), delta(reasoning="b"), delta(content="c")],
        [delta(tool_calls=[{"index": 0}])] * 3,
        [{"type": "response.reasoning_text.delta"}, {"type": "response.output_text.delta"}] * 2,
        [{"type": "response.function_call_arguments.delta"}] * 3,
        [{"choices": [{"index": 0, "text": "a"}]}] * 3,
    ],
)
async def test_the_time_is_from_the_first_output_to_the_last(
    outputs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reasoning counted as time, but not as output: ten seconds of it made a second for each of ten chunks."""
    now = 0.0
    monkeypatch.setattr("batchline.server.metrics.perf_counter", lambda: now)
    metrics = Metrics(BackendStats)

    async def chunks() -> AsyncIterator[Mapping[str, Any]]:
        nonlocal now
        now = 5.0
        yield delta(role="assistant", content="")
        now = 100.0
        for chunk in outputs:
            now += 2.0
            yield chunk
        now = 300.0
        yield delta()

    assert len([chunk async for chunk in metrics.timed("/x", chunks())]) == len(outputs) + 2
    lines = metrics.render().decode().splitlines()
    assert 'batchline_time_per_output_token_seconds_sum{endpoint="/x"} 2.0' in lines
    assert 'batchline_time_to_first_token_seconds_sum{endpoint="/x"} 5.0' in lines
