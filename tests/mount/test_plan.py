"""``monarchfs plan``: the arithmetic, the walk, bad input, and what a mount then really does."""

import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from monarchfs.insight.estimates import SourceRates, TierRates, times
from monarchfs.insight.fitting import Amount, Fitted, PlannedTier
from monarchfs.insight.fitting import fit as fit_files
from monarchfs.insight.survey import Survey, files_below, survey_and_fit
from monarchfs.prefetch.copier import MAX_UNIT_BYTES
from monarchfs.system.walk import BATCH
from monarchfs.types import SourceStat, Space
from tests.support import mounting
from tests.support.trees import strange_tree, write_files

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PLENTY = Space(GIB << 10, GIB << 10, 1 << 20, 1 << 20)


def room(capacity: int, space: Space = PLENTY) -> PlannedTier:
    return PlannedTier("/t", capacity, space, capacity, capacity, "")


def test_the_file_systems_reserve_and_its_inodes() -> None:
    def fit(sizes: list[int], rooms: list[PlannedTier], reserve_percent: float) -> Fitted:
        return fit_files(((size, size) for size in sizes), rooms, reserve_percent)

    space = Space(100 * MIB, 12 * MIB, 100, 13)
    assert fit([MIB] * 9, [room(GIB, space)], 10).whole.files == 1
    assert fit([KIB] * 9, [room(GIB, space)], 10).whole.files == 3
    assert fit([KIB] * 9, [room(GIB, Space(100 * MIB, 50 * MIB, 0, 0))], 10).whole.files == 9


def test_from_which_epoch_it_pays() -> None:
    files = Amount(1000, 10**9)
    speeds = SourceRates(100e6, 0.001, 4), [TierRates(1e9, 1e9)]
    found = times([files], [Amount()], Amount(), *speeds)
    assert found.fill == found.first_epoch == found.plain_epoch == pytest.approx(10.25)
    assert found.later_epoch == pytest.approx(1.0)
    assert found.pays_from_epoch == 2
    assert found.plain_total(10) - found.total(10) == pytest.approx(9 * 9.25)
    # Later where little is won: 2 s plain; 5 + 1 first, 0.5 + 1 later: 4 s lost, then 0.5 s won
    # each time.
    speeds = SourceRates(1e9, 0.0, 4), [TierRates(0.2e9, 2e9)]
    found = times([Amount(1, 10**9)], [Amount()], Amount(1, 10**9), *speeds)
    assert found.first_epoch == pytest.approx(6)
    assert found.pays_from_epoch == 10
    assert found.total(9) >= found.plain_total(9)
    assert found.total(10) < found.plain_total(10)


def test_the_walk_finds_what_find_finds(tmp_path: Path) -> None:
    strange_tree(tmp_path)
    flat = tmp_path / "flat"
    flat.mkdir()
    for number in range(2 * BATCH + 7):
        (flat / f"{number}").write_bytes(b"x" * (number % 5))
    survey = Survey()
    files = list(files_below(str(tmp_path), survey))
    script = ["find", str(tmp_path), "-type", "f", "-printf", "%D %i %s\\n"]
    listed = subprocess.run(script, capture_output=True, text=True, check=True).stdout.split("\n")
    distinct = {line for line in listed if line}
    assert len(files) == len(distinct)
    assert sum(file.size for file in files) == sum(int(line.split()[2]) for line in distinct)
    assert survey.hard_links == 2
    st = (flat / "4").stat()
    version = SourceStat.of(st, st.st_dev).version
    assert version.replica_name in {file.version.replica_name for file in files}
    for number in range(200):
        (tmp_path / f"{number}").touch()
    heard: list[object] = []
    nothing = ["/no/such/directory"]
    report = survey_and_fit(str(tmp_path), nothing, [room(MIB)], 10, 0.0, heard.append)
    assert (report["complete"], report["files"], bool(heard)) == (False, 0, True)


@pytest.fixture
def place(work: mounting.Bench) -> Path:
    write_files(work.path / "src", {"f": b"x" * 5000})
    return work.path


@mounting.requires_root
def test_a_source_that_the_user_may_not_read(place: Path) -> None:
    (place / "src").chmod(0o700)
    done = mounting.run(
        "plan", "--quick", str(place / "src"), "--user", "nobody", "--tier", f"{place}/t=1G"
    )
    mounting.assert_one_line(done, 1, "cannot be read by nobody")


@mounting.needs_mounts
def test_a_source_that_hangs_does_not_hang_the_plan(
    work: mounting.Bench, faulty: mounting.FaultySource
) -> None:
    faulty.faults(hang=["* *"])
    words = ("--quick", str(faulty.path), "--tier", f"{work.path}/t=1G")
    mounting.assert_one_line(mounting.run("plan", *words, timeout=50), 1, "did not answer")


STEPPED_FILES = 24
STEP_BYTES = 512 * KIB
"""Sizes are a little below multiples of it, and tiers half of it above one. Each copy under way has
reserved a block more. All of them together are 24 blocks, less than half a step: so no decision
depends on how many are under way."""


def make_files(root: Path, sizes: list[int]) -> int:
    rng = random.Random(11)
    for number, size in enumerate(sizes):
        directory = root / f"d{number % 7}" / ("deep/er" if number % 3 == 0 else ".")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"f{number}").write_bytes(rng.randbytes(size))
    return sum(sizes)


