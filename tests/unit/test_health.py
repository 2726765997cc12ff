"""When a tier is taken out of service, probed, and put back."""

from __future__ import annotations

import errno
import os

from hypothesis import given
from hypothesis import strategies as st

from monarchfs.cache.health import (
    CALM_SECONDS,
    FIRST_PROBE_SECONDS,
    LAST_PROBE_SECONDS,
    NOT_THE_TIERS,
    Health,
)


def error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def test_a_failed_write_takes_it_out_but_what_it_holds_is_served() -> None:
    health = Health()
    assert health.failed(5.0, error(errno.ENOSPC), reading=False)
    assert health.reason is not None
    assert "full" in health.reason
    assert health.since == 5.0
    assert health.readable
    assert not health.failed(6.0, error(errno.EIO), reading=False), "it is out already"


def test_a_failed_disk_is_not_read_either() -> None:
    health = Health()
    assert health.failed(0.0, error(errno.EIO), reading=True)
    assert not health.readable
    assert health.probed(1.0, None)
    assert health.readable


def test_one_lost_replica_and_errors_of_the_process_say_nothing_of_the_tier() -> None:
    health = Health()
    for code in (errno.ESTALE, errno.EACCES, *NOT_THE_TIERS):
        assert not health.failed(0.0, error(code), reading=True)
    for code in NOT_THE_TIERS:
        assert not health.failed(0.0, error(code), reading=False)
    assert health.reason is None


def test_it_is_probed_after_a_second_and_then_less_and_less_often() -> None:
    health = Health()
    health.failed(0.0, error(errno.EDQUOT), reading=False)
    now, waits = 0.0, []
    for _ in range(10):
        start = now
        while not health.probe_due(now):
            now += 0.5
        waits.append(now - start)
        assert not health.probed(now, error(errno.EROFS))
        assert health.reason is not None
        assert "read-only" in health.reason
    assert waits[0] == FIRST_PROBE_SECONDS
    assert waits == sorted(waits)
    assert waits[-1] == LAST_PROBE_SECONDS


def test_one_that_fails_again_at_once_is_probed_later() -> None:
    health = Health()
    health.failed(0.0, error(errno.EDQUOT), reading=False)
    assert health.probed(1.0, None)
    health.failed(1.5, error(errno.EDQUOT), reading=False)
    assert not health.probe_due(1.5 + FIRST_PROBE_SECONDS)
    assert health.probe_due(1.5 + 2 * FIRST_PROBE_SECONDS)
    assert health.probed(5.0, None)
    health.failed(5.0 + CALM_SECONDS, error(errno.EDQUOT), reading=False)
    assert health.probe_due(5.0 + CALM_SECONDS + FIRST_PROBE_SECONDS)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["fail", "read", "probe"]),
            st.sampled_from([None, errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ESTALE]),
            st.floats(0.0, 100.0),
        )
    )
)
def test_it_always_comes_back(steps: list[tuple[str, int | None, float]]) -> None:
    """Whatever happened: in service, or probed within the longest interval; a probe that succeeds
    puts it back."""
    health, now = Health(), 0.0
    for what, code, passed in steps:
        now += passed
        if what == "probe":
            back = health.probed(now, None if code is None else error(code))
            assert back == (code is None) or health.reason is None
        elif code is not None:
            health.failed(now, error(code), reading=what == "read")
        assert health.readable or health.reason is not None
    if health.reason is not None:
        assert health.probe_due(now + LAST_PROBE_SECONDS)
        assert health.probed(now + LAST_PROBE_SECONDS, None)
    assert health.reason is None
