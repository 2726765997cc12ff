"""Small files that are read whole in one call: the answers are those of ``read_whole``."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from monarchfs.source import PosixSource
from monarchfs.source.errand import Answer, Errand
from monarchfs.types import Archived, SourceChanged, SourceVersion
from tests.source.tools import ref


def wanted(root: Path, posix: PosixSource, names: list[bytes]) -> Errand:
    files = [(ref(root), name, posix.stat(ref(root), name).version) for name in names]
    return Errand(files, lambda: None)


def make(root: Path, count: int) -> list[bytes]:
    names = [b"f%d" % number for number in range(count)]
    for number, name in enumerate(names):
        (root / os.fsdecode(name)).write_bytes(bytes([number + 1]) * (70_000 + number))
    return names


def read(posix: PosixSource, errand: Errand) -> list[Answer]:
    posix.read_each(errand)
    return [errand.answers[place] for place in range(len(errand.files))]


@pytest.fixture(params=[False, True], ids=["", "layouts"])
def either(request: pytest.FixtureRequest, root: Path, posix: PosixSource) -> PosixSource:
    """A source whose files have Lustre's layouts, or have not."""
    posix.has_layouts = request.param
    return posix


@pytest.fixture
def at_once(either: PosixSource, monkeypatch: pytest.MonkeyPatch) -> PosixSource:
    """It has no other way."""

    def never(*_: object) -> None:
        raise AssertionError("read the slow way")

    monkeypatch.setattr(either, "read_whole", never)
    return either


def test_files_as_they_are_expected_are_read_at_once(root: Path, at_once: PosixSource) -> None:
    names = make(root, 4)
    (root / "empty").touch()
    errand = wanted(root, at_once, [*names, b"empty"])
    found = [(root / os.fsdecode(name)).read_bytes() for name in names]
    assert at_once.read_each(errand) == sum(map(len, found))
    assert [errand.answers[place] for place in range(5)] == [*found, b""]


def test_what_is_not_there_is_said(root: Path, at_once: PosixSource) -> None:
    names = make(root, 3)
    errand = wanted(root, at_once, names)
    (root / "f0").unlink()
    (root / "f1").unlink()
    (root / "f1").symlink_to("f2")
    first, second, third = read(at_once, errand)
    assert isinstance(first, OSError)
    assert first.errno == errno.ENOENT
    assert isinstance(second, OSError)
    assert second.errno == errno.ELOOP
    assert third == (root / "f2").read_bytes()


@pytest.mark.parametrize("what", ["replaced", "grown", "touched", "fifo", "directory"])
def test_another_version_is_not_read(root: Path, either: PosixSource, what: str) -> None:
    errand = wanted(root, either, make(root, 2))
    path = root / "f0"
    if what == "replaced":
        (root / "other").write_bytes(path.read_bytes())
        (root / "other").replace(path)
    elif what == "grown":
        with path.open("ab") as file:
            file.write(b"more")
    elif what == "touched":
        os.utime(path, ns=(1, 1))
    else:
        path.unlink()
        os.mkfifo(path) if what == "fifo" else path.mkdir()
    first, second = read(either, errand)
    if what in ("fifo", "directory"):
        assert isinstance(first, OSError)
        assert first.errno == (errno.ENXIO if what == "fifo" else errno.EISDIR)
    else:
        assert isinstance(first, SourceChanged)
    assert second == (root / "f1").read_bytes()


def test_a_file_that_changes_after_it_was_opened(
    root: Path, posix: PosixSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    posix.has_layouts = True
    errand = wanted(root, posix, make(root, 1))
    monkeypatch.setattr(posix, "layout", lambda fd: os.utime(fd, ns=(1, 1)))
    assert [type(answer) for answer in read(posix, errand)] == [SourceChanged]


@pytest.mark.parametrize("error", [Archived(errno.ENODATA, "on tape"), OSError(errno.EIO, "bad")])
def test_what_lies_in_an_archive_is_not_read(
    root: Path, posix: PosixSource, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    posix.has_layouts = True
    errand = wanted(root, posix, make(root, 1))

    def layout(fd: int) -> None:
        raise error

    monkeypatch.setattr(posix, "layout", layout)
    before = len(os.listdir("/proc/self/fd"))
    assert read(posix, errand) == [error]
    assert len(os.listdir("/proc/self/fd")) == before


def test_times_that_no_64_bits_hold(root: Path, either: PosixSource) -> None:
    make(root, 1)
    far = SourceVersion(0, (root / "f0").stat().st_ino, 70_000, 1 << 70, 1 << 70)
    (answer,) = read(either, Errand([(ref(root), b"f0", far)], lambda: None))
    assert isinstance(answer, SourceChanged)


def test_a_name_that_is_none(root: Path, either: PosixSource) -> None:
    version = SourceVersion(0, 1, 2, 3, 4)
    (answer,) = read(either, Errand([(ref(root), b"..", version)], lambda: None))
    assert isinstance(answer, OSError)
    assert answer.errno == errno.EINVAL
