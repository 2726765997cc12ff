"""Nodes with nothing but an old or new Debian and fuse3: no Python, no compiler, no network."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.mounting import REPOSITORY

ROOTS = REPOSITORY / "build" / "roots"
SUITES = ("bullseye", "trixie")
"""Debian's: the oldest one that is still to be had, with glibc 2.31, and the newest."""

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
mkdir -p "$root$BUNDLE"
mount --bind "$UNPACKED" "$root$BUNDLE"
mount -o remount,bind,ro "$root$BUNDLE"
cp "$SCRIPT" "$root/tmp/inside.sh"
cd "$root"
pivot_root . old
umount -l /old
rmdir /old
exec env -i /bin/sh /tmp/inside.sh "$BUNDLE"
"""


def bundle() -> Path | None:
    """The newest archive that ``make bundle`` made for this machine."""
    made = (REPOSITORY / "dist").glob(f"monarchfs-*-linux-{platform.machine()}.tar.gz")
    return max(made, key=lambda path: path.stat().st_mtime, default=None)


def required_bundle() -> Path:
    """It, or the test that asks is skipped."""
    found = bundle()
    if found is None:
        pytest.skip("needs a bundle: make bundle")
    return found


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
    root: Path, directory: Path, at: str, layer: Path, seconds: float = 290
) -> subprocess.CompletedProcess[str]:
    """What ``inside.sh`` says on such a node, where ``directory`` is read-only at the path ``at``;
    ``layer`` is an empty directory."""
    spaces = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child"]
    return subprocess.run(
        [*spaces, "/bin/bash", "-c", _ENTER],
        env={
            "PATH": os.environ["PATH"],
            "LOWER": str(root),
            "LAYER": str(layer),
            "UNPACKED": str(directory),
            "BUNDLE": at,
            "SCRIPT": str(Path(__file__).with_name("inside.sh")),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
