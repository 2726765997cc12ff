"""How much is copied ahead by what was opened, and where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from monarchfs.prefetch.ahead import MANY, MOST_AHEAD, MOST_DIRECTORIES, Allowance, Walks


def allowance(files: int, size: int = 1) -> Allowance:
    allowance = Allowance()
    for _ in range(files):
        allowance.opened(size)
    return allowance


def test_nothing_before_many_were_opened() -> None:
    assert allowance(MANY - 1, 1000).room == 0
    assert allowance(MANY, 1000).room == MANY * 1000


def test_as_much_again_and_no_more_until_some_of_it_was_opened() -> None:
    some = allowance(MANY, 1000)
    for ino in range(MANY):
        some.take(ino, 1000)
    assert some.room == 0
    assert not some.worth_while
    assert some.hit(3)
    assert some.room == 2000  # one more was opened, one less waits
    assert not some.hit(3)
    assert not some.hit(MANY)
    assert some.room == 2000


def test_so_many_wait_at_most() -> None:
    some, ino = allowance(MANY, 1 << 30), 0
    while some.room > 0:
        some.take(ino := ino + 1, 1)
    assert ino == MOST_AHEAD


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["miss", "hit", "take"]), st.integers(0, 30), st.integers(1, 1000)
        )
    )
)
def test_what_waits_is_never_more_than_was_opened_and_one_file(
    events: list[tuple[str, int, int]],
) -> None:
    some = allowance(MANY, 10)
    opened, waiting = MANY * 10, dict[int, int]()
    for what, ino, size in events:
        if what == "miss":
            some.opened(size)
            opened += size
        elif what == "hit":
            assert some.hit(ino) == (ino in waiting)
            opened += waiting.pop(ino, 0)
        elif some.room > 0:
            some.take(ino, size)
            waiting[ino] = size
        assert some.opened_bytes == opened
        assert some.waiting_bytes == sum(waiting.values())
        assert sum(waiting.values()) <= opened + 1000


def test_the_directory_in_which_something_was_opened_last_comes_first() -> None:
    walks = Walks()
    assert walks.turn() is None
    for directory in (1, 2, 3, 1):
        walks.opened_in(directory)
    assert walks.turn() == (1, 0)
    walks.reached(1, 70)
    assert walks.turn() == (1, 70)
    walks.end(1)
    assert walks.turn() == (3, 0)
    walks.opened_in(1)  # it was gone through
    assert walks.turn() == (3, 0)
    walks.reached(1, 5)
    assert walks.turn() == (3, 0)


def test_what_was_found_where_something_was_opened_last_comes_first() -> None:
    walks = Walks()
    assert walks.take(10, 100) == []
    for directory in (1, 2):
        walks.opened_in(directory)
        walks.found(directory, [(10 * directory + n, 5) for n in range(4)])
    walks.found(3, [])
    assert walks.found_files == 8
    assert walks.take(3, 100) == [(20, 5), (21, 5), (22, 5)]
    walks.opened_in(1)
    assert walks.take(10, 6) == [(10, 5), (11, 5)], "until they have so many bytes"
    assert walks.take(10, 0) == []
    assert walks.take(10, 100) == [(12, 5), (13, 5), (23, 5)]
    assert walks.found_files == 0


def test_so_many_directories_are_remembered() -> None:
    walks = Walks()
    for directory in range(MOST_DIRECTORIES + 5):
        walks.opened_in(directory)
    for directory in range(MOST_DIRECTORIES + 5, 5, -1):
        assert walks.turn() == (directory - 1, 0)
        walks.end(directory - 1)
    assert walks.turn() is None
