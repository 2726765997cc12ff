"""The state directory and the tiers as an enemy left them: right bytes, or one line why not.

Root mounts for an ordinary user, whose directories these are: nothing is followed, nothing outside
is changed, and nobody waits for ever.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from monarchfs.cache.store.segments import SMALL_BYTES
from tests.hostile.places import ANYWHERE, CONTENT, USER, Cache, Untouched, spoil
from tests.support import on_disk, trees
from tests.support.fake_mounts import interpreter_for
from tests.support.mounting import (
    Mount,
    fuse_mounts,
    kill_each,
    processes_about,
    requires_mounts,
    run,
)

pytestmark = [*requires_mounts, pytest.mark.timeout(300)]

DIRECTORIES = (
    *("state directory", "index", "tier's directory", "inside of the tier", "segments"),
    "a segment and its list",
)
FILES = ("lock", "data.mdb", "mark and log", "who owns what")
WRITING = (*CONTENT, "empty")
REPLACING = (
    *("removed", "link to root's", "link to nowhere", "link to itself", "FIFO", "directory"),
    "file",
)
SET_ASIDE = (
    *("link to root's", "link to the user's", "link to nowhere", "link to itself", "FIFO"),
    *("socket", "link to a device"),
)
NAMED = [
    *((place, how) for place in (*DIRECTORIES, *FILES) for how in ANYWHERE),
    *((place, how) for place in FILES for how in CONTENT),
    ("replicas", "cut off"),
    ("replicas", "huge"),
]

HARMLESS = {
    *((place, how) for place in ("who owns what", "data.mdb", "lock") for how in CONTENT),
    *(("mark and log", how) for how in (*ANYWHERE, *CONTENT)),
    *((place, how) for place in ("data.mdb", "index") for how in SET_ASIDE),
}


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    interpreter_for(USER)
    path = Path(tempfile.mkdtemp(prefix="monarchfs-test-"))
    path.chmod(0o755)
    trees.dataset(path / "src", files=6, largest=300_000)
    for name in ("large", "larger"):
        (path / "src" / name).write_bytes(trees.random_bytes(SMALL_BYTES + 5000, len(name)))
    (path / "mnt").mkdir()
    cache = Cache(path)
    done = cache.mount()
    assert done.returncode == 0, done.stderr
    # What --prefetch all finds: the copies of small files share one.
    status = Mount(path / "src", path / "mnt", USER).wait_idle()
    assert status["files"]["resident"] == 8
    assert len(on_disk.own_files(path / "tier")) == 2
    assert len(on_disk.segments(path / "tier")) == 1
    assert run("umount", f"{path}/mnt").returncode == 0
    yield path
    shutil.rmtree(path)


@pytest.fixture
def cache(template: Path) -> Iterator[Cache]:
    with a_copy(template) as copied:
        yield copied


@contextmanager
def a_copy(template: Path) -> Iterator[Cache]:
    """The cache, to be spoilt; then it is as before, with the same owners, modes and times."""
    kept = template.with_name(template.name + "-kept")
    shutil.copytree(template, kept, symlinks=True)
    for path in (template, *template.rglob("*")):
        shutil.chown(kept / path.relative_to(template), path.owner(), path.group())
    watchdog = threading.Timer(90, _break_up, [template])
    watchdog.start()
    try:
        yield Cache(template)
    finally:
        watchdog.cancel()
        watchdog.join()
        _break_up(template)
        for name in ("state", "tier"):
            path = template / name
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
            else:
                shutil.rmtree(path)
            (kept / name).rename(path)
        shutil.rmtree(template / "untouched", ignore_errors=True)
        shutil.rmtree(kept)


def _break_up(path: Path) -> None:
    kill_each(processes_about(f"{path}/"))
    for point in fuse_mounts(str(path)):
        subprocess.run(["umount", "-l", point], check=False)


def untouched(cache: Cache) -> Untouched:
    return Untouched(cache.path / "untouched", pwd.getpwnam(USER).pw_uid)


@pytest.mark.parametrize(("place", "how"), NAMED)
def test_one_thing(cache: Cache, place: str, how: str) -> None:
    beside = untouched(cache)
    for path in cache.places()[place]:
        spoil(path, how, beside, random.Random(place + how))
    works = cache.works_or_refuses()
    beside.check()
    # What is merely damaged, or can be set aside, is no reason not to mount.
    if place == "replicas" or (place, how) in HARMLESS:
        assert works


@settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    spoils=st.lists(
        st.tuples(st.sampled_from([*DIRECTORIES, *FILES]), st.sampled_from(ANYWHERE))
        | st.tuples(st.sampled_from(FILES), st.sampled_from(CONTENT))
        | st.tuples(st.just("replicas"), st.sampled_from(["cut off", "removed"])),
        min_size=2,
        max_size=3,
    ),
    seed=st.integers(0, 1 << 32),
)
@example(spoils=[("index", "link to the user's"), ("data.mdb", "removed")], seed=0)
@example(spoils=[("index", "link to root's"), ("mark and log", "file")], seed=0)
@example(spoils=[("index", "link to root's"), ("inside of the tier", "link to root's")], seed=0)
def test_several_things(template: Path, spoils: list[tuple[str, str]], seed: int) -> None:
    """One after the other, on what the one before it left."""
    with a_copy(template) as cache:
        beside = untouched(cache)
        places, chosen = cache.places(), random.Random(seed)
        for place, how in spoils:
            for path in places[place]:
                # What lies behind a link that was planted before is not the product's to protect
                # from this test.
                inside = path.parent.relative_to(template)
                as_made = os.path.join(os.path.realpath(template), inside)
                if os.path.realpath(path.parent) != as_made:
                    continue
                # What is something else by now is not written to, nor what a link leads to.
                there = path.is_file() if how in WRITING else path.exists()
                if how in REPLACING if path.is_symlink() else there:
                    spoil(path, how, beside, chosen)
        cache.works_or_refuses()
        beside.check()
