"""The machine: kernel, /dev/fuse, fusermount3, the installation, limits, memory.

What the kernel's FUSE offers is asked by a trial mount in a namespace of its own, which nobody sees
and which ends with its process.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import select
import stat
import subprocess
from collections.abc import Sequence
from functools import partial
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
from typing import Any

from monarchfs.config import User
from monarchfs.doctor.checks import Check, Probe, Value, from_error, ok, problem, warning
from monarchfs.fuse.mount import (
    DEVICE,
    FUSERMOUNT,
    MS_NODEV,
    MS_NOSUID,
    MS_RDONLY,
    SYSTEM_PATH,
    check_device,
    fusermount_path,
)
from monarchfs.fuse.protocol import InitFlag, ProtocolError, parse_init_request
from monarchfs.supervisor.identity import in_first_user_namespace, popen_as
from monarchfs.supervisor.launch import module_command
from monarchfs.supervisor.namespace import map_ids
from monarchfs.supervisor.preflight import check_limits
from monarchfs.system.bounded import bounded_value
from monarchfs.system.memory import UNLIMITED, MemoryHeadroom, MemoryProbe
from monarchfs.system.sizes import format_bytes
from monarchfs.types import OperationError

FIRST_LARGE_READS = (4, 20)
"""Linux: FUSE_MAX_PAGES, without which a read request asks for 128 KiB at most."""
FIRST_PASSTHROUGH = (6, 9)
"""Linux: include/uapi/linux/fuse.h, protocol 7.40; resend is of the same release."""
FEW_DESCRIPTORS = 16384
LITTLE_MEMORY = 1 << 30
FUSE_CONF = "/etc/fuse.conf"
HUGE_PAGES = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
TRIAL_NAME = "monarchfs-doctor"
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_LARGEST_INIT = 1 << 18
_ANSWER_MS = 3000
_TRIAL_SECONDS = 5.0
_WORKER_SECONDS = 20.0

_WORKER_PROGRAM = """\
import ctypes, importlib.metadata, json, sys
import monarchfs.worker.__main__
fuse = ctypes.CDLL(None).fuse_pkgversion
fuse.restype = ctypes.c_char_p
print(json.dumps({
    "python": sys.version.split()[0],
    "pyfuse3": importlib.metadata.version("pyfuse3"),
    "libfuse": fuse().decode(),
}))
"""
"""libfuse is what the worker has loaded (as global symbols), whatever the number of its ABI."""


def release_of(text: str) -> tuple[int, int]:
    """Major and minor of a kernel's release; (0, 0) where there are none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def judge_kernel(release: str) -> Check:
    if release_of(release) < FIRST_LARGE_READS:
        detail = f"Linux {release} asks for 128 KiB at a time at most"
        return warning("kernel", detail, "Linux 4.20 or later", release=release)
    return ok("kernel", f"Linux {release}", release=release)


def device() -> list[Check]:
    """Whether /dev/fuse and what else mounting needs is there."""
    try:
        check_device()
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OperationError as error:
        return [from_error("device", error)]
    except OSError as error:
        remedy = f"load the kernel's module (modprobe fuse), or in a container --device {DEVICE}"
        return [problem("device", f"cannot open {DEVICE}: {error.strerror}", remedy)]
    return [ok("device", f"{DEVICE} can be opened")]


def fusermount() -> list[Check]:
    try:
        path = fusermount_path()
    except OperationError as error:
        if os.geteuid() == 0:
            return [ok("fusermount3", f"{FUSERMOUNT} is not there, and root does not need it")]
        return [from_error("fusermount3", error)]
    done = subprocess.run(
        [path, "-V"], capture_output=True, text=True, timeout=_TRIAL_SECONDS, check=False
    )
    version = (done.stdout.split() or ["?"])[-1]
    st, options = os.stat(path), os.statvfs(path).f_flag
    capable = "security.capability" in os.listxattr(path)
    return [
        judge_fusermount(
            path,
            version,
            st,
            honoured=not options & os.ST_NOSUID and not no_new_privileges(),
            capable=capable,
            is_root=os.geteuid() == 0,
        )
    ]


def judge_fusermount(
    path: str, version: str, st: os.stat_result, *, honoured: bool, capable: bool, is_root: bool
) -> Check:
    """``honoured``: set-user-id programs have an effect for this process; ``capable``: the file has
    capabilities instead."""
    privileged = capable or (st.st_uid == 0 and bool(st.st_mode & stat.S_ISUID))
    numbers: dict[str, Value] = {"path": path, "version": version, "setuid": privileged}
    text = f"{path} {version}"
    if is_root:
        return ok("fusermount3", f"{text}; root does not need it", **numbers)
    if not privileged:
        remedy = "reinstall the package fuse3, or mount as root"
        return problem("fusermount3", f"{text} is not setuid root", remedy, **numbers)
    if not honoured:
        detail = f"{text} is setuid, but that has no effect here (no_new_privs or nosuid)"
        remedy = "in a container, mount outside of it and bind the mount in"
        return problem("fusermount3", detail, remedy, **numbers)
    return ok("fusermount3", f"{text}, setuid root", **numbers)


