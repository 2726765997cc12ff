"""A systemd that is the first process of namespaces of its own: this machine's files below a layer
of the test's own (overlayfs), with units of nobody else, and gone with its first process."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.mounting import MONARCHFS, REPOSITORY, wait_for
from tests.support.programs import execute

SYSTEMD = "/usr/lib/systemd/systemd"
UNITS = "/etc/monarchfs-test-units"
_BOOT_SECONDS = 30.0

# What a bare systemd wants to be there; those of the machine would start the machine's services.
TARGETS = (
    *("sysinit", "basic", "shutdown", "umount", "multi-user", "timers"),
    *("local-fs", "remote-fs", "remote-fs-pre", "network-online"),
)

_SCRIPT = r"""
set -eu
exec 2>&1
trap 'echo "could not be set up"' EXIT
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$WORK/layer"
mkdir "$WORK/layer/upper" "$WORK/layer/work" "$WORK/layer/root"
root=$WORK/layer/root
mount -t overlay overlay \
    -o "lowerdir=/,upperdir=$WORK/layer/upper,workdir=$WORK/layer/work" "$root"
mount -t proc proc "$root/proc"
mount --bind -o ro "$root/proc/sys" "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
for directory in run dev; do mount -t tmpfs -o mode=755 tmpfs "$root/$directory"; done
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
for name in null zero full random urandom tty fuse; do
    : >"$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
ln -s pts/ptmx "$root/dev/ptmx"
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
# What the test shares with it, under the names that they have outside.
for directory in "$WORK" "$REPOSITORY"; do
    mkdir -p "$root$directory"
    mount --rbind "$directory" "$root$directory"
done
umount -l "$root$WORK/layer"
mkdir -p "$root$UNITS" "$root/old"
cp "$WORK"/units/* "$root$UNITS"
cd "$root"
pivot_root . old
cd /
umount -l /old
mount --make-rshared /
trap - EXIT
exec env -i container=monarchfs-test PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    SYSTEMD_UNIT_PATH="$UNITS:/etc/systemd/system:/run/systemd/system:/run/systemd/transient:\
/usr/local/lib/systemd/system" SYSTEMD_GENERATOR_PATH=/nowhere \
    "$SYSTEMD" --system --unit=test.target --show-status=no \
    --default-standard-output=null
"""


@dataclass(frozen=True)
class Booted:
    """A running one. ``work`` is a directory that has the same name inside and outside."""

    work: Path
    init: int

    def run(
        self, *command: str | Path, check: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """A command inside, as root, in the control group of nobody's unit."""
        entered = ["nsenter", "--target", str(self.init), "--all"]
        done = execute([*entered, *map(str, command)], stdin=subprocess.DEVNULL, timeout=timeout)
        if check:
            assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done

    def monarchfs(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(*MONARCHFS, *arguments, check=check)

    def show(self, unit: str, *names: str) -> dict[str, str]:
        wanted = [f"--property={','.join(names)}"]
        lines = self.run("systemctl", "show", *wanted, "--", unit).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines)

    def state(self, unit: str) -> str:
        return self.show(unit, "ActiveState")["ActiveState"]

    def write(self, path: str, text: str) -> None:
        script = 'mkdir -p -- "${1%/*}" && printf %s "$2" > "$1"'
        self.run("sh", "-c", script, "sh", path, text)

    def drop_in(self, unit: str, text: str) -> None:
        """What `systemctl edit` does, for the life of this system."""
        self.write(f"/run/systemd/system/{unit}.d/test.conf", text)
        self.run("systemctl", "daemon-reload")

    def outside(self, pid: str) -> int:
        for entry in os.listdir("/proc"):
            try:
                lines = Path("/proc", entry, "status").read_text().splitlines()
                own, inside = (os.readlink(f"/proc/{n}/ns/pid") for n in (entry, self.init))
            except OSError:
                continue
            numbers = next((line.split() for line in lines if line.startswith("NSpid:")), [])
            if own == inside and numbers[-1:] == [pid]:
                return int(entry)
        pytest.fail(f"there is no process {pid} inside")


def _control_groups() -> Path:
    """The directory of this process's group, where groups of its own can be made."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.split()[0] == "cgroup2":
            groups = Path("/proc/self/cgroup").read_text().splitlines()
            inside = next(group[3:] for group in groups if group.startswith("0::"))
            path = Path(left.split()[4] + inside.rstrip("/"))
            if os.access(path, os.W_OK):
                return path
    pytest.skip("needs control groups, version 2: mount -t cgroup2 none /sys/fs/cgroup")


@contextmanager
def booted() -> Iterator[Booted]:
    """A systemd that has started up; skips where its surroundings cannot be made."""
    if not os.access(SYSTEMD, os.X_OK):
        pytest.skip("needs systemd: apt-get install systemd")
    groups = _control_groups()
    work = Path(tempfile.mkdtemp(prefix="monarchfs-test-"))
    work.chmod(0o755)
    (work / "layer").mkdir()
    (work / "units").mkdir()
    for name in TARGETS:
        text = f"[Unit]\nDescription={name}\nDefaultDependencies=no\n"
        (work / "units" / f"{name}.target").write_text(text)
    text = "[Unit]\nDescription=tests\nRequires=basic.target\nAfter=basic.target\n"
    (work / "units" / "test.target").write_text(text)
    group = groups / work.name
    group.mkdir()
    process = _start(work, group)
    try:
        system = Booted(work, _init_of(process, work))
        wait_for(
            lambda: system.run("systemctl", "is-system-running", check=False).stdout == "running\n",
            "systemd to be up",
        )
        yield system
    finally:
        _end(process, group)
        shutil.rmtree(work, ignore_errors=True)


def _start(work: Path, group: Path) -> subprocess.Popen[bytes]:
    namespaces = ["unshare", *("-m", "-u", "-i", "-p", "-C", "-f"), "--kill-child=KILL"]
    words = ["sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh", *namespaces]
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "WORK": str(work),
        "REPOSITORY": str(REPOSITORY),
        "UNITS": UNITS,
        "SYSTEMD": SYSTEMD,
    }
    with open(work / "setup.log", "wb") as log:
        return subprocess.Popen(
            [*words, "sh", "-c", _SCRIPT],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _init_of(process: subprocess.Popen[bytes], work: Path) -> int:
    deadline = time.monotonic() + _BOOT_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = (work / "setup.log").read_text(errors="replace").splitlines()[-2:]
            pytest.skip(f"systemd's surroundings cannot be made here: {'; '.join(last)}")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/comm").read_text() == "systemd\n":
            return int(children[0])
        time.sleep(0.01)
    pytest.fail("systemd did not start")


def _end(process: subprocess.Popen[bytes], group: Path) -> None:
    # The only child of unshare(1), which ends with it.
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in children or [str(process.pid)]:
            os.kill(int(pid), signal.SIGKILL)
        process.wait(30)

    def empty() -> bool:
        try:
            for directory, _, _ in os.walk(group, topdown=False):
                os.rmdir(directory)
        except OSError:
            return False
        return True

    wait_for(empty, f"the control group {group} to be empty")
