"""How fast files are copied that nobody waits for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.prefetch.rate_limiter import BURST_SECONDS, RECOVER_SECONDS, RateLimiter


def test_so_many_at_once_and_no_more() -> None:
    rate_limiter = RateLimiter(0, 2)
    for _ in range(2):
        assert rate_limiter.wait(0) == 0
        rate_limiter.began(0, 1 << 30)
    assert rate_limiter.wait(100) is None
    rate_limiter.ended()
    assert rate_limiter.wait(0) == 0


@given(
    st.integers(1, 1 << 30),
    st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 10)), min_size=1, max_size=50),
)
def test_the_rate_is_kept_whatever_is_copied(rate: int, reads: list[tuple[int, float]]) -> None:
    rate_limiter, now, total = RateLimiter(rate, 4), 0.0, 0
    for size, idle in reads:
        now += idle
        wait = rate_limiter.wait(now)
        assert wait is not None
        now += wait
        # Whoever waits as long as it says may begin.
        assert rate_limiter.wait(now + 1e-6) == pytest.approx(0, abs=1e-5)
        # What was begun before is within the rate, but for what may be taken at once.
        assert total <= rate * (now + BURST_SECONDS) * (1 + 1e-6) + 1
        rate_limiter.began(now, size)
        total += size
        rate_limiter.ended()


def test_it_steps_back_when_the_source_gets_slow_and_comes_back() -> None:
    rate_limiter, now = RateLimiter(0, 4), 0.0
    for _ in range(20):
        rate_limiter.record_latency(now := now + 0.01, 0.01, 1 << 20)
    assert rate_limiter.slots == 4
    slots = []
    for _ in range(20):
        rate_limiter.record_latency(now := now + 0.2, 0.2, 1 << 20)
        slots.append(rate_limiter.slots)
    assert min(slots) == 1
    assert rate_limiter.wait(now) == pytest.approx(
        0.2
    )  # the one that is left does not run all the time
    for _ in range(200):
        rate_limiter.record_latency(now := now + 0.02, 0.02, 1 << 20)
    assert rate_limiter.slots == 4
    assert rate_limiter.wait(now) == 0


def test_our_own_copies_side_by_side_are_not_what_makes_it_slow() -> None:
    rate_limiter, now = RateLimiter(0, 4), 0.0
    rate_limiter.record_latency(now, 0.01, 1 << 20)  # alone
    for _ in range(1000):
        rate_limiter.record_latency(now := now + 0.01, 0.04, 1 << 20)  # four share the bandwidth
        assert rate_limiter.slots == 4


def test_sizes_are_not_compared_with_each_other() -> None:
    rate_limiter = RateLimiter(0, 4)
    for number in range(100):
        now = number * 0.1
        rate_limiter.record_latency(now, 0.0005, 4096)
        rate_limiter.record_latency(now, 0.06, 8 << 20)
        assert rate_limiter.slots == 4


def test_a_source_that_is_slower_for_good_is_the_new_measure() -> None:
    rate_limiter, now = RateLimiter(0, 4), 0.0
    rate_limiter.record_latency(now, 0.01, 1 << 20)
    for _ in range(3000):
        rate_limiter.record_latency(now := now + RECOVER_SECONDS, 0.1, 1 << 20)
    assert rate_limiter.slots == 4