def no_new_privileges() -> bool:
    """proc_pid_status(5), NoNewPrivs."""
    lines = _contents("/proc/self/status").splitlines()
    return any(line.split() == ["NoNewPrivs:", "1"] for line in lines)


def _contents(path: str) -> str:
    """Empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def judge_allow_other(fuse_conf: str, mounts: str, *, is_root: bool) -> Check:
    """Not a warning where it is missing: most mounts are for one user."""
    allowed = is_root or any(line.strip() == "user_allow_other" for line in fuse_conf.splitlines())
    if allowed and (hides := re.search(r" /proc proc .*\b(hidepid=\w+)", mounts)):
        detail = f"{hides[1]} on /proc: others who wait and get a signal may get EINTR after 5 s"
        return warning("allow_other", detail, "mount /proc without hidepid", allowed=True)
    if allowed:
        who = "root" if is_root else "you"
        return ok("allow_other", f"{who} may let others in", allowed=True)
    remedy = f"for -o allow_other: have user_allow_other put into {FUSE_CONF}"
    return ok("allow_other", "only you can enter your mounts", remedy, allowed=False)


def kernel_offers() -> list[Check]:
    """A trial mount, and what the kernel says then."""
    flags: int | None = None
    refusal = ""
    try:
        flags = bounded_value(
            lambda: int(ask_kernel()),
            timeout=_TRIAL_SECONDS,
            overdue="a trial mount did not come about in time",
        )
    except OperationError as error:
        refusal = str(error)
    release = release_of(platform.release())
    is_root = os.geteuid() == 0
    passes = is_root and in_first_user_namespace()
    return judge_offers(flags, refusal, release, is_root=is_root, passes=passes)


def ask_kernel() -> InitFlag:
    """The flags that the kernel offers in FUSE_INIT. For a child process: it leaves this mount
    namespace and, without root, this user namespace. Raises OperationError if that or the mount
    fails."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.geteuid(), os.getegid()
    spaces = _CLONE_NEWNS if uid == 0 else _CLONE_NEWNS | _CLONE_NEWUSER
    _checked(libc.unshare(spaces), "make a mount namespace")
    try:
        if uid != 0:
            map_ids(0, 0, uid, gid)
        fd = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise OperationError(f"cannot open {DEVICE}: {error.strerror}") from None
    target = b"/tmp" if os.path.isdir("/tmp") else b"/"
    private = ctypes.c_ulong(_MS_REC | _MS_PRIVATE)
    if libc.mount(b"none", b"/", None, private, None) != 0:
        # mount(2): EINVAL where the root directory is no mount point (chroot). /proc is one.
        target = b"/proc/self"
        private = ctypes.c_ulong(_MS_PRIVATE)
        _checked(libc.mount(b"none", b"/proc", None, private, None), "leave mounts of others alone")
    options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % fd
    flags = ctypes.c_ulong(MS_RDONLY | MS_NOSUID | MS_NODEV)
    _checked(libc.mount(TRIAL_NAME.encode(), target, b"fuse", flags, options), "mount")
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    if not poll.poll(_ANSWER_MS):
        raise OperationError("the kernel sent no FUSE_INIT")
    try:
        return parse_init_request(os.read(fd, _LARGEST_INIT)).flags
    except (OSError, ProtocolError) as error:
        raise OperationError(f"FUSE_INIT cannot be read: {error}") from None


def judge_offers(
    flags: int | None, refusal: str, release: tuple[int, int], *, is_root: bool, passes: bool
) -> list[Check]:
    """What the answer means. Without one (None) the kernel's version decides; for root ``refusal``
    says that it cannot mount at all. ``passes``: this user may use passthrough if the kernel can.
    """
    checks = []
    if flags is not None:
        checks.append(ok("mount", "a trial mount in a namespace of its own works"))
    elif is_root:
        remedy = "root needs CAP_SYS_ADMIN here (in a container: --cap-add SYS_ADMIN)"
        checks.append(problem("mount", f"a trial mount failed: {refusal}", remedy))
    passthrough, resend = (
        bool(flags & flag) if flags is not None else release >= FIRST_PASSTHROUGH
        for flag in (InitFlag.PASSTHROUGH, InitFlag.HAS_RESEND)
    )
    seen = f"Linux {release[0]}.{release[1]}"
    known = "offered by the kernel" if flags is not None else f"expected of {seen}, not tried"
    numbers = {"available": passthrough and passes, "used": True, "tried": flags is not None}
    if not passthrough:
        old = release < FIRST_PASSTHROUGH
        why = f"{seen} does not offer it" if old else "this kernel was built without"
        remedy = "Linux {}.{} or later with CONFIG_FUSE_PASSTHROUGH".format(*FIRST_PASSTHROUGH)
        detail = f"{why}: reads are relayed by the daemon"
        checks.append(warning("passthrough", detail, remedy, **numbers))
    else:
        only = "; only mounts made by root may use it, outside of any user namespace"
        checks.append(ok("passthrough", known if passes else known + only, **numbers))
    how = known if resend else f"{seen} does not offer it: requests are journalled instead"
    return [*checks, ok("resend", how, **{**numbers, "available": resend})]


