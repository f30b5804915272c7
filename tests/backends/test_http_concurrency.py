"""How many requests a server gets at once, found out by its throughput (`backends/http/concurrency.py`)."""

from __future__ import annotations

import pytest

from batchline.backends.http.concurrency import AdaptiveLimit

FIRST = 8


def driven(limit: AdaptiveLimit, capacity: int, seconds: float, *, latency_s: float = 0.5, now: float = 0.0) -> float:
    """Keep a server busy that computes `capacity` requests at once, each in `latency_s`. Returns the time after it."""
    end = now + seconds
    while now < end:
        num_together = limit.limit
        for number in range(num_together):
            now += latency_s / min(num_together, capacity)
            limit.on_answer(now, num_together - 1)
            if limit.limit != num_together and number:
                break
    return now


@pytest.mark.parametrize("capacity", [16, 64, 256, 1000])
def test_it_finds_what_a_server_computes_at_once(capacity: int) -> None:
    limit = AdaptiveLimit(2048, FIRST)
    driven(limit, capacity, 120)
    assert capacity <= limit.limit <= 4 * capacity


def test_it_stays_where_it_is_when_more_does_not_help() -> None:
    limit = AdaptiveLimit(2048, FIRST)
    now = driven(limit, 64, 100)
    for _ in range(20):
        now = driven(limit, 64, 50, now=now)
        assert 64 <= limit.limit <= 256


@pytest.mark.parametrize(("num_together", "latency_s"), [(20, 2.0), (20, 0.2), (16, 4.0), (64, 1.0)])
def test_a_server_that_answers_in_bursts_is_not_flooded(num_together: int, latency_s: float) -> None:
    """Short windows took a burst at their end for a higher throughput, and raised the limit to ten times what helps. At
    the end of a run, everything waited for the queue of the slowest server."""
    limit = AdaptiveLimit(2048, FIRST)
    now, highest, num_answers = 0.0, 0, 0
    while now < 120:
        now += latency_s
        burst = min(limit.limit, num_together)
        for _ in range(burst):
            limit.on_answer(now, limit.limit - 1)
        highest = max(highest, limit.limit)
        num_answers += burst
    assert highest <= 5 * num_together
    assert num_answers >= 0.9 * num_together * 120 / latency_s


def test_a_limit_that_settled_too_low_grows_as_fast_as_at_first() -> None:
    limit = AdaptiveLimit(2048, FIRST)
    now = driven(limit, 16, 60)
    assert limit.limit < 100
    now = driven(limit, 1024, 60, now=now)
    assert limit.limit >= 1024


@pytest.mark.parametrize(("before", "after", "latency_s"), [(64, 512, 0.4), (32, 256, 10.0), (8, 16, 5.0)])
def test_a_server_that_becomes_faster_gets_more_within_a_few_windows(before: int, after: int, latency_s: float) -> None:
    """A settled limit was raised only 16 windows later: after minutes, where an answer takes ten seconds."""
    limit = AdaptiveLimit(2048, FIRST)
    now = driven(limit, before, 300 * latency_s, latency_s=latency_s)
    window_s = 4 * limit.limit * latency_s / before
    for _ in range(7):
        now = driven(limit, after, window_s, latency_s=latency_s, now=now)
        if limit.limit >= after:
            return
    raise AssertionError(f"the limit is {limit.limit}")


def test_a_higher_throughput_at_a_settled_limit_is_followed_by_a_trial_at_once() -> None:
    limit = AdaptiveLimit(2048, FIRST)
    now = driven(limit, 64, 200)
    settled = limit.limit
    while limit.limit != settled or not limit._num_windows_to_trial:  # a trial has just failed
        now = driven(limit, 64, 0.1, now=now)
        settled = min(settled, limit.limit)
    for _ in range(2 * 4 * settled):
        now += 0.5 / settled
        limit.on_answer(now, limit.limit - 1)
        if limit.limit > settled:
            return
    raise AssertionError("no trial in two windows")


def test_a_small_server_is_not_flooded() -> None:
    limit = AdaptiveLimit(2048, FIRST)
    driven(limit, 1, 600)
    assert limit.limit <= 2 * FIRST


def test_an_overload_counts_once_for_the_requests_that_were_in_flight_together() -> None:
    limit = AdaptiveLimit(2048, 100)
    for left in range(99, 49, -1):
        limit.on_overload(1.0, left)
    assert limit.limit == 70


def test_it_recovers_slowly_after_an_overload() -> None:
    limit = AdaptiveLimit(2048, FIRST)
    now = driven(limit, 64, 100)
    limit.on_overload(now, limit.limit - 1)
    lowered = limit.limit
    driven(limit, 64, 100, now=now)
    assert limit.limit > lowered


def test_it_never_leaves_its_bounds() -> None:
    limit = AdaptiveLimit(4, FIRST)
    assert limit.limit == 4
    driven(limit, 64, 100)
    assert limit.limit == 4
    for number in range(50):
        limit.on_overload(float(number), 0)
    assert limit.limit == 1


def test_it_does_not_grow_while_few_requests_come() -> None:
    limit = AdaptiveLimit(2048, FIRST)
    for number in range(10_000):
        limit.on_answer(number / 10, 2)
    assert limit.limit == FIRST


def test_a_server_that_was_away_begins_with_few_requests() -> None:
    limit = AdaptiveLimit(2048, FIRST)
    driven(limit, 256, 100)
    limit.restart()
    assert limit.limit == FIRST
