"""How fast files are copied that nobody waits for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.prefetch.rate_limiter import BURST_SECONDS, RateLimiter


@given(
    st.integers(1, 1 << 30),
    st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 10)), min_size=1, max_size=50),
)
def test_the_rate_is_kept_whatever_is_copied(rate: int, reads: list[tuple[int, float]]) -> None:
    rate_limiter, now, total = RateLimiter(rate), 0.0, 0
    for size, idle in reads:
        now += idle
        wait = rate_limiter.wait(now)
        now += wait
        # Whoever waits as long as it says may begin.
        assert rate_limiter.wait(now + 1e-6) == pytest.approx(0, abs=1e-5)
        # What was begun before is within the rate, but for what may be taken at once.
        assert total <= rate * (now + BURST_SECONDS) * (1 + 1e-6) + 1
        rate_limiter.began(now, size)
        total += size
