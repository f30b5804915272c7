"""When a server wants the next request: `Retry-After` and rate-limit headers in the spellings of the field."""

from __future__ import annotations

import pytest

from batchline.backends.http.rate_limits import MAX_WAIT_S, exhausted_wait_s, requested_wait_s

NOW = 1_700_000_000.0  # 2023-11-14 22:13:20 GMT


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0),
        ({"retry-after": "7"}, 7),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "Tue, 14 Nov 2023 22:13:50 GMT"}, 30),
        ({"retry-after": "Tue, 14 Nov 2023 22:13:00 GMT"}, 0),
        ({"retry-after": "soon"}, 0),
        ({"retry-after": "-5"}, 0),
        ({"retry-after": "9" * 400}, 0),
        ({"retry-after": "99999999999"}, MAX_WAIT_S),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"x-ms-retry-after-ms": "20"}, 0.02),
    ],
)
def test_a_requested_wait_is_read_in_all_its_forms(headers: dict[str, str], seconds: float) -> None:
    assert requested_wait_s(headers, NOW) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 360),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1h2m3.5s"}, 3723.5),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "20ms"}, 0.02),
        ({"x-ratelimit-remaining-tokens": "5", "x-ratelimit-reset-tokens": "20s"}, 0),
        (
            {
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "1s",
                "x-ratelimit-remaining-tokens": "-3",
                "x-ratelimit-reset-tokens": "4s",
            },
            4,
        ),
        (
            {
                "anthropic-ratelimit-input-tokens-remaining": "0",
                "anthropic-ratelimit-input-tokens-reset": "2023-11-14T22:14:20Z",
                "anthropic-ratelimit-requests-remaining": "9",
                "anthropic-ratelimit-requests-reset": "2023-11-14T23:14:20Z",
            },
            60,
        ),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "30"}, 30),
        ({"ratelimit-remaining": "0", "ratelimit-reset": "30"}, 30),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1700000010"}, 10),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1700000010000"}, 10),
        ({"x-ratelimit-remaining": "0"}, 0),
        ({"x-ratelimit-remaining": "none", "x-ratelimit-reset": "30"}, 0),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "whenever"}, 0),
    ],
)
def test_a_limit_that_is_used_up_is_waited_for(headers: dict[str, str], seconds: float) -> None:
    assert exhausted_wait_s(headers, NOW) == pytest.approx(seconds)
