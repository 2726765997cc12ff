"""Backing files: which files of its tiers a worker may have the kernel read in the daemon's place.

Only CAP_SYS_ADMIN may register one, and the kernel checks nothing else: it opens the file with the
rights of whoever registers it, in whatever mode the application asks for (fs/fuse/passthrough.c),
and accepts O_PATH descriptors (fs/fuse/backing.c). So each offer is checked here as if the worker
were hostile. It names files below its tiers and sends no descriptors, because closing one may wait
for whoever serves its file. An accepted file belongs to the mount's user and lies on the device of
a tier: nobody gets more than its owner could give away.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import stat
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from monarchfs.config import Config, DataPath
from monarchfs.fuse.handle_table import backing_ids
from monarchfs.fuse.mountinfo import mount_of
from monarchfs.fuse.protocol import InitFlag, ProtocolError, parse_init_request
from monarchfs.supervisor.identity import in_first_user_namespace
from monarchfs.supervisor.messages import Back, Offer, Unback
from monarchfs.types import OperationError, UsageError

log = logging.getLogger(__name__)

MOST_IDS = 1 << 16
"""Each keeps a file of the kernel's open; no limit of this process or its user counts them."""

_BYTES_PER_ID = 1 << 20
"""Of the machine's memory: an open file with its inode takes the kernel a kilobyte or two."""

_CLOSED_TOGETHER = 1000
"""A millisecond of ioctl(2)."""

_BACKING_OPEN, _BACKING_CLOSE = 0x4010E501, 0x4004E502
"""FUSE_DEV_IOC_BACKING_OPEN and _CLOSE of include/uapi/linux/fuse.h."""
_MAP = struct.Struct("=iIQ")
"""fuse_backing_map: fd, flags, padding."""
_ID = struct.Struct("=I")
_STACKED = frozenset(("overlay", "ecryptfs"))
"""File systems whose files lie on another one (super_block.s_stack_depth)."""

_OPENAT2 = 437
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 1, 2, 4, 8
_RESOLVE = _NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH
_HOW = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE)
"""open_how: flags, mode, resolve."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t),
)


class BackingRefused(Exception):
    """A file that is not accepted. ``code`` is an errno for the worker."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def check_privileges(data_path: DataPath) -> None:
    """Raises UsageError where passthrough is required and this process may not set it up."""
    if data_path is DataPath.PASSTHROUGH and not _may_register():
        reason = "only mounts made by root may use it, outside of any user namespace"
        raise UsageError(_refusal(reason))


