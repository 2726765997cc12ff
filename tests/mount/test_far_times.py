"""Times that do not fit in 64 bits of nanoseconds."""

from __future__ import annotations

import os

import pytest

from tests.support.mounting import Bench, requires_mounts

pytestmark = requires_mounts


@pytest.mark.parametrize("prefetch", ["none", "access"])
def test_files_of_another_age_are_read(work: Bench, prefetch: str) -> None:
    """Tree and kernel pass their times through, whichever way their bytes take."""
    source = work.path / "source"
    source.mkdir()
    for name, year_ns in {"2286": 10**19, "1938": -(10**18)}.items():
        (source / name).write_bytes(b"bytes of %s" % name.encode())
        os.utime(source / name, ns=(year_ns, year_ns + 7))
    mount = work.mount(source, "--data-path", "relay", "--prefetch", prefetch)
    for name in ("2286", "1938"):
        for _ in range(2):
            assert (mount.path / name).read_bytes() == (source / name).read_bytes()
            mount.wait_idle()
        assert os.stat(mount.path / name).st_mtime_ns == os.stat(source / name).st_mtime_ns
