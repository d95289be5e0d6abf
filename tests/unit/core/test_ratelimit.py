"""Token buckets: what is let through, what is told, and how much is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cloche_server.core.ratelimit import RateLimiter


@given(
    st.integers(1, 6000),
    st.integers(1, 50),
    st.lists(st.floats(0, 30, allow_nan=False), min_size=1, max_size=200),
)
def test_never_more_than_burst_and_rate(per_minute: int, burst: int, gaps: list[float]) -> None:
    """In any span no more pass than the burst and what has come back in it; who waits as told is let through."""
    limiter, now, passed = RateLimiter(per_minute, burst), 1000.0, []
    for gap in gaps:
        now += gap
        verdict = limiter.take("k", now)
        assert 0 <= verdict.remaining < burst
        if verdict.allowed:
            passed.append(now)
        else:
            now += verdict.retry_after
            assert limiter.take("k", now).allowed
            passed.append(now)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            span = passed[last] - passed[first]
            assert last - first + 1 <= burst + span * per_minute / 60 + 1e-3


def test_remaining_and_reset() -> None:
    limiter = RateLimiter(60, 3)
    assert [limiter.take("a", 0.0).remaining for _ in range(3)] == [2, 1, 0]
    refused = limiter.take("a", 0.0)
    assert (refused.allowed, refused.remaining, refused.reset, refused.retry_after) == (False, 0, 3, 1)
    assert limiter.take("b", 0.0).remaining == 2, "another key has a bucket of its own"
    assert limiter.take("a", 3.0).remaining == 2, "it is full again"


def test_any_number_of_keys_takes_bounded_memory() -> None:
    limiter = RateLimiter(60, 3, max_keys=100)
    for number in range(1000):
        limiter.take(str(number), 0.0)
    assert len(limiter) == 100
