"""Nodes with nothing but an old or new Debian and fuse3: no Python, no compiler, no network."""

import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.surroundings import REPOSITORY

ROOTS = REPOSITORY / "build" / "roots"
SUITES = ("bullseye", "trixie")
"""Debian's: the oldest one that is still to be had, with glibc 2.31, and the newest."""

LEFT = {
    "/run/monarchfs",
    "/tmp/monarchfs-1000",
    "/tmp/monarchfs-1000/run",
    *("/var/cache/monarchfs", "/var/cache/monarchfs/state"),
    *("/home/user/.cache", "/home/user/.cache/monarchfs", "/home/user/.cache/monarchfs/state"),
}
"""What stays of monarchfs on a node, as docs/INSTALL.md says: empty directories."""

# What the node writes goes into memory, so each one is new. The namespaces end all of it.
_ENTER = r"""
set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=755 layer "$LAYER"
mkdir "$LAYER/upper" "$LAYER/work" "$LAYER/root"
root=$LAYER/root
mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=$LAYER/upper,workdir=$LAYER/work" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 dev "$root/dev"
for name in null zero full random urandom tty; do
    : >"$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
mknod -m 666 "$root/dev/fuse" c 10 229
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm" "$root/old"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mkdir -p "$root$PLACE" "$root/tests"
mount --bind "$BROUGHT" "$root$PLACE"
mount -o remount,bind,ro "$root$PLACE"
mount --bind "$SCRIPTS" "$root/tests"
cd "$root"
pivot_root . old
umount -l /old
rmdir /old
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
exec env -i PATH=$path /bin/sh "/tests/$SCRIPT" "$KIND" "$PLACE"
"""


def made(pattern: str, by: str) -> Path:
    """The newest file in ``dist`` of such a name; skips without."""
    found = (REPOSITORY / "dist").glob(pattern)
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        pytest.skip(f"needs dist/{pattern}: make {by}")
    return newest


def required_bundle() -> Path:
    return made(f"monarchfs-*-linux-{platform.machine()}.tar.gz", "bundle")


def required_root(suite: str) -> Path:
    """The directory of a node's files; skips without."""
    root = ROOTS / suite
    if not (root / "usr" / "bin" / "fusermount3").exists():
        pytest.skip(f"needs a root with nothing but {suite}: .ci/roots build/roots")
    return root


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """The bundle's directory, unpacked somewhere."""
    with tempfile.TemporaryDirectory(prefix="monarchfs-test-") as place:
        subprocess.run(["tar", "-x", "-f", str(archive), "-C", place], check=True)
        (directory,) = Path(place).iterdir()
        yield directory


def tried_on(
    root: Path,
    script: str,
    kind: str,
    brought: Path,
    layer: Path,
    *,
    place: str = "/brought",
    scripts: Path = Path(__file__).parent,
    seconds: float = 290,
) -> dict[str, str]:
    """What a script beside this file says on such a node, by its steps. It gets ``kind``, how
    monarchfs is installed, and ``place``, where the directory ``brought`` lies read-only; ``layer``
    is an empty directory. Fails if the script does."""
    spaces = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child"]
    done = subprocess.run(
        [*spaces, "/bin/bash", "-c", _ENTER],
        env={
            "PATH": os.environ["PATH"],
            "LOWER": str(root),
            "LAYER": str(layer),
            "BROUGHT": str(brought),
            "PLACE": place,
            "SCRIPTS": str(scripts),
            "SCRIPT": script,
            "KIND": kind,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    steps = dict(re.findall(r"^== (.*)\n((?:(?!== ).*\n)*)", done.stdout, re.M))
    assert "done" in steps, done.stdout
    return steps