def planned_and_done(
    work: mounting.Bench, source: Path, files: int, *tiers: str
) -> tuple[Any, mounting.Mount, Any]:
    """What the plan says; a mount with these tiers, and its status when each file was copied or
    refused: between two files it may look idle."""
    options = [option for tier in tiers for option in ("--tier", tier)]
    planned = mounting.asked("plan", str(source), "--quick", *options)
    immutable = ("--prefetch", "all", "--freshness", "immutable")
    mount = work.mount(source, *immutable, tiers=list(tiers))

    def done() -> dict[str, Any] | None:
        now = mount.status()
        copied = now["prefetch"]["completed"] + now["prefetch"]["refused"]
        return now if copied >= files and not now["files"]["copying"] else None

    return planned, mount, mounting.wait_for(done, "all files to be copied or refused")


def assert_known_to_the_next(mount: mounting.Mount, planned: Any, *tiers: str) -> Any:
    """The next plan knows what is there."""
    assert mount.umount().returncode == 0
    options = [option for tier in tiers for option in ("--tier", tier)]
    again = mounting.asked("plan", str(mount.source), "--quick", *options)
    assert again["cached_before"] == again["resident"] == planned["resident"]
    return again


@mounting.needs_mounts
@pytest.mark.parametrize("shares", [(0.2, 0.36), (1.2,)], ids=str)
def test_what_then_happens(work: mounting.Bench, shares: tuple[float, ...]) -> None:
    source, rng = work.path / "source", random.Random(7)
    size = make_files(
        source,
        [STEP_BYTES * rng.randint(1, 4) - 1 - rng.randrange(4095) for _ in range(STEPPED_FILES)],
    )
    steps = [int(size * share) // STEP_BYTES + 0.5 for share in shares]
    tiers = [f"{work.path}/tier{n}={int(step * STEP_BYTES)}" for n, step in enumerate(steps)]
    planned, mount, now = planned_and_done(work, source, STEPPED_FILES, *tiers)
    assert (planned["files"], planned["bytes"]) == (STEPPED_FILES, size)
    assert now["files"]["resident"] == planned["resident"]["files"]
    assert now["source_io"]["read_bytes"] == planned["resident"]["bytes"]
    assert [tier["files"] for tier in now["tiers"]] == [tier["files"] for tier in planned["tiers"]]
    assert now["prefetch"]["refused"] == planned["remote"]["files"]

    # An epoch from beginning to end: what is not resident comes from the source, once.
    subprocess.run(["cp", "-r", str(mount.path), str(work.path / "copy")], check=True, timeout=60)
    after = mount.wait_idle()
    assert subprocess.run(["diff", "-r", source, work.path / "copy"], check=False).returncode == 0
    read = after["source_io"]["read_bytes"] - now["source_io"]["read_bytes"]
    assert read == planned["source_bytes"]["later_epoch"]
    assert read + planned["resident"]["bytes"] == planned["source_bytes"]["first_epoch"]
    again = assert_known_to_the_next(mount, planned, *tiers)
    assert again["source_bytes"]["first_epoch"] == planned["source_bytes"]["later_epoch"]
    shutil.rmtree(work.path / "copy")


@mounting.needs_mounts
def test_a_file_that_fits_in_part(work: mounting.Bench) -> None:
    source = work.path / "source"
    make_files(source, [80 * MIB])
    planned, mount, _now = planned_and_done(work, source, 0, f"{work.path}/tier=40M")
    mounting.wait_for(lambda: mount.status()["files"]["partial"], "a part")
    now = mount.wait_idle()
    assert planned["partial"]["files"] == now["files"]["partial"] == 1
    assert planned["resident"]["files"] == now["files"]["resident"] == 0
    # Less than a unit of copying is left over; a reader would fill that too.
    left = planned["partial"]["bytes"] - now["source_io"]["read_bytes"]
    assert 0 <= left < MAX_UNIT_BYTES
    beside = mounting.run("plan", str(source), "--quick", "--tier", f"{work.path}/tier=40M")
    assert f"  mounted   on {mount.path}: " in beside.stdout


@mounting.needs_mounts
def test_files_with_holes(work: mounting.Bench) -> None:
    """Of 20 MiB each, with 2 MiB of blocks: three of five fit into 7 MiB."""
    source = work.path / "source"
    source.mkdir()
    for number in range(5):
        with (source / f"f{number}").open("wb") as opened:
            opened.truncate(20 * MIB)
            for place in (number * 2, 12):
                opened.seek(place * MIB)
                opened.write(random.Random(number).randbytes(MIB))
    tier = f"{work.path}/tier=7M"
    planned, mount, now = planned_and_done(work, source, 5, tier)
    assert planned["resident"] == {"files": 3, "bytes": 60 * MIB}
    assert planned["remote"] == {"files": 2, "bytes": 40 * MIB}
    assert (now["files"]["resident"], now["prefetch"]["refused"]) == (3, 2)
    (held,) = now["tiers"]
    assert 6 * MIB <= held["used_bytes"] <= 7 * MIB
    assert subprocess.run(["diff", "-r", source, mount.path], check=False).returncode == 0
    assert_known_to_the_next(mount, planned, tier)


def test_measured_rates_make_times(place: Path) -> None:
    (place / "empty").mkdir()
    found = mounting.asked("plan", str(place / "empty"), "--tier", f"{place}/t=1G")
    assert (found["files"], found["bytes"], found["rates"]) == (0, 0, None)
    (place / "empty").rmdir()
    found = mounting.asked("plan", str(place / "src"), "--tier", f"{place}/t=1G", "--epochs", "3")
    assert found["rates"]["source_open_seconds"] > 0
    assert found["rates"]["tiers"][0]["write_bytes_per_second"] > 0
    seconds = found["seconds"]
    assert seconds["plain_total"] == pytest.approx(3 * seconds["plain_epoch"])
    assert seconds["saved"] == pytest.approx(seconds["plain_total"] - seconds["total"])
    assert sorted(p.name for p in place.iterdir()) == ["src"], "nothing is left"
