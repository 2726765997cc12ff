"""What the machine under the tests lets them do. Where it does not, a test is skipped with one line
that names the remedy; `not_tested` puts those lines together."""

import os
import pty
import pwd
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.support.programs import execute

REPOSITORY = Path(__file__).resolve().parents[2]

_TRIAL_MOUNT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % device
alone = libc.unshare(0x20000) == 0 and libc.mount(b"none", b"/proc", None, 0x40000, None) == 0
if not alone or libc.mount(b"trial", b"/proc/self", b"fuse", 7, options) != 0:
    sys.exit(os.strerror(ctypes.get_errno()))
"""
"""CLONE_NEWNS, MS_PRIVATE: a mount that nobody else sees, and that goes with its process. Below
/proc, which is a mount point also where / is none (chroot)."""


@cache
def no_fuse() -> str:
    if not os.path.exists("/dev/fuse"):
        return "needs /dev/fuse: modprobe fuse; for a container: --device /dev/fuse"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "needs leave to open /dev/fuse: chmod 666 /dev/fuse, or run as root"
    if os.geteuid() != 0 and shutil.which("fusermount3") is None:
        return "needs fusermount3: apt-get install fuse3"
    as_root = [sys.executable, "-I", "-c", _TRIAL_MOUNT]
    tried = execute(as_root) if os.geteuid() == 0 else _trial_as_user()
    if tried.returncode == 0:
        return ""
    return f"needs leave to mount ({_last(tried)}): for a container: --cap-add SYS_ADMIN"


def _last(tried: subprocess.CompletedProcess[str]) -> str:
    return (tried.stderr.strip().splitlines() or ["no reason given"])[-1]


def _trial_as_user() -> subprocess.CompletedProcess[str]:
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryDirectory(prefix="monarchfs-test-") as point:
        tried = execute(
            ["fusermount3", "-o", "ro", "--", point],
            env={**os.environ, "LC_ALL": "C", "_FUSE_COMMFD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
        )
        if tried.returncode == 0:
            subprocess.run(["fusermount3", "-u", "-z", "--", point], check=True)
    return tried


@cache
def no_namespaces() -> str:
    """Why root can have no mount namespace here that leaves the mounts of others alone."""
    tried = execute(["unshare", "--mount", "--propagation", "private", "true"])
    if tried.returncode == 0:
        return ""
    if os.geteuid() == 0 and "propagation" in tried.stderr:
        # mount(2): EINVAL, where the root directory is no mount point.
        return "needs a root that is a mount point: for a chroot: mount --bind DIR DIR"
    return f"needs a mount namespace ({_last(tried)}): for a container: --cap-add SYS_ADMIN"


@cache
def _no_loop_device() -> str:
    if os.geteuid() != 0:
        return "needs root, for a loop device: sudo make test"
    if not shutil.which("mkfs.ext4"):
        return "needs mkfs.ext4: apt-get install e2fsprogs, and /usr/sbin in PATH"
    try:
        with open("/dev/loop-control", "rb"):
            pass
    except OSError as error:
        return f"needs a loop device ({error.strerror}): for a container: --privileged"
    return no_namespaces() if "CAP_SYS_ADMIN" not in capabilities() else ""


def no_place_to_build() -> str:
    places = (REPOSITORY / "build" / "bench", REPOSITORY / "build", REPOSITORY)
    place = next(path for path in places if path.exists())
    if os.access(place, os.W_OK):
        return ""
    return f"needs a clone of one's own, to build in: sudo chown -R $USER {REPOSITORY}"


def capabilities() -> set[str]:
    """Of those that tests ask for, which are in effect (capabilities(7))."""
    bits = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    return {name for name, bit in (("CAP_SYS_ADMIN", 21), ("CAP_MKNOD", 27)) if bits >> bit & 1}


@cache
def cannot_be(user: str) -> str:
    """Why a test cannot run this clone's programs as ``user``."""
    entry = pwd.getpwnam(user)
    identity = [f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups"]
    # By way of a shell, because setpriv looks programs up with root's capabilities.
    shell = ["setpriv", *identity, "/bin/sh", "-c", 'exec "$0" "$@"']
    for words in ([*shell, "true"], [*shell, sys.executable, "-c", "import monarchfs"]):
        tried = execute(words, cwd="/")
        if tried.returncode != 0:
            closed = _closed_to(entry, Path(sys.prefix), REPOSITORY)
            if closed is not None:
                return (
                    f"needs a clone that {user} may enter: chmod o+x {closed}, or clone elsewhere"
                )
            return f"needs to run this Python as {user} ({_last(tried)}): PYTHON=/usr/bin/python3"
    return ""


def _closed_to(entry: pwd.struct_passwd, *paths: Path) -> Path | None:
    for path in paths:
        for directory in (*reversed(path.parents), path):
            st = directory.stat()
            if not st.st_mode & (0o100 if st.st_uid == entry.pw_uid else 0o001):
                return directory
    return None


def skip_unless(user: str) -> None:
    if reason := cannot_be(user):
        pytest.skip(reason)


def skip_unless_named(arguments: Sequence[str]) -> None:
    """The same for a user for whom root is to mount, or whose rights a command of root's takes."""
    named = re.search(r"(?:--user[= ]|\buser=)(nobody|daemon|games)\b", " ".join(arguments))
    if named and os.geteuid() == 0:
        skip_unless(named[1])


def open_terminal() -> tuple[int, int]:
    """Both ends of a new terminal, as pty.openpty(3); skips where there can be none."""
    try:
        return pty.openpty()
    except OSError as error:
        pytest.skip(f"needs a terminal ({error}): mount -t devpts devpts /dev/pts")


def mount_tmpfs(path: Path, options: str = "mode=1777") -> None:
    """Mounts one on ``path``, which the test unmounts; skips where root may mount nothing."""
    if "CAP_SYS_ADMIN" not in capabilities():
        pytest.skip("needs leave to mount a tmpfs: for a container: --cap-add SYS_ADMIN")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Writes of this process past that fail (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def mounted_tmpfs(path: Path, options: str = "mode=1777") -> Iterator[None]:
    mount_tmpfs(path, options)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def mount_ext4(image: Path, point: Path, size: int, *make: str, options: str = "loop") -> None:
    """Mounts a new one of ``size`` bytes, which lies in the file ``image``, on ``point``. Both are
    made here; the test unmounts. Skips where that cannot be. ``make``: options of mkfs.ext4(8)."""
    if reason := _no_loop_device():
        pytest.skip(reason)
    image.touch()
    os.truncate(image, size)
    point.mkdir()
    made = ["mkfs.ext4", "-q", "-F", *make, str(image)]
    for command in (made, ["mount", "-o", options, str(image), str(point)]):
        done = execute(command)
        if done.returncode != 0:
            pytest.skip(f"needs ext4 on a loop device: {done.stderr.strip()}")


def _needed(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(reason), reason=reason or "there is all it needs")


def program(name: str, package: str | None = None) -> pytest.MarkDecorator:
    """Skips where a program is missing; ``package`` is Debian's."""
    missing = shutil.which(name) is None
    return _needed(f"needs {name}: apt-get install {package or name}" if missing else "")


requires_root = _needed("" if os.geteuid() == 0 else "needs root: sudo make test")
requires_fuse = _needed(no_fuse())
requires_namespaces = _needed(no_namespaces())
requires_own_clone = _needed(no_place_to_build())


def heed_signals() -> None:
    """nohup(1), and shells for what they start in the background, have it ignore signals; so would
    each program that a test starts. A handler is not handed on by execve(2), and does nothing here:
    what was to be ignored still ends nothing."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: None)


def not_tested(skipped: Iterable[tuple[str, str]], total: int) -> Iterator[str]:
    """A line a reason for which something was ``skipped`` (file, reason), the commonest first."""
    files: dict[str, Counter[str]] = defaultdict(Counter)
    for file, reason in skipped:
        files[reason][os.path.basename(file)] += 1
    if files:
        count = sum(counted.total() for counted in files.values())
        yield f"not tested here: {count} of {total}"
    for reason, counted in sorted(files.items(), key=lambda item: -item[1].total()):
        (first, _), more = counted.most_common(1)[0], len(counted) - 1
        others = f" and {more} other{'s' if more > 1 else ''}" if more else ""
        yield f"{counted.total():5}  {reason} ({first}{others})"