def most_ids(memory_bytes: int) -> int:
    """How many backing files a machine with so much memory may have open for one mount."""
    return max(1, min(MOST_IDS, memory_bytes // _BYTES_PER_ID))


def check(st: os.stat_result, ino: int, uid: int, devices: Collection[int]) -> None:
    """Raises BackingRefused unless a file with this stat(2) is the regular file ``ino`` of ``uid``,
    on one of ``devices``."""
    if not stat.S_ISREG(st.st_mode):
        raise BackingRefused(errno.EINVAL, "it is not a regular file")
    if st.st_dev not in devices:
        raise BackingRefused(errno.EXDEV, "it lies on the device of no tier")
    if st.st_uid != uid:
        raise BackingRefused(errno.EPERM, f"it belongs to user {st.st_uid}")
    if st.st_ino != ino:
        raise BackingRefused(errno.ESTALE, "another file has its name")


class BackingFiles:
    """The backing ids of one mount. They belong to the connection and outlive workers.

    Constant: descriptors of the mount, the table of open files and the tiers; whose files are
    accepted; whether passthrough is required. Changing: ``stack_depth``, the answer to FUSE_INIT, 0
    for no passthrough; ``most``, how many ids there may be, and on which devices their files lie
    (both known from `begin` on); the registered ids.
    """

    def __init__(self, config: Config, fuse: int, tiers: Sequence[int], handles: int) -> None:
        """``handles`` is the table of open files, which workers write."""
        self.most = 0
        self.stack_depth = 0
        self._fuse = fuse
        self._handles = handles
        self._uid = config.user.uid
        self._tiers = [(spec.path, tier) for spec, tier in zip(config.tiers, tiers, strict=True)]
        self._wanted = config.data_path in (DataPath.AUTO, DataPath.PASSTHROUGH)
        self._needed = config.data_path is DataPath.PASSTHROUGH
        self._devices: frozenset[int] = frozenset()
        self._probed = 0
        self._earlier: Iterator[int] = iter(())
        self._ids: set[int] = set()

    def prepare(self, request: bytes) -> None:
        """Decide what to ask of the kernel that sent this FUSE_INIT. Raises OperationError for what
        is no FUSE_INIT, and where passthrough is required and not offered."""
        if not self._wanted:
            return
        try:
            flags = parse_init_request(request).flags
        except ProtocolError as error:
            raise OperationError(f"FUSE_INIT failed: {error}") from None
        if InitFlag.PASSTHROUGH not in flags:
            self._impossible(
                "the kernel does not offer it; it needs Linux 6.9 or later with"
                " CONFIG_FUSE_PASSTHROUGH"
            )
        elif _may_register():
            mounts = [mount_of(f"/proc/self/fd/{tier}") for _path, tier in self._tiers]
            # Not 2 everywhere: it would keep others from mounting an overlayfs on this mount.
            self.stack_depth = 2 if any(m and m.fstype in _STACKED for m in mounts) else 1

    def try_passthrough(self) -> None:
        """FUSE_INIT is answered: find out whether the kernel allows passthrough to this process and
        these tiers. Raises OperationError where it does not and passthrough is required."""
        if not self.stack_depth:
            return
        devices = set()
        for path, tier in self._tiers:
            mount = mount_of(f"/proc/self/fd/{tier}")
            if mount is not None and mount.fstype.startswith("fuse"):
                # Who serves it could have this process wait, for ever.
                self._impossible(f"tier {path} lies on a FUSE file system")
                continue
            try:
                os.close(find_beneath(tier, "."))
            except OSError as error:
                # A container's filter may forbid the call, to root as well.
                self._impossible(f"openat2(2) fails: {error.strerror}")
                continue
            try:
                device, self._probed = probe(self._fuse, tier)
                devices.add(device)
            except OSError as error:
                reason = f"it failed for a file in tier {path}: {error.strerror}"
                if error.errno == errno.EPERM:
                    reason = "it needs CAP_SYS_ADMIN outside of any user namespace"
                elif error.errno == errno.ELOOP:
                    reason = f"tier {path} lies on more file systems than the kernel allows"
                self._impossible(reason)
        self._devices = frozenset(devices)
        if devices:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            self.most = most_ids(memory)

    def _impossible(self, reason: str) -> None:
        if self._needed:
            raise OperationError(_refusal(reason))
        log.debug("no passthrough: %s", reason)

    def __len__(self) -> int:
        return len(self._ids)

    def open(self, offer: Offer) -> int:
        """A new id for a file. Raises BackingRefused. Takes a few microseconds: the names of files
        that the worker has open are in the kernel's memory."""
        if len(self._ids) >= self.most:
            raise BackingRefused(errno.ENOSPC, f"there are {self.most} already")
        if offer.tier >= len(self._tiers):
            raise BackingRefused(errno.EXDEV, "it lies in no tier")
        try:
            descriptor = find_beneath(self._tiers[offer.tier][1], offer.path)
            try:
                check(os.fstat(descriptor), offer.ino, self._uid, self._devices)
                number = register(self._fuse, descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise BackingRefused(error.errno or errno.EIO, str(error.strerror)) from None
        self._ids.add(number)
        return number

    def close(self, numbers: Iterable[int]) -> None:
        """Forget ids, except those that are not registered. Opens that use one keep it."""
        for number in self._ids.intersection(list(numbers)):
            self._ids.discard(number)
            unregister(self._fuse, number)

    def take_over(self, stack_depth: int) -> None:
        """The connection had another supervisor, which answered FUSE_INIT so. To be called while no
        worker serves. Ids of that one that no open uses are closed by and by (``tick``)."""
        self.stack_depth = stack_depth
        self.try_passthrough()
        if not self._devices:
            return
        self._ids = backing_ids(self._handles)
        # The kernel counts upwards (idr_alloc_cyclic in fs/fuse/backing.c).
        self._earlier = iter(range(1, self._probed))

    def tick(self) -> None:
        """Close some ids of an earlier supervisor: there may be as many as the mount had opens."""
        for number in islice(self._earlier, _CLOSED_TOGETHER):
            if number not in self._ids:
                unregister(self._fuse, number)

    def close_unused(self) -> None:
        """Forget the ids that no open uses, because the next worker does not know of them. To be
        called before it begins: ids that it opens could be lost here."""
        if self._ids:
            self.close(self._ids - backing_ids(self._handles))

    def answer(self, message: Back | Unback) -> dict[str, Any]:
        """The reply (docs/ARCHITECTURE.md, The channel). An id is 0 where a file was refused. The
        caller closes the ids if it cannot send the reply."""
        if isinstance(message, Unback):
            self.close(message.ids)
            return {"do": "backed", "number": message.number, "ids": []}
        ids: list[int] = []
        reply: dict[str, Any] = {"do": "backed", "number": message.number, "ids": ids}
        for offer in message.offers:
            try:
                ids.append(self.open(offer))
            except BackingRefused as refused:
                ids.append(0)
                reply |= {"error": refused.code, "reason": str(refused)}
        return reply


def _may_register() -> bool:
    # More may be missing, as `BackingFiles.begin` finds out; but this much can be told in advance.
    return os.geteuid() == 0 and in_first_user_namespace()


def _refusal(reason: str) -> str:
    return f"--data-path passthrough is not possible: {reason}: use --data-path relay, or auto"


def register(fuse: int, descriptor: int) -> int:
    """The kernel's id for a backing file. Raises OSError: EPERM without CAP_SYS_ADMIN in the first
    user namespace or without passthrough in FUSE_INIT, ELOOP for a file on too many file systems,
    ENOTTY before Linux 6.9."""
    argument = bytearray(_MAP.pack(descriptor, 0, 0))
    number: int = fcntl.ioctl(fuse, _BACKING_OPEN, argument, True)
    return number


def unregister(fuse: int, number: int) -> None:
    """Raises nothing: the kernel may have ended the connection, and its ids with it."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(fuse, _BACKING_CLOSE, _ID.pack(number))


def probe(fuse: int, tier: int) -> tuple[int, int]:
    """The device of files in the directory ``tier``, found by registering one, and the id that this
    got. A file is asked because the directory may have another device (overlayfs). Raises OSError
    as `register`, or of the tier's file system."""
    descriptor = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=tier)
    try:
        number = register(fuse, descriptor)
        unregister(fuse, number)
        return os.fstat(descriptor).st_dev, number
    finally:
        os.close(descriptor)


def find_beneath(directory: int, path: str) -> int:
    """An O_PATH descriptor of what lies there. Nothing is opened, and no symbolic link or other
    file system is entered on the way, so only the directory's file system is asked, also on close.
    Raises OSError; ENOSYS before Linux 5.6, EPERM where a container's filter forbids it."""
    found: int = _libc.syscall(_OPENAT2, directory, os.fsencode(path), _HOW, len(_HOW))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found
