"""Exported indexes: what is written is what is read, and no file harms its reader."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.metadata.snapshot import (
    MOST_LINE_BYTES,
    Begin,
    Complete,
    End,
    Entries,
    FoundName,
    Head,
    MalformedSnapshot,
    Reader,
    Record,
    Writer,
)
from monarchfs.types import FileType, SourceStat
from tests.support import trees
from tests.support.mounting import (
    MONARCHFS,
    Bench,
    FaultySource,
    asked,
    assert_one_line,
    requires_fuse,
    requires_root,
    wait_for,
)

U64 = st.integers(0, (1 << 63) - 1)
U32 = st.integers(0, (1 << 32) - 1)
TIMES = st.integers(-(1 << 70), 1 << 70)
NAMES = st.binary(min_size=1, max_size=255).filter(
    lambda name: not set(name) & set(b"/\0") and name not in (b".", b"..")
)


@st.composite
def entries(draw: st.DrawFn) -> FoundName:
    kind = draw(st.sampled_from([k for k in FileType if k is not FileType.UNKNOWN]))
    ino = draw(st.integers(1, (1 << 64) - 1))
    if draw(st.booleans()):
        return FoundName(draw(NAMES), kind, ino, None, b"")
    mode = int(kind) << 12 | draw(st.integers(0, 0o7777))
    before, after = (U64, TIMES, TIMES, TIMES), (U32, U32, U32, U64, U64, U32)
    attributes = [*map(draw, before), mode, *map(draw, after)]
    is_link = kind is FileType.SYMLINK
    target = draw(st.binary(min_size=1, max_size=4095)) if is_link else b""
    return FoundName(draw(NAMES), kind, ino, SourceStat._make([0, ino, *attributes]), target)


def written(directories: list[tuple[list[bytes], list[FoundName], bool]]) -> bytes:
    file = io.BytesIO()
    writer = Writer(file, Head("/lustre/größe\udcff", 7, 123))
    for path, found, complete in directories:
        writer.begin_directory(b"/".join(path), -5, 1 << 65)
        writer.add(found)
        if complete:
            writer.complete()
    writer.close()
    return file.getvalue()


def read(data: bytes) -> list[Record]:
    return list(Reader(io.BytesIO(data)))


DIRECTORIES = st.lists(
    st.tuples(st.lists(NAMES, max_size=3), st.lists(entries(), max_size=120), st.booleans()),
    min_size=1,
    max_size=3,
)


@given(DIRECTORIES)
def test_what_is_written_is_read(
    directories: list[tuple[list[bytes], list[FoundName], bool]],
) -> None:
    data = written(directories)
    assert Reader(io.BytesIO(data)).head == Head("/lustre/größe\udcff", 7, 123)
    records, expected = read(data), list[Record]()
    for path, found, complete in directories:
        expected.append(Begin(tuple(path), -5, 1 << 65))
        expected += [Entries(found[i : i + 100]) for i in range(0, len(found), 100)]
        expected += [Complete()] if complete else []
    expected.append(End(len(directories), sum(len(found) for _p, found, _c in directories)))
    assert records == expected


HEADER = ["monarchfs index", 1, "/s", 7, 123]
FILE = ["a", 8, 9, 5, 1, 1, 1, 0o100644, 1, 0, 0, 0, 8, 4096]
LINK = ["l", 10, 9, 5, 1, 1, 1, 0o120777, 1, 0, 0, 0, 8, 4096]


def packed(*lines: object) -> bytes:
    return gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def test_the_lines_that_others_below_are_a_variation_of() -> None:
    end = ["end", 1, 2]
    data = packed(HEADER, ["d", "", 1, 1], ["e", [FILE, [*LINK, "a"]]], ["."], end)
    assert [type(record) for record in read(data)] == [Begin, Entries, Complete, End]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([["another index", 1, "/s", 7, 123]], "no exported index"),
        ([["monarchfs index", 2, "/s", 7, 123]], "version 2; this program reads 1"),
        ([["monarchfs index", 1, "/s", "7", 123]], "no exported index"),
        ([["monarchfs index", 1, "/s", 0, 123]], "out of range"),
        ([{"a": 1}], "no array"),
        ([HEADER, ["."]], "does not begin with a directory"),
        ([HEADER, ["d", "a/../b", 1, 1]], "is no name"),
        ([HEADER, ["d", "a/" * 40_000 + "a", 1, 1]], "a path is too long"),
        ([HEADER, ["d", "", 1 << 90, 1]], "a time is too far"),
        ([HEADER, ["d", "", 1, 1], ["e", [["..", 4, 9]]]], "is no name"),
        ([HEADER, ["d", "", 1, 1], ["e", [["\ud800", 8, 9]]]], "stand for no byte"),
        ([HEADER, ["d", "", 1, 1], ["e", [["a", 3, 9]]]], "no file type 3"),
        ([HEADER, ["d", "", 1, 1], ["e", [["a", 8, 1 << 64]]]], "out of range"),
        ([HEADER, ["d", "", 1, 1], ["e", [["a", 8, 9, 5]]]], "attributes are missing"),
        ([HEADER, ["d", "", 1, 1], ["e", [["a", 8]]]], "an entry is not known"),
        ([HEADER, ["d", "", 1, 1], ["e", [[*FILE[:-1], 1 << 32]]]], "out of range"),
        ([HEADER, ["d", "", 1, 1], ["e", [[*FILE[:-1], True]]]], "is no number"),
        ([HEADER, ["d", "", 1, 1], ["e", [[*FILE, "target"]]]], "of no symbolic link"),
        ([HEADER, ["d", "", 1, 1], ["e", [LINK]]], "of no symbolic link"),
        ([HEADER, ["d", "", 1, 1], ["e", [[*LINK, "t" * 4096]]]], "target is too long"),
        ([HEADER, ["d", "", 1, 1], ["e", [["a", 4, *FILE[2:]]]]], "another than the mode's"),
        ([HEADER, ["d", "", 1, 1], ["e", [[*FILE[:7], 0o170644, *FILE[8:]]]]], "than the mode's"),
        ([HEADER, ["d", "", 1, 1], ["e", [FILE] * 101]], "a line is not known"),
        ([HEADER, ["d", "", 1, 1], ["end", 1, 1]], "does not fit what it holds"),
        ([HEADER, ["d", "", 1, 1]], "cut off"),
        ([HEADER, ["d", "x" * (MOST_LINE_BYTES + 1), 1, 1]], "too long"),
    ],
)
def test_what_is_refused(lines: list[object], words: str) -> None:
    with pytest.raises(MalformedSnapshot, match=words):
        read(packed(*lines))


@pytest.mark.parametrize("text", [b"[" * 100_000 + b"\n", b"\xff\xfe\n", b"nul\0\n", b"\n"])
def test_what_is_no_json(text: bytes) -> None:
    with pytest.raises(MalformedSnapshot, match="no JSON"):
        read(gzip.compress(text))


@given(st.data())
def test_damage_anywhere_is_refused_or_harmless(data: st.DataObject) -> None:
    lines = [HEADER, ["d", "", 1, 1], ["e", [FILE, [*LINK, "a"]]], ["."], ["end", 1, 2]]
    text = bytearray(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    file = bytearray(gzip.compress(bytes(text)))
    if data.draw(st.booleans()):
        file[data.draw(st.integers(0, len(file) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        records = read(bytes(file))
    except MalformedSnapshot:
        return
    for record in records:
        if isinstance(record, Entries):
            assert all(
                b"/" not in one.name and one.name not in (b"", b"..") for one in record.found
            )


# The command, and a mount.


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    trees.strange_tree(path)
    old = 1_700_000_000
    for parent, directories, names in os.walk(os.fsencode(path)):
        for name in (*directories, *names):
            if len(parent) + len(name) < 4000:
                os.utime(os.path.join(parent, name), (old, old), follow_symlinks=False)
    return path


def export(source: Path, file: Path) -> Path:
    found = asked("index", "export", str(source), str(file))
    with file.open("rb") as opened:
        entries = next(r for r in Reader(opened) if isinstance(r, End)).entries
    assert found["entries"] == entries > 20
    assert found["bytes"] == file.stat().st_size
    assert file.stat().st_mode & 0o777 == 0o644
    return file


@requires_fuse
def test_an_interrupted_export_leaves_nothing(work: Bench, faulty: FaultySource) -> None:
    (faulty.backing / "d").mkdir()
    faulty.faults(hang=["getattr d", "opendir d", "readdir d", "lookup d"])
    out = work.path / "out"
    out.mkdir()
    command = [*MONARCHFS, "index", "export", str(faulty.path), f"{out}/index"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: os.listdir(out), "the export to begin")
        # An interrupt that comes while it forks is lost: Python ignores errors there.
        wait_for(lambda: "lookup" in faulty.counts()["operations"], "it to wait for the source")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
        faulty.faults()
    assert errors == "monarchfs: interrupted\n"
    assert process.returncode == -signal.SIGINT
    assert os.listdir(out) == []


@requires_fuse
def test_a_mount_that_was_told_all_asks_for_no_name(work: Bench, source: Path) -> None:
    index = export(source, work.path / "index")
    mount = work.mount(source, "--freshness", "immutable", "--index", str(index))
    wait_for(lambda: mount.status()["index"]["load"] == "done", "the index to be loaded")
    before = mount.status()["source_io"]["operations"]
    sizes = ["find", str(mount.path), "-maxdepth", "1", "-printf", "%s\\n"]
    found = subprocess.check_output(sizes, text=True).splitlines()
    assert len(found) == 1 + len(os.listdir(source))
    assert mount.status()["source_io"]["operations"] == before
    assert trees.differences(source, mount.path) == []


@requires_fuse
def test_a_mount_refuses_a_file_that_cannot_be_read(work: Bench, source: Path) -> None:
    for path, words in ((work.path / "nothing", "No such file"), (source, "it is not a file")):
        done = work.try_to_mount(source, "--index", str(path))
        assert_one_line(done, 2, f"index file {path} cannot be read", words)


@requires_root
@requires_fuse
@pytest.mark.parametrize(("owner", "mode"), [("nobody", 0o644), ("root", 0o666)])
def test_modes_for_all_come_from_no_strangers_file(
    work: Bench, source: Path, owner: str, mode: int
) -> None:
    """With allow_other the kernel lets in whom the modes in it let in."""
    file = export(source, work.path / "index")
    shutil.chown(file, owner)
    file.chmod(mode)
    done = work.try_to_mount(source, "-o", "allow_other", "--index", str(file))
    assert_one_line(done, 2, "nobody else may write it")


@requires_root
@requires_fuse
def test_modes_for_all_come_from_no_file_that_took_its_place(work: Bench, source: Path) -> None:
    """Who reads it looks at what it has opened, not at what was there when this was mounted."""
    file = export(source, work.path / "index")
    mount = work.mount(source, "-o", "allow_other", "--index", str(file))
    wait_for(lambda: mount.status()["index"]["load"] == "done", "the index to be loaded")
    shutil.chown(file, "nobody")
    os.kill(mount.worker_pid(), signal.SIGKILL)
    wait_for(lambda: mount.status()["index"]["load"] == "failed", "the next worker to refuse it")
    assert "others can have written it" in work.log()
