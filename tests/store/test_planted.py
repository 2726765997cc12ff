"""What has one of our names in a tier and is not ours: refused, never followed, never changed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from monarchfs.cache.store import ReplicaLost, Tier, listed
from monarchfs.cache.store.checksum import checksum
from monarchfs.types import TierFile
from tests.store.tools import (
    NAME,
    code_of,
    files_below,
    mode_of,
    name_of,
    needs_root,
    open_tier,
    whole,
)

KINDS = ["symlink", "fifo", "directory", "socket", pytest.param("foreign", marks=needs_root)]
GOOD = checksum(b"good")
LONG = b"good" * 1024
ONE, TWO = 0x1, 0xFEDC_BA98_7654_3210
ROW = TierFile(name_of(1), 1, 4096, 4096, True, 0, TWO, 0)


def plant(place: Path, kind: str, elsewhere: Path) -> None:
    """``elsewhere`` is what a link leads to."""
    if kind == "symlink":
        place.symlink_to(elsewhere)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "socket":
        os.mknod(place, 0o140600)
    else:
        place.write_bytes(b"good")
        os.chown(place, 65534, 65534)  # foreign


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_of_files(
    path: Path, tmp_path: Path, tier: Tier, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    files, segments = tier.files, tier.segments
    assert segments.write_each([(TWO, 0, LONG)]) == [checksum(LONG)]
    (path / "ab").mkdir()
    part, unfinished = path / "parts" / NAME.hex(), path / whole(b"good", name_of(9))
    places = {
        path / whole(b"good"): b"good",
        part: b"good",
        unfinished: b"good",
        path / f"segments/{ONE:016x}": LONG,
        path / f"segments/{TWO:016x}.list": listed.batch(TWO, [ROW]),
    }
    for number, (place, data) in enumerate(places.items()):
        (tmp_path / f"elsewhere {number}").write_bytes(data)
        plant(place, kind, tmp_path / f"elsewhere {number}")

    def seen() -> list[tuple[int, int]]:
        files_now = [os.lstat(file) for file in (*places, *tmp_path.glob("elsewhere *"))]
        return [(st.st_ino, st.st_mode) for st in files_now]

    before = seen()
    for use in (
        lambda: files.open(NAME, GOOD, 4),
        lambda: files.verify(NAME, GOOD, 4),
        lambda: files.open_part(NAME, 4),
        lambda: segments.open(ONE, 0),
        lambda: segments.punch(ONE, [(0, 4096)]),
        lambda: segments.data_ranges(ONE),
        lambda: segments.verify(ONE, 0, 4, GOOD),
    ):
        with pytest.raises(ReplicaLost, match=r"[0-9a-f]{16}") as lost:
            use()
        assert lost.value.errno == errno.ESTALE
    for make in (
        lambda: files.create_part(NAME, 4),
        lambda: files.write_whole(NAME, b"good"),
        lambda: files.write_whole(name_of(9), b"good"),
        lambda: segments.create(ONE),
    ):
        with pytest.raises(FileExistsError):
            make()
    assert list((path / "parts").iterdir()) == [part]
    fd = files.create_part(name_of(9), 4)
    files.write(fd, 0, b"good")
    with pytest.raises(FileExistsError):
        files.finish_part(fd, name_of(9), GOOD)
    os.close(fd)
    files.remove_part(name_of(9))
    assert code_of(*segments.write_each([(ONE, 0, b"bad")])) == errno.EEXIST
    with pytest.raises(OSError, match=r"\.list"):
        segments.lists.append(TWO, [ROW])
    assert files.complete(0xAB) == files.parts() == []
    assert segments.found() == [TWO]
    assert segments.noted(ONE) == segments.noted(TWO) == []
    assert segments.blocks(ONE) == 0
    for _ in range(2):
        files.remove(NAME, GOOD)
        files.remove_part(NAME)
        files.discard(NAME)
        files.mark_synced([(NAME, GOOD)])
        segments.remove(ONE)
        segments.remove(TWO)
    assert seen() == before
    for number, data in enumerate(places.values()):
        assert (tmp_path / f"elsewhere {number}").read_bytes() == data
    said = [record.getMessage() for record in caplog.records]
    for place in set(places) - {unfinished}:
        assert said.count(f"{place} is not ours and stays as it is") == 1


@pytest.mark.parametrize("kind", ["symlink", "fifo"])
def test_in_place_of_directories(path: Path, tmp_path: Path, kind: str) -> None:
    tier = open_tier(path)
    tier.files.write_whole(NAME, b"good")
    tier.segments.write_each([(ONE, 0, LONG)])
    tier.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    planted = [path / "ab", path / "segments"]
    for directory in planted:
        directory.rename(elsewhere / directory.name)
        plant(directory, kind, elsewhere / directory.name)
    before = [os.lstat(directory) for directory in planted]
    tier = open_tier(path)
    files, segments = tier.files, tier.segments
    with pytest.raises(NotADirectoryError):
        files.write_whole(name_of(9), b"good")
    assert code_of(*segments.write_each([(TWO, 0, b"bad")])) == errno.ENOTDIR
    for use in (
        lambda: files.open(NAME, GOOD, 4),
        lambda: files.verify(NAME, GOOD, 4),
        lambda: segments.open(ONE, 0),
        lambda: segments.punch(ONE, [(0, 4096)]),
    ):
        with pytest.raises(ReplicaLost):
            use()
    with pytest.raises(OSError, match="segments"):
        segments.frees_punched()
    files.mark_synced([(NAME, GOOD)])
    files.remove(NAME, GOOD)
    files.discard(NAME)
    segments.remove(ONE)
    assert files.complete(0xAB) == segments.noted(ONE) == []
    assert segments.found() == []
    assert segments.blocks(ONE) == 0
    tier.close()
    assert [os.lstat(directory) for directory in planted] == before
    assert files_below(elsewhere) == {whole(b"good"), f"segments/{ONE:016x}"}
    assert mode_of(elsewhere / whole(b"good")) == 0o600
    assert (elsewhere / f"segments/{ONE:016x}").read_bytes() == LONG
    assert list((path / "parts").iterdir()) == []


def test_in_place_of_the_directory_of_parts(path: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    tier = open_tier(path)
    os.close(tier.files.create_part(NAME, 4))
    (path / "parts").rename(elsewhere)
    (elsewhere / ".probe-0").touch()
    other = tmp_path / "other"
    other.mkdir()
    (other / "parts").symlink_to(elsewhere)
    with pytest.raises(NotADirectoryError):
        open_tier(other)
    fd = os.open(other, os.O_PATH | os.O_DIRECTORY)
    assert tier.reopen(fd)
    os.close(fd)
    for use in (
        lambda: tier.files.write_whole(NAME, b"good"),
        lambda: tier.files.create_part(name_of(9), 4),
        tier.probe,
    ):
        with pytest.raises(NotADirectoryError):
            use()
    with pytest.raises(ReplicaLost):
        tier.files.open_part(NAME, 4)
    tier.files.remove_part(NAME)
    tier.files.discard(NAME)
    assert tier.files.parts() == []
    tier.close()
    assert files_below(elsewhere) == {NAME.hex(), ".probe-0"}
    assert (other / "parts").is_symlink()
