"""A sampler that announces what it draws is the sampler that it was; hints never disturb a job."""

import copy
import itertools
import logging
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from monarchfs import hints
from monarchfs.hints import JobMount
from monarchfs.types import OperationError
from tests.support.programs import execute


def await_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == hints.THREAD:
            thread.join(30)


class Sampler:
    """Draws another order each epoch, and has a method of its own."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from ((n + self.epoch) % 5 for n in range(5))

    def __len__(self) -> int:
        return 5


@pytest.fixture(autouse=True)
def nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "_failed", set())


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [str(tmp_path / str(number)) for number in range(5)]


class FakeMount(JobMount):
    lists: queue.Queue[bytes]

    def connect(self) -> Any:
        return nullcontext(self)

    def send_list(self, _message: object, parts: Iterable[bytes]) -> None:
        self.lists.put(b"".join(parts))


@pytest.fixture
def announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> queue.Queue[bytes]:
    mount = FakeMount(None, [str(tmp_path)])  # type: ignore[arg-type]
    mount.lists = queue.Queue()
    monkeypatch.setattr(hints, "find_mount", lambda _path: mount)
    return mount.lists


def test_without_a_mount_it_draws_the_same(files: list[str]) -> None:
    assert hints.find_mount(files[0]) is None
    sampler = hints.announce(Sampler(), files)
    assert len(sampler) == 5
    assert list(sampler) == [0, 1, 2, 3, 4]
    sampler.set_epoch(2)
    assert list(sampler) == [2, 3, 4, 0, 1]
    assert sampler.epoch == 2
    sampler.epoch = 3
    assert list(sampler) == [3, 4, 0, 1, 2]
    assert not hasattr(sampler, "nothing")


class Endless(Sampler):
    """Its length is that of an epoch."""

    def __iter__(self) -> Iterator[int]:
        yield from itertools.cycle([4, 2, 0, 1, 3, 3, 2, 1, 0, 4])


def test_a_sampler_without_an_end_is_left_alone(files: list[str]) -> None:
    class Batches(Endless):
        def __len__(self) -> int:
            raise TypeError("its sampler has no length")

    for endless in (itertools.cycle([1, 2]), Batches()):
        drawn = list(itertools.islice(hints.announce(endless, files), 3))
        assert drawn in ([1, 2, 1], [4, 2, 0])


def test_an_endless_sampler_tells_epochs(files: list[str], announced: queue.Queue[bytes]) -> None:
    drawn = iter(hints.announce(Endless(), files))
    assert list(itertools.islice(drawn, 5)) == [4, 2, 0, 1, 3]
    assert announced.get(timeout=30) == b"4\x002\x000\x001\x003\x00"
    assert next(drawn) == 3
    assert announced.get(timeout=30) == b"3\x002\x001\x000\x004\x00"


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_a_copy_is_such_a_sampler(copied: Callable[[Any], Any], files: list[str]) -> None:
    """As frameworks make them that start processes."""
    sampler = copied(hints.announce(Sampler(), files))
    sampler.set_epoch(1)
    assert type(sampler) is hints.Announced
    assert list(sampler) == [1, 2, 3, 4, 0]


def test_who_asks_for_the_class_is_told_that_of_the_sampler(files: list[str]) -> None:
    """Lightning would divide what a DistributedSampler draws among the processes once more."""
    assert isinstance(hints.announce(Sampler(), files), Sampler)


def test_a_mount_that_fails_is_reported_once_and_asked_again(
    files: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail = Mock(side_effect=OperationError("the daemon is gone"))
    monkeypatch.setattr(hints, "find_mount", fail)
    sampler = hints.announce(Sampler(), files)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert list(sampler) == [0, 1, 2, 3, 4]
            await_threads()
    assert len(caplog.records) == 1
    assert fail.call_count == 3


def test_what_was_drawn_is_sent_in_order(files: list[str], announced: queue.Queue[bytes]) -> None:
    """Also of batches; what lies elsewhere is left out."""
    files[3] = "/elsewhere"
    assert list(hints.announce([[2, 1], [3, 0]], files)) == [[2, 1], [3, 0]]
    assert announced.get(timeout=30) == b"2\x001\x000\x00"
    hints.announce_files(files)
    assert announced.get(timeout=30) == b"0\x001\x002\x004\x00"


def test_hints_need_none_of_the_daemons_libraries() -> None:
    """Only the standard library, so that a job's environment need not have anything else."""
    code = (
        "import sys; before = set(sys.modules); import monarchfs.hints;"
        "names = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(names - {'monarchfs', *sys.stdlib_module_names}))"
    )
    found = execute([sys.executable, "-c", code], check=True)
    assert found.stdout.strip() == "[]"
