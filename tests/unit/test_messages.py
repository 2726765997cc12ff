"""What a worker's words become: one of a few types, whatever they are; and how many are logged."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monarchfs.supervisor.messages import (
    MOST_OFFERED,
    MOST_WORDS,
    Back,
    Failed,
    MalformedMessage,
    Message,
    Offer,
    Ready,
    StatusReport,
    Unback,
    WorkerLoaded,
    parse,
    printable,
)
from monarchfs.supervisor.worker_logging import (
    LINES_AT_ONCE,
    LINES_PER_SECOND,
    Throttle,
    WorkerLogging,
)
from tests.support.fake_mounts import is_plain

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)
KEYS = st.sampled_from(["event", "number", "files", "ids", "error", "status"])
EVENTS = st.sampled_from(["failed", "back", "unback", "status", "loaded", "ready"])
MESSAGES = st.builds(
    lambda fields, event: json.dumps({**fields, "event": event}).encode(),
    st.dictionaries(KEYS | st.text(max_size=3), VALUES, max_size=5),
    EVENTS | VALUES,
)


@given(MESSAGES | st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b'{"event":"status","number":1,"status":{"files":' + b"[" * 980 + b"]" * 980 + b"}}")
@example(b'{"event":"status","number":1,"status":' + b'{"a":' * 990 + b"1" + b"}" * 990 + b"}")
@example(b"1" * 5000)
@example("{}".encode("utf-16"))
def test_whatever_comes_is_one_of_a_few(content: bytes) -> None:
    message = understood(content)
    match message:
        case str(why):
            assert why.isprintable()
            assert len(why) < 300
        case StatusReport(number, status, dropped):
            assert 0 <= number < 1 << 64
            assert dropped >= 0
            assert is_plain(status)
            # Whoever asks gets it, with a little around it.
            assert json.loads(json.dumps({"result": status}, allow_nan=False))
        case Failed(error):
            assert error.isprintable()
            assert len(error) < 12 * MOST_WORDS
        case Back(number, offers):
            assert 0 <= number < 1 << 64
            assert len(offers) <= MOST_OFFERED
        case Unback(number, ids):
            assert 0 <= number < 1 << 64
            assert all(type(one) is int for one in ids)
        case _:
            assert isinstance(message, (WorkerLoaded, Ready))


def understood(content: bytes) -> Message | str:
    try:
        return parse(content)
    except MalformedMessage as malformed:
        return str(malformed)


def say(**message: object) -> bytes:
    return json.dumps(message).encode()


def test_what_makes_sense_comes_through() -> None:
    status = {
        "state": "serving",
        "tiers": [{"path": "/tier\n\udcff", "used_bytes": 7}],
        "worker": {"pid": 1, "error": None},
        "served": {"seconds": 0.5, "more": {"of": ["the", "same"]}},
    }
    assert parse(say(event="status", number=3, status=status)) == StatusReport(3, status, 0)
    assert parse(say(event="loaded")) == WorkerLoaded()
    assert parse(say(event="ready")) == Ready()
    assert parse(say(event="failed", error="the index is öld")) == Failed("the index is öld")
    files = [[1, "ab/abc.0123", 5]]
    assert parse(say(event="back", number=1, files=files)) == Back(1, (Offer(1, "ab/abc.0123", 5),))
    assert parse(say(event="unback", number=1, ids=[2, -1, "3", True])) == Unback(1, (2,))


def test_a_part_that_makes_no_sense_is_left_out_and_counted() -> None:
    said = b"""{"event": "status", "number": 3, "status": {"state": 1, "worker": [1], "tiers": [2],
        "passthrough": null, "files": {"known": NaN, "resident": 1e999, "partial": 4},
        "new": [1, -Infinity, 18446744073709551616]}}"""
    assert parse(said) == StatusReport(3, {"files": {"partial": 4}, "new": [1]}, 8)
    assert parse(say(event="status", number=3, status=[])) == StatusReport(3, {}, 1)


@pytest.mark.parametrize(
    "path", ["", "/", "/etc/passwd", "a/../b", "..", "a//b", "./a", "a\0", "ä", "x" * 256]
)
def test_a_path_that_leads_elsewhere_is_none(path: str) -> None:
    with pytest.raises(MalformedMessage, match="no file"):
        parse(say(event="back", number=1, files=[[0, path, 1]]))


@given(st.text())
@example("a\nb\r\x1b[2J\u202e\u2028\udcff")
def test_words_are_one_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown.encode().decode() == shown
    if text.isprintable() and len(text) <= MOST_WORDS:
        assert shown == text


@given(st.lists(st.floats(0, 100), max_size=200))
def test_a_throttle_lets_so_many_through(steps: list[float]) -> None:
    throttle, now, said = Throttle(0.5, 5), 100.0, 0
    for step in steps:
        now += step
        said += throttle.take(now)
        assert said <= 5 + 0.5 * (now - 100.0) + 1e-6
    # Who waits long enough is heard.
    assert throttle.take(now + 2.001)


def test_a_count_takes_no_turn_of_a_line() -> None:
    """However often the count is asked for while lines come."""
    throttle, said, counts = Throttle(0.5, 1), 0, 0
    for step in range(1000):
        counts += throttle.take_for_count(step / 10)
        said += throttle.take(step / 10)
        counts += throttle.take_for_count(step / 10)
    assert (said, counts, throttle.left_out) == (50, 0, 950)
    assert throttle.take_for_count(103.0)


def test_what_was_left_out_is_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now = 0.0
    hearing = WorkerLogging(lambda: now)
    for _ in range(1000):
        hearing.drop("it is no JSON")
    hearing.tick()
    assert (hearing.not_understood, len(caplog.messages)) == (1000, LINES_AT_ONCE)
    now += 1 / LINES_PER_SECOND
    hearing.tick()
    assert caplog.messages[-1] == f"{1000 - LINES_AT_ONCE} more lines about workers were left out"
    now += 1 / LINES_PER_SECOND
    hearing.tick()
    assert len(caplog.messages) == LINES_AT_ONCE + 1
