"""Opening /dev/fuse and mounting: with mount(2) where that is allowed, else through fusermount3.

Always read-only, without set-user-id programs and without device files. None of this touches the
source; the mount point is looked up by the kernel.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess

from monarchfs.fuse.mountinfo import open_directory
from monarchfs.system.bounded import Answer, bounded_call
from monarchfs.types import OperationError

DEVICE = "/dev/fuse"
FUSERMOUNT = "fusermount3"
MTAB = "/etc/mtab"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/run/wrappers/bin"
"""Where programs are looked for; the caller's $PATH has no say in what is run here."""

PAGE_BYTES = 4096
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
_MOUNT_SECONDS = 20
_CAP_SYS_ADMIN = 21


def mount(
    *,
    source: str,
    mountpoint: str,
    uid: int,
    gid: int,
    allow_other: bool,
    noexec: bool = False,
    device: str = DEVICE,
) -> int:
    """Mounts on ``mountpoint`` and returns the descriptor of /dev/fuse (O_NONBLOCK, O_CLOEXEC).

    ``source`` is what the mount is named after; ``uid`` and ``gid`` are whose mount it is: unless
    ``allow_other``, processes of others get EACCES, root's too (fuse_allow_current_process in
    fs/fuse/dir.c). With ``noexec`` programs on the mount cannot be run. Raises OperationError.
    """
    check_device(device)
    if may_mount():
        flags = MS_RDONLY | MS_NOSUID | MS_NODEV | (MS_NOEXEC if noexec else 0)
        return _mount_as_root(source, mountpoint, uid, gid, allow_other, flags, device)
    return _mount_as_user(source, mountpoint, allow_other, noexec)


def check_device(device: str = DEVICE) -> None:
    """Raises OperationError if this process could not mount, as far as can be told beforehand.

    Nobody has run this with other pages than those of 4 KiB, in which core/_reply.c counts what a
    pipe holds.
    """
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    if page_bytes != PAGE_BYTES:
        raise OperationError(
            f"this kernel's memory pages have {page_bytes >> 10} KiB, with which monarchfs was"
            " never run: boot a kernel whose pages have 4 KiB"
        )
    try:
        st = os.stat(device)
    except OSError as error:
        raise OperationError(
            f"cannot use {device}: {error.strerror}: load the kernel's module (modprobe fuse), or"
            f" start the container with --device {device}"
        ) from None
    if not stat.S_ISCHR(st.st_mode):
        raise OperationError(f"{device} is not a device: load the kernel's module (modprobe fuse)")
    if not os.access(device, os.R_OK | os.W_OK):
        raise OperationError(
            f"you may not open {device}: ask the administrator for mode 0666 on it"
        )
    if not may_mount():
        check_fusermount()


def check_fusermount() -> None:
    """Raises OperationError if this process, which may not mount, could not unmount later."""
    fusermount_path()
    if not os.path.exists(MTAB):  # setmntent(3), in may_unmount of util/fusermount.c
        raise OperationError(
            f"{FUSERMOUNT} cannot unmount without {MTAB}: have it made as root (ln -s"
            f" /proc/self/mounts {MTAB})"
        )


def may_mount() -> bool:
    """Whether this process calls mount(2) itself: root does, and who has CAP_SYS_ADMIN in a user
    namespace of its own (fuse_fill_super in fs/fuse/inode.c wants /dev/fuse opened in there)."""
    if os.geteuid() == 0:
        return True
    with open("/proc/self/status", "rb") as status:
        effective = next((line for line in status if line.startswith(b"CapEff:")), b"CapEff: 0")
    return bool(int(effective.split()[1], 16) >> _CAP_SYS_ADMIN & 1)


def fusermount_path() -> str:
    """The full name of fusermount3; raises OperationError if it is not there."""
    path = shutil.which(FUSERMOUNT, path=SYSTEM_PATH)
    if path is None:
        raise OperationError(
            f"{FUSERMOUNT} was not found: install the package fuse3, or mount as root"
        )
    return path


