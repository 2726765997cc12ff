"""What the kernel's FUSE offers, asked by a trial mount in a namespace of its own, which nobody
sees and which ends with its process."""

from __future__ import annotations

import ctypes
import os
import select

from monarchfs.doctor.checks import Check, ok, problem, warning
from monarchfs.fuse.mount import DEVICE, MS_NODEV, MS_NOSUID, MS_RDONLY
from monarchfs.fuse.protocol import InitFlag, ProtocolError, parse_init_request
from monarchfs.supervisor.namespace import map_ids
from monarchfs.types import OperationError

FIRST_PASSTHROUGH = FIRST_RESEND = (6, 9)
"""Linux: include/uapi/linux/fuse.h, protocol 7.40."""

TRIAL_NAME = "monarchfs-doctor"

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_LARGEST_INIT = 1 << 18
_ANSWER_MS = 3000


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


def judge(
    flags: int | None, refusal: str, release: tuple[int, int], *, is_root: bool, passes: bool
) -> list[Check]:
    """What the answer means. Without one (None) the kernel's version decides; for root ``refusal``
    says that it cannot mount at all. ``passes``: this user may use passthrough if the kernel can.
    """
    checks = []
    if flags is None and is_root:
        remedy = "root needs CAP_SYS_ADMIN here (in a container: --cap-add SYS_ADMIN)"
        checks.append(problem("mount", f"a trial mount failed: {refusal}", remedy))
    elif flags is not None:
        checks.append(ok("mount", "a trial mount in a namespace of its own works"))
    seen = f"Linux {release[0]}.{release[1]}"
    known = "offered by the kernel" if flags is not None else f"expected of {seen}, not tried"
    tried = flags is not None

    def offers(flag: InitFlag, since: tuple[int, int]) -> bool:
        return bool(flags & flag) if flags is not None else release >= since

    resends = offers(InitFlag.HAS_RESEND, FIRST_RESEND)
    how = known if resends else f"{seen} does not offer it: requests are journalled instead"
    checks.append(
        _passthrough(
            offers(InitFlag.PASSTHROUGH, FIRST_PASSTHROUGH),
            seen,
            known,
            old=release < FIRST_PASSTHROUGH,
            tried=tried,
            passes=passes,
        )
    )
    checks.append(ok("resend", how, available=resends, used=True, tried=tried))
    return checks


def _passthrough(
    offered: bool, seen: str, known: str, *, old: bool, tried: bool, passes: bool
) -> Check:
    numbers = {"available": offered and passes, "used": True, "tried": tried}
    if not offered:
        why = f"{seen} does not offer it" if old else "this kernel was built without"
        remedy = "Linux {}.{} or later with CONFIG_FUSE_PASSTHROUGH".format(*FIRST_PASSTHROUGH)
        detail = f"{why}: reads are relayed by the daemon"
        return warning("passthrough", detail, remedy, **numbers)
    if not passes:
        detail = f"{known}; only mounts made by root may use it, outside of any user namespace"
        return ok("passthrough", detail, **numbers)
    return ok("passthrough", known, **numbers)


def _checked(result: int, doing: str) -> None:
    if result != 0:
        raise OperationError(f"may not {doing}: {os.strerror(ctypes.get_errno())}")
