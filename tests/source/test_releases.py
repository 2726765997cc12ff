"""What the source gave is given back, whatever hangs and whatever cannot be had."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import outcome
import pytest

from monarchfs.source.releases import FEW_THREADS, MOST_THREADS, Releases
from tests.support.timing import wait_for


class Fake:
    """Threads that are there once they are asked for, unless ``refuses``."""

    def __init__(self) -> None:
        self.refuses = False
        self.started = 0

    def __call__(
        self, run: Callable[[], None], deliver: Callable[[outcome.Outcome[None]], None]
    ) -> None:
        if self.refuses:
            raise RuntimeError("can't start new thread")
        self.started += 1
        threading.Thread(target=lambda: deliver(outcome.capture(run)), daemon=True).start()


def test_few_threads_do_it_and_more_where_those_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    hang, lock = threading.Event(), threading.Lock()
    clock = SimpleNamespace(seconds=0.0)
    clock.monotonic = lambda: clock.seconds
    monkeypatch.setattr("monarchfs.source.releases.time", clock)
    done: list[int] = []
    releases = Releases(stuck_seconds=1.0, start_thread=Fake())

    def wait(number: int) -> None:
        assert hang.wait(30)
        with lock:
            done.append(number)

    for number in range(1000):
        releases.soon(partial(wait, number))
    assert releases.threads == FEW_THREADS
    for _ in range(2 * MOST_THREADS):
        clock.seconds += 1
        releases.go_on()
    assert (releases.threads, releases.pending) == (MOST_THREADS, 1000)
    hang.set()
    wait_for(lambda: not releases.pending, "all files to be closed")
    assert sorted(done) == list(range(1000))
    assert releases.threads == 0


def test_one_thread_that_hangs_holds_up_nobody_else() -> None:
    hang = threading.Event()
    done: list[int] = []
    releases = Releases(stuck_seconds=10, start_thread=Fake())
    releases.soon(lambda: hang.wait(30))
    for number in range(100):
        releases.soon(partial(done.append, number))
    wait_for(lambda: len(done) == 100, "all calls to end")
    hang.set()
    wait_for(lambda: not releases.pending, "all files to be closed")


def test_what_fails_is_logged_and_the_rest_is_done(caplog: pytest.LogCaptureFixture) -> None:
    start = Fake()
    releases = Releases(start_thread=start)
    start.refuses = True
    ends = os.pipe()
    releases.soon(lambda: os.close(ends[0]))
    releases.soon(lambda: os.close(-1))
    releases.soon(lambda: os.close(ends[1]))
    assert (releases.pending, releases.threads) == (3, 0)
    assert caplog.text.count("wait for a thread: can't start new thread") == 1
    start.refuses = False
    releases.go_on()
    wait_for(lambda: not releases.pending, "all files to be closed")
    assert "Bad file descriptor" in caplog.text
    for end in ends:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)


def test_its_threads_are_no_more_than_the_limit_at_once() -> None:
    """Of the process, not of this object: many ends at once, as when a mount's files are closed."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    releases, before = Releases(), threading.active_count()
    peak = 0
    for _ in range(min(2000, soft // 2)):
        fd = os.open("/", os.O_RDONLY)
        releases.soon(partial(os.close, fd))
        peak = max(peak, releases.threads)
    wait_for(lambda: not releases.pending, "all files to be closed")
    assert peak <= FEW_THREADS
    assert threading.active_count() <= before + 2 * FEW_THREADS