def _mount_as_root(
    source: str, mountpoint: str, uid: int, gid: int, allow_other: bool, flags: int, device: str
) -> int:
    try:
        # Open mode matters to libfuse: a blocking read would stall the worker's event loop.
        descriptor = os.open(device, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise OperationError(
            f"cannot open {device}: {error.strerror}: in a container, allow it with"
            f" --device {device}"
        ) from None
    # The kernel checks modes only where several users come in; on a mount for one user the worker
    # is that user, and the source decides.
    options = f"fd={descriptor},rootmode=40000,user_id={uid},group_id={gid}" + (
        ",default_permissions,allow_other" if allow_other else ""
    )
    try:
        code = _mount_call(source, mountpoint, flags, options, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    if code == 0:
        return descriptor
    os.close(descriptor)
    remedy = {
        errno.EPERM: ": root needs CAP_SYS_ADMIN here (in a container: --cap-add SYS_ADMIN)",
        errno.ENODEV: ": load the kernel's module (modprobe fuse)",
    }.get(code, "")
    raise OperationError(f"cannot mount on {mountpoint}: {os.strerror(code)}{remedy}")


def _mount_call(source: str, mountpoint: str, flags: int, options: str, device: int) -> int:
    """mount(2); returns errno, or 0. In a child, because looking up the mount point may hang."""

    def call() -> Answer:
        import ctypes  # only here, because loading it is slow

        libc = ctypes.CDLL(None, use_errno=True)
        try:
            place = open_directory(mountpoint)
        except OSError as error:
            return error.errno, ()
        failed = libc.mount(
            os.fsencode(source),
            b"/proc/self/fd/%d" % place,
            b"fuse.monarchfs",
            ctypes.c_ulong(flags),
            options.encode(),
        )
        return (ctypes.get_errno() if failed else 0), ()

    code, _ = bounded_call(
        call,
        timeout=_MOUNT_SECONDS,
        overdue=f"cannot mount on {mountpoint}: mount(2) did not return within {_MOUNT_SECONDS} s:"
        " check the file system that holds it",
        keep=[device],
    )
    return int(code)


def _mount_as_user(source: str, mountpoint: str, allow_other: bool, noexec: bool) -> int:
    """Through fusermount3, which sends the descriptor over the socket in _FUSE_COMMFD."""
    options = ["ro", "nosuid", "nodev", f"fsname={_escaped(source)}", "subtype=monarchfs"]
    if allow_other:
        options += ["default_permissions", "allow_other"]
    if noexec:
        options.append("noexec")
    program = fusermount_path()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                [program, "-o", ",".join(options), "--", mountpoint],
                env={"PATH": SYSTEM_PATH, "LANG": "C", "_FUSE_COMMFD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
            )
        try:
            _, complaint = process.communicate(timeout=_MOUNT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise OperationError(
                f"cannot mount on {mountpoint}: {FUSERMOUNT} did not return within"
                f" {_MOUNT_SECONDS} s: check the file system that holds it"
            ) from None
        if process.returncode != 0:
            raise OperationError(_explain(mountpoint, os.fsdecode(complaint), program))
        _, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
    if len(descriptors) != 1:
        raise OperationError(f"cannot mount on {mountpoint}: {FUSERMOUNT} sent no descriptor")
    os.set_inheritable(descriptors[0], False)
    os.set_blocking(descriptors[0], False)
    return descriptors[0]


def _escaped(value: str) -> str:
    """A value as fusermount3 reads it: a backslash before commas and backslashes."""
    return value.replace("\\", "\\\\").replace(",", "\\,")


def _explain(mountpoint: str, complaint: str, program: str) -> str:
    """``complaint``: what ``program`` said, each line with its own name before it."""
    lines = (line.removeprefix(f"{program}:") for line in complaint.splitlines())
    reason = " ".join(" ".join(lines).split()) or "no reason given"
    remedy = ""
    if "user_allow_other" in complaint:
        reason, remedy = (
            "allow_other is not allowed for users",
            (": leave it out, or have user_allow_other put into /etc/fuse.conf"),
        )
    elif "write access" in complaint or "not owned by user" in complaint:
        remedy = ": use a directory of your own"
    elif "Operation not permitted" in complaint:
        remedy = f": {FUSERMOUNT} must be setuid root; reinstall the package fuse3"
    return f"cannot mount on {mountpoint}: {reason}{remedy}"
