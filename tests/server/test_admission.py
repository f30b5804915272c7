"""When a refused client should try again: an estimate from the work in the server and the rate at which it finishes."""

from __future__ import annotations

import pytest
from starlette.types import Receive, Scope, Send

from batchline.errors import Overloaded
from batchline.openai_api.endpoint_table import CHAT
from batchline.server.admission import LONGEST_RETRY_S, Admission, Pace
from batchline.server.metrics import Metrics
from batchline.testing import FakeBackend


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pace_of(clock: Clock, *, num_running: int, seconds_each: float) -> Pace:
    """After some sequences that took so long, with others behind them."""
    pace = Pace(clock)
    pace.begin(num_running + 20)
    for _ in range(20):
        clock.now += seconds_each
        pace.finish()
    return pace


@pytest.mark.parametrize(
    ("num_running", "seconds_each", "retry_after_s"),
    [(100, 0.25, 13), (100, 0.001, 1), (7, 1.0, 4), (1000, 1.0, LONGEST_RETRY_S), (0, 5.0, 1)],
)
def test_half_of_the_work_is_done_by_then(num_running: int, seconds_each: float, retry_after_s: int) -> None:
    """Bug: Retry-After was always 1, so that all refused clients came back each second."""
    pace = pace_of(Clock(), num_running=num_running, seconds_each=seconds_each)
    assert pace.retry_after_s == retry_after_s


def test_time_without_work_does_not_count() -> None:
    clock = Clock()
    pace = pace_of(clock, num_running=0, seconds_each=0.125)
    clock.now += 3600
    pace.begin(100)
    clock.now += 0.125
    pace.finish()
    assert pace.retry_after_s == 7


def test_the_estimate_follows_a_change_of_the_rate() -> None:
    clock = Clock()
    pace = pace_of(clock, num_running=300, seconds_each=0.0078125)
    for _ in range(100):
        clock.now += 0.25
        pace.finish()
    assert pace.retry_after_s == 25


async def test_whoever_is_refused_learns_the_estimate() -> None:
    """Whatever the reason is: requests, connections, large bodies or responses in the background."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        raise Overloaded("Too much")

    async def nothing(*_: object) -> dict[str, object]:
        return {}

    pace = pace_of(Clock(), num_running=100, seconds_each=0.25)
    admission = Admission(refuse, Metrics(FakeBackend().stats), 5, {CHAT}, pace)
    with pytest.raises(Overloaded, match="Too much") as refused:
        await admission({"type": "http", "path": CHAT, "method": "POST"}, nothing, nothing)
    assert refused.value.retry_after_s == 13
    assert (admission.num_in_flight, pace.num_running) == (0, 100)
