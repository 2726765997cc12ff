"""Slow file systems from the kernel's own parts, to calibrate the emulated one against: a throttled
block device, and a FUSE mirror whose system calls are delayed. Root only."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.harness import Unusable, detach, end, wait_for

BLKIO = Path("/sys/fs/cgroup/blkio")
MIB = 1 << 20


def _need(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise Unusable(f"{', '.join(missing)} not found")


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unusable(f"{command[0]} failed: {done.stderr.strip()}")


class ThrottledDisk:
    """A file system on a block device with a limit that holds for chosen processes."""

    def __init__(self, path: Path, device: str, group: Path) -> None:
        self.path = path
        self._device = device
        self._group = group

    def limit(self, bandwidth: float) -> None:
        """Bytes a second of all of them together."""
        setting = self._group / "blkio.throttle.read_bps_device"
        setting.write_text(f"{self._device} {int(bandwidth)}")

    def slow_down(self, pids: Iterable[int]) -> None:
        """What these processes read from now on is limited."""
        for pid in pids:
            (self._group / "cgroup.procs").write_text(str(pid))


@contextmanager
def throttled_disk(content: Path, place: Path) -> Iterator[ThrottledDisk]:
    """The files of ``content`` in an ext4 on a loop device; image and mount lie in ``place``.

    The processes that are slowed down must have ended before the block does. Raises Unusable
    without root's tools, loop devices or version 1 of the blkio controller."""
    _need("mke2fs", "mount", "umount")
    if not (BLKIO / "cgroup.procs").exists():
        raise Unusable(f"no blkio controller (cgroup v1) at {BLKIO}")
    image, path = place / "disk", place / "loop"
    size = sum(file.stat().st_size for file in content.rglob("*") if file.is_file())
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(size + size // 8 + 32 * MIB)
    _run("mke2fs", "-q", "-F", "-t", "ext4", "-d", content, image)
    # The mount's own loop device goes with it.
    _run("mount", "-o", "loop", image, path)
    group = BLKIO / f"monarchfs-bench-{os.getpid()}"
    try:
        group.mkdir()
        try:
            device = os.stat(path).st_dev
            yield ThrottledDisk(path, f"{os.major(device)}:{os.minor(device)}", group)
        finally:
            wait_for(lambda: not (group / "cgroup.procs").read_text(), "the readers to end")
            group.rmdir()
    finally:
        _run("umount", "-l", path)
        image.unlink()


@contextmanager
def delayed_mirror(
    directory: Path, path: Path, open_seconds: float, read_seconds: float
) -> Iterator[Path]:
    """``directory`` through bindfs, whose openat and pread64 strace delays by so much.

    Raises Unusable without one of the two."""
    _need("bindfs", "strace")
    path.mkdir()
    delays = {"openat": open_seconds, "pread64": read_seconds}
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={','.join(delays)}"]
    for call, seconds in delays.items():
        command += ["-e", f"inject={call}:delay_enter={round(seconds * 1e6)}us"]
    # Otherwise each of its system calls stops for strace, also those that are not delayed.
    command += ["--seccomp-bpf", "bindfs", "-f", "-r", str(directory), str(path)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: os.path.ismount(path) or process.poll() is not None, "bindfs to mount")
        if process.poll() is not None:
            raise Unusable("bindfs under strace has ended: may this process trace?")
        yield path
    finally:
        # bindfs ends when it is unmounted, and strace with it.
        detach(path)
        end(process)
