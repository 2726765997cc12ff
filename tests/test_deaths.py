"""What follows a worker's death, and when one is taken to hang: lists of events, no processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.supervisor.deaths import (
    LONG_LIFE_SECONDS,
    MOST_EARLY,
    MOST_IN_SAFE_MODE,
    PAUSES_SECONDS,
    Deaths,
    Follows,
    Life,
    Verdict,
)
from monarchfs.supervisor.pulse import BUSY_SECONDS, DEAD_SILENT_SECONDS, Pulse, Signs

GOOD = Life(5.0, answered=True, waited=True)
IDLE = Life(5.0, answered=False, waited=False)
USELESS = Life(5.0, answered=False, waited=True)
NEVER_READY = Life(None, answered=False, waited=False)
EARLY = Life(0.1, answered=True, waited=True)
LONG = Life(LONG_LIFE_SECONDS, answered=True, waited=True)
AT_ONCE = Verdict(Follows.START)
SAFE = Verdict(Follows.START_SAFE)
END = Verdict(Follows.END)


def after(*lives: Life) -> list[Verdict]:
    deaths = Deaths()
    return [deaths.died(life) for life in lives]


def test_what_worked_is_replaced_at_once_however_often() -> None:
    assert after(*[GOOD, IDLE, LONG] * 500) == [AT_ONCE] * 1500


@pytest.mark.parametrize("life", [USELESS, NEVER_READY])
def test_lives_without_use(life: Life) -> None:
    pauses = [Verdict(Follows.START, seconds) for seconds in PAUSES_SECONDS]
    in_safe_mode = [Verdict(Follows.START_SAFE, seconds) for seconds in PAUSES_SECONDS[1:]]
    assert after(*[life] * 7) == [*pauses, SAFE, *in_safe_mode, END]


def test_short_lives_are_a_loop_whatever_they_answered() -> None:
    verdicts = after(*[EARLY] * (MOST_EARLY + MOST_IN_SAFE_MODE))
    assert verdicts[: MOST_EARLY - 1] == [AT_ONCE] * (MOST_EARLY - 1)
    assert verdicts[MOST_EARLY - 1] == SAFE
    assert verdicts[-1] == END


def test_one_good_life_ends_a_row() -> None:
    assert after(*[USELESS, USELESS, USELESS, GOOD] * 5)[-1] == AT_ONCE
    assert after(*[*[EARLY] * (MOST_EARLY - 1), GOOD] * 5)[-1] == AT_ONCE


def test_safe_mode_is_not_left_by_itself() -> None:
    verdicts = after(*[USELESS] * 4, GOOD, LONG, GOOD)
    assert [verdict.follows for verdict in verdicts[3:]] == [Follows.START_SAFE] * 4


def test_a_long_life_in_safe_mode_ends_its_count() -> None:
    assert after(*[USELESS] * 4, *[USELESS, USELESS, LONG] * 3)[-1].follows is Follows.START_SAFE
    assert after(*[USELESS] * 4, *[USELESS, GOOD] * 3)[-2] == END


def test_a_worker_that_is_replaced_on_purpose_leaves_safe_mode() -> None:
    deaths = Deaths()
    for life in [USELESS] * 5:
        deaths.died(life)
    assert deaths.safe
    deaths.replaced()
    assert deaths.died(USELESS) == AT_ONCE


LIVES = st.builds(
    Life,
    st.one_of(st.none(), st.floats(0, 2 * LONG_LIFE_SECONDS)),
    answered=st.booleans(),
    waited=st.booleans(),
)


@given(st.lists(LIVES, max_size=60))
def test_nothing_goes_on_for_ever_and_nothing_ends_without_need(lives: list[Life]) -> None:
    deaths, row, verdict = Deaths(), 0, AT_ONCE
    for life in lives:
        verdict = deaths.died(life)
        bad = life.seconds is None or life.seconds < 0.5 or (life.waited and not life.answered)
        row = row + 1 if bad else 0
        assert 0 <= verdict.pause_seconds <= max(PAUSES_SECONDS)
        assert deaths.safe == (verdict.follows is not Follows.START)
        if not bad:
            assert verdict.pause_seconds in (0, *PAUSES_SECONDS[1:])
        assert row < MOST_EARLY + MOST_IN_SAFE_MODE or verdict.follows is Follows.END
        if verdict.follows is Follows.END:
            assert bad
            return


# -- hanging


def looks(*steps: tuple[float, Signs]) -> list[float]:
    """When a worker is taken to hang, of these looks (seconds after the one before, signs)."""
    now, found = 100.0, []
    pulse = Pulse(now)
    for step, signs in steps:
        now += step
        if pulse.look(signs, now) is not None:
            found.append(now - 100.0)
    return found


def test_one_that_beats_does_not_hang() -> None:
    assert looks(*[(0.5, Signs(n, 100)) for n in range(100)]) == []


def test_one_that_is_silent_while_requests_wait() -> None:
    assert looks((0.5, Signs(7, 3)), *[(0.5, Signs(7, 3))] * 8)[0] == 3.5
    assert looks((0.5, Signs(7, 0)), *[(0.5, Signs(7, 0))] * 18) == []
    for waiting in (0, None):
        found = looks((0.5, Signs(7, waiting)), *[(0.5, Signs(7, waiting))] * 30)
        assert found[0] == 0.5 + DEAD_SILENT_SECONDS


def test_who_was_stopped_with_it_does_not_blame_it() -> None:
    """A frozen control group thaws its processes one by one."""
    assert looks((0.5, Signs(7, 3)), (3600.0, Signs(7, 3)), (0.5, Signs(8, 3))) == []
    busy = Signs(7, 3, stuck_since=5)
    assert looks((0.5, busy), (3600.0, busy._replace(beats=8))) == []


def test_threads_that_are_all_busy_for_long() -> None:
    def steps(stuck: int) -> list[tuple[float, Signs]]:
        return [(0.5, Signs(n, 3, stuck_since=stuck)) for n in range(30)]

    assert looks(*steps(5))[0] == 0.5 + BUSY_SECONDS
    assert looks(*steps(0)) == []
    assert looks(*[(0.5, Signs(n, 3, stuck_since=n + 1)) for n in range(60)]) == []
