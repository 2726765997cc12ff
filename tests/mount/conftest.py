"""What several tests on real mounts begin with."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import surroundings
from tests.support.asynchronous import pytest_pyfunc_call as pytest_pyfunc_call
from tests.support.fake_mounts import NOBODY, Area, area, device_mode
from tests.support.mounting import Bench, FaultySource


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose path is short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="monarchfs-test-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def root_work(place: Path) -> Iterator[Area]:
    """Root's mounts with a worker that is a fake."""
    with area(place, None) as opened:
        yield opened


@pytest.fixture
def faulty(work: Bench) -> Iterator[FaultySource]:
    """A source that fails and hangs as it is told, without files. It works again at the end."""
    backing = work.path / "backing"
    backing.mkdir()
    source = work.faulty_source(backing)
    yield source
    if source.process.poll() is None:
        source.faults()


@pytest.fixture
def ext4(work: Bench) -> Iterator[Callable[..., Path]]:
    """Mounts a new one, with options of mkfs.ext4(8) and one of mount(8)'s."""
    point = work.path / "ext4"

    def mount(*make: str, options: str = "loop") -> Path:
        surroundings.mount_ext4(work.path / "image", point, 64 << 20, *make, options=options)
        return point

    yield mount
    if point.is_mount():
        for mounted in work.mounts:
            mounted.umount()
        subprocess.run(["umount", "-l", str(point)], check=True)


@pytest.fixture(params=[None, NOBODY], ids=["root", "user"])
def fake_area(place: Path, request: pytest.FixtureRequest) -> Iterator[Area]:
    """The mounts of root and of a user, with a worker that is a fake."""
    with device_mode(0o666), area(place, request.param) as opened:
        yield opened
