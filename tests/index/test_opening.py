"""Opening, closing, growing, syncing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from monarchfs.index import Index, LastClose, last_close, mark_suspect, set_aside
from monarchfs.types import ROOT_INO, IndexUnusable, IndexWriteError
from tests.index.tools import NOW, open_index, source_stat
from tests.support.indexing import record_found


def test_a_mark_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", sync)
    open_index(tmp_path).close()
    staged, directory = f"{tmp_path}/index/mark.new", f"{tmp_path}/index"
    assert [path for path in synced if path in (staged, directory)] == 2 * [staged, directory]


def test_an_unclean_close_asks_for_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert last_close(str(tmp_path)) is LastClose.NEW
    index = open_index(tmp_path)
    index.close(clean=False)
    assert last_close(str(tmp_path)) is LastClose.KILLED
    checked = []

    def check(directory: str) -> bool:
        checked.append(directory)
        return len(checked) > 1

    monkeypatch.setattr("monarchfs.index.recovery.check_in_child", check)
    with pytest.raises(IndexUnusable, match="damaged"):
        open_index(tmp_path)
    Index.open(str(tmp_path), source_id="lustre:/data", trust_after_kill=True).close(clean=False)
    assert len(checked) == 1
    open_index(tmp_path).close(clean=True)
    assert len(checked) == 2
    open_index(tmp_path).close()
    assert len(checked) == 2


def test_after_a_reboot_an_open_index_counts_as_crashed(tmp_path: Path) -> None:
    open_index(tmp_path).close(clean=False)
    (tmp_path / "index" / "mark").write_text("open 00000000-0000-0000-0000-000000000000")
    assert last_close(str(tmp_path)) is LastClose.CRASHED
    (tmp_path / "index" / "mark").unlink()
    assert last_close(str(tmp_path)) is LastClose.CRASHED
    open_index(tmp_path).close()
    assert last_close(str(tmp_path)) is LastClose.CLEAN


def test_a_data_file_changed_behind_a_clean_mark_is_suspicious(tmp_path: Path) -> None:
    open_index(tmp_path).close()
    data = tmp_path / "index" / "data.mdb"
    os.truncate(data, data.stat().st_size - 4096)
    assert last_close(str(tmp_path)) is LastClose.CRASHED


def test_the_map_grows_by_itself(tmp_path: Path) -> None:
    index = open_index(tmp_path, map_bytes=1 << 18)
    for i in range(3000):
        record_found(index, ROOT_INO, b"%d" % i, source_stat(10 + i), b"", NOW)
        assert index.tree.dirent(ROOT_INO, b"%d" % i) is not None
    index.close()
    assert (tmp_path / "index" / "data.mdb").stat().st_size > 1 << 19
    # A map smaller than the file is no obstacle either.
    index = open_index(tmp_path, map_bytes=1 << 18)
    inos = {node.ino for _, node in index.listings.entries(ROOT_INO, 0, 4000) if node is not None}
    assert len(inos) == 3000
    record_found(index, ROOT_INO, b"new", source_stat(9999), b"", NOW)
    index.close()


def test_pages_are_used_again(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    for i in range(3000):
        index.meta.put(b"key", b"%d" % i)
        index.meta.get(b"key")
    index.close()
    assert (tmp_path / "index" / "data.mdb").stat().st_size < 256 * 1024


def test_sync_from_another_thread_while_writing(tmp_path: Path) -> None:
    index = open_index(tmp_path, map_bytes=1 << 18)
    failures: list[BaseException] = []
    stop = threading.Event()

    def sync() -> None:
        try:
            while not stop.is_set():
                index.environment.sync()
        except IndexWriteError as error:
            failures.append(error)

    thread = threading.Thread(target=sync)
    thread.start()
    for i in range(2000):
        record_found(index, ROOT_INO, b"%d" % i, source_stat(10 + i), b"", NOW)
    index.close()
    stop.set()
    thread.join()
    assert failures == []
    index = open_index(tmp_path)
    assert len(index.listings.entries(ROOT_INO, 0, 3000)) == 2000
    index.close()


def test_a_suspect_index_is_checked_however_it_was_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [False, True, True]
    monkeypatch.setattr("monarchfs.index.recovery.check_in_child", lambda _: answers.pop(0))
    open_index(tmp_path, trust=True).close()
    mark_suspect(str(tmp_path))
    with pytest.raises(IndexUnusable, match="damaged"):
        open_index(tmp_path, trust=True)
    # Not forgotten before it passed.
    assert (tmp_path / "suspect").exists()
    open_index(tmp_path, trust=True).close(clean=False)
    assert os.listdir(tmp_path) == ["index"]
    mark_suspect(str(tmp_path))
    open_index(tmp_path, trust=True).close()
    assert answers == []
    open_index(tmp_path, trust=True).close()


def test_suspicion_is_no_way_out_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "suspect").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        mark_suspect(str(tmp_path))
    assert not (tmp_path / "elsewhere").exists()


def test_numbers_leap_where_a_mount_may_know_some_that_are_not_recorded(tmp_path: Path) -> None:
    def found(name: bytes) -> int:
        index = open_index(tmp_path, trust=True)
        ino = record_found(index, ROOT_INO, name, source_stat(len(name)), b"", NOW).ino
        index.close(clean=name != b"bb")
        return ino

    first, second = found(b"a"), found(b"bb")
    assert first == 16
    assert second < 30
    assert found(b"ccc") > second + 1_000_000
    set_aside(str(tmp_path))
    assert found(b"d") > 1_000_000


def test_room_is_kept_ahead_of_the_file(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    data = tmp_path / "index" / "data.mdb"

    def ahead() -> int:
        return data.stat().st_blocks * 512 - data.stat().st_size

    if ahead() < 1 << 20:
        pytest.skip("needs fallocate(2) beyond the end: TMPDIR on ext4, xfs or tmpfs")
    value = bytes(1 << 17)
    for i in range(1024):
        index.xattrs.put_xattr(20 + i, b"user.big", value)
        assert ahead() >= 16 << 20
    assert data.stat().st_size > 128 << 20
    index.close()
    assert ahead() < 1 << 20


def test_tiers_and_small_values_are_remembered(tmp_path: Path) -> None:
    index = open_index(tmp_path)
    far = "/a\udcff" + "x" * 4000
    assert [index.meta.tier_number(path) for path in ("/b", far, "/b")] == [1, 2, 1]
    assert index.meta.get(b"schema") is None
    values = {b"schema": b"mine", b"tier:" + b"p" * 4096: b"1", b"tier:" + b"p" * 4095: b"2"}
    for key, value in values.items():
        index.meta.put(key, value)
    index.close()
    index = open_index(tmp_path)
    assert index.meta.tier_paths() == {1: "/b", 2: far}
    assert index.meta.tier_number("/c") == 3
    assert {key: index.meta.get(key) for key in values} == values
    index.close()