def worker(user: User) -> list[Check]:
    """Whether ``user`` can run the worker's program: its imports are tried."""
    command = [*module_command("monarchfs.worker")[:-2], "-c", _WORKER_PROGRAM]
    try:
        done = subprocess.run(
            command,
            env={"PATH": SYSTEM_PATH, "LANG": "C.UTF-8"},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=_WORKER_SECONDS,
            check=False,
            **popen_as(user),
        )
    except subprocess.TimeoutExpired:
        detail = f"the worker's program did not load within {_WORKER_SECONDS:g} s"
        return [problem("worker", detail, "install monarchfs on a local disk")]
    except OSError as error:
        detail = f"{user.name} may not run {command[0]}: {error.strerror}"
        remedy = "install monarchfs where every user can read it"
        return [problem("worker", detail, remedy)]
    return [judge_worker(done.returncode, done.stdout, done.stderr, user.name)]


def judge_worker(code: int, output: str, errors: str, user: str) -> Check:
    if code != 0:
        last = (errors.strip().splitlines() or [f"exit code {code}"])[-1]
        detail = f"the worker's program does not run as {user}: {last}"
        return problem("worker", detail, "install monarchfs again, where users can read it")
    found = json.loads(output)
    detail = f"Python {found['python']}, pyfuse3 {found['pyfuse3']}, libfuse {found['libfuse']}"
    return ok("worker", detail, **found)


def judge_descriptors(most: int) -> Check:
    unlimited = most == RLIM_INFINITY
    numbers = {"most_open_files": None if unlimited else most}
    if not unlimited and most < FEW_DESCRIPTORS:
        detail = f"{most} open files at most; each open file of the mount needs one or two"
        remedy = f"ulimit -Hn {FEW_DESCRIPTORS} or more (limits.conf, LimitNOFILE=)"
        return warning("descriptors", detail, remedy, **numbers)
    detail = f"{'any number of' if unlimited else most} open files at most"
    return ok("descriptors", detail, **numbers)


def limits(user: User) -> list[Check]:
    """What a mount of ``user`` could not do without."""
    try:
        check_limits(user)
    except OperationError as error:
        return [from_error("limits", error)]
    return [ok("limits", "address space, file sizes, processes and threads are enough")]


def judge_memory(room: MemoryHeadroom, huge: str) -> Check:
    """``huge``: the contents of shmem_enabled, which has the setting in brackets."""
    match = re.search(r"\[(\w+)\]", huge)
    numbers: dict[str, Any] = {
        "available_bytes": room.available_bytes if room.available_bytes < UNLIMITED else None,
        "limit_bytes": room.limit_bytes if room.limit_bytes < UNLIMITED else None,
        "limited_by": room.limited_by,
        "huge_pages": match[1] if match else None,
    }
    if room.available_bytes >= UNLIMITED:
        return ok("memory", "no limit is known", **numbers)
    left, limit = format_bytes(room.available_bytes), format_bytes(room.limit_bytes)
    detail = f"{left} of {limit} left ({room.limited_by})"
    if room.available_bytes < LITTLE_MEMORY:
        remedy = "ask for more memory (Slurm: --mem), or use no tier in memory"
        return warning("memory", detail, remedy, **numbers)
    return ok("memory", detail, **numbers)


def _allow_other(is_root: bool) -> list[Check]:
    return [judge_allow_other(_contents(FUSE_CONF), _contents("/proc/mounts"), is_root=is_root)]


def _checked(result: int, doing: str) -> None:
    if result != 0:
        raise OperationError(f"may not {doing}: {os.strerror(ctypes.get_errno())}")


def probes(user: User) -> Sequence[tuple[str, float, Probe]]:
    """(name, seconds, probe) of each."""
    is_root = os.geteuid() == 0
    return (
        ("kernel", 2.0, lambda: [judge_kernel(platform.release())]),
        ("device", 5.0, device),
        ("fusermount3", 7.0, fusermount),
        ("allow_other", 2.0, partial(_allow_other, is_root)),
        ("mount", 10.0, kernel_offers),
        ("worker", _WORKER_SECONDS + 2, lambda: worker(user)),
        ("descriptors", 2.0, lambda: [judge_descriptors(getrlimit(RLIMIT_NOFILE)[1])]),
        ("limits", 12.0, lambda: limits(user)),
        ("memory", 5.0, lambda: [judge_memory(MemoryProbe().read(), _contents(HUGE_PAGES))]),
    )
