"""The system calls, with arguments made by chance, and what is compared of their results.

A call is a tuple: its name and its arguments, plain values, so that a history can be printed, cut
and run again. Descriptors and maps are named by a slot; a call on an empty one does nothing.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import random
import select
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import Any

Call = tuple[Any, ...]
Argument = Callable[[random.Random], Any]
CALLS: dict[str, tuple[Callable[..., Any], tuple[Argument, ...], int]] = {}
SLOTS = 6
AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH, AT_EACCESS = 0x100, 0x1000, 0x200
SYS = {"getdents64": 217, "statx": 332, "openat2": 437, "faccessat2": 439}
"""Of x86-64; elsewhere these calls are left out."""
libc = ctypes.CDLL(None, use_errno=True)
X86_64 = os.uname().machine == "x86_64"

LONG = "l" * 255
ODD = os.fsdecode(b"not utf-8 \xff\xfe")
FILES = [
    "empty", "tiny", "small", "page", "middle", "large", "huge", "sparse", "d/file", "d/hard",
    "d/deep/er/file", "secret", "setuid", "new\nline", ODD, LONG, "many/7", "many/299",
    "changing/0", "changing/1", "changing/2",
]  # fmt: skip
LINKS = [
    *("link", "dangling", "loop", "dirlink", "absolute", "long link", "d/up", "chain"),
    "dirlink/file",
]
DIRECTORIES = ["d", "d/deep", "d/deep/er", "void", "many", "changing", "closed", "."]
SPECIAL = ["fifo", "socket", "null"]
ODDITIES = [
    "missing", "d/missing", "small/x", "n" * 256, "d/" + "n" * 600, "", "d/../small", "d//deep/",
    "small/", "link/", "dirlink/", "dirlink/../small", "missing/..", "fifo/", "loop/x",
]  # fmt: skip
XATTRS = [
    "user.a", "user.empty", "user.large", "user.none", "security.x", "system.posix_acl_access",
    "bad", "user.", "user." + "x" * 251,
]  # fmt: skip


class Side:
    """One of both trees, as one process has it open. Changing: what is open."""

    def __init__(self, root: str, *, mirrored: bool) -> None:
        self.mirrored = mirrored
        self.root = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        os.stat(root)  # statx(2) with AT_STATX_DONT_SYNC shows what was asked for before
        self.fds: dict[int, int] = {}
        self.maps: dict[int, mmap.mmap] = {}

    def put(self, slot: int, fd: int) -> str:
        self.end(slot)
        self.fds[slot] = fd
        return f"open {stat.S_IFMT(os.fstat(fd).st_mode):o}"

    def end(self, slot: int) -> None:
        if (fd := self.fds.pop(slot, None)) is not None:
            os.close(fd)

    def end_all(self) -> None:
        for slot in list(self.fds):
            self.end(slot)
        for pages in self.maps.values():
            pages.close()
        self.maps.clear()


def slot(chance: random.Random) -> int:
    return chance.randrange(SLOTS)


def name(chance: random.Random) -> str:
    kinds = [FILES, FILES, FILES, LINKS, DIRECTORIES, SPECIAL, ODDITIES]
    return chance.choice(chance.choice(kinds))


def some(*values: Any) -> Argument:
    return lambda chance: chance.choice(values)


def bits(*flags: int) -> Argument:
    """Few of these, often none."""
    return lambda chance: reduce(or_, chance.choices(flags, k=chance.choice((0, 0, 1, 1, 2, 3))), 0)


def offset(chance: random.Random) -> int:
    near = chance.choice((0, 0, 1, 4096, 5000, 131072, 131089, 3 << 20, 8 << 20, 70 << 20))
    return chance.choice((near, near + chance.randrange(-3, 4), chance.randrange(1 << 23), -1))


size = some(0, 1, 7, 100, 4096, 4097, 65536, 131072, 200_000, 1 << 20, (1 << 20) + 3)
open_flags = bits(
    os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND, os.O_NONBLOCK, os.O_DIRECT, os.O_DIRECTORY,
    os.O_NOFOLLOW, os.O_NOATIME, os.O_CLOEXEC, os.O_PATH, os.O_SYNC, os.O_DSYNC, os.O_NOCTTY,
    os.O_TMPFILE, os.O_ASYNC,
)  # fmt: skip


def call(*arguments: Argument, weight: int = 2) -> Callable[[Callable[..., Any]], Any]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        CALLS[function.__name__] = function, arguments, weight
        return function

    return add


def made(chance: random.Random) -> Call:
    words = list(CALLS)
    (word,) = chance.choices(words, [CALLS[word][2] for word in words])
    return word, *(argument(chance) for argument in CALLS[word][1])


def carried_out(side: Side, one: Call) -> Any:
    """What came of it, as far as it can be compared."""
    function, arguments, _weight = CALLS[one[0]]
    if arguments and arguments[0] is slot and one[0] not in OPENS and one[1] not in side.fds:
        return None
    try:
        return function(side, *one[1:])
    except OSError as exc:
        return errno.errorcode.get(exc.errno or 0, exc.errno)
    except (ValueError, OverflowError) as exc:
        return type(exc).__name__


def syscall(word: str, *arguments: Any) -> int:
    if not X86_64:
        raise OSError(errno.ENOSYS, word)
    result: int = libc.syscall(SYS[word], *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), word)
    return result


def filled(word: str, *arguments: Any, room: int) -> tuple[int, bytes]:
    """What a function of libc's fills a buffer of so many bytes with; without one, its size."""
    buffer = ctypes.create_string_buffer(room + 1)
    got: int = getattr(libc, word)(*arguments, buffer if room else None, room)
    if got < 0:
        raise OSError(ctypes.get_errno(), word)
    return got, buffer.raw[: got if room else 0]


def shown(st: os.stat_result) -> tuple[Any, ...]:
    return (
        oct(st.st_mode), st.st_nlink, st.st_uid, st.st_gid, st.st_size, st.st_blocks, st.st_blksize,
        st.st_mtime_ns, st.st_ctime_ns, st.st_rdev,
    )  # fmt: skip


def harmless(path: str, flags: int) -> int:
    """Nobody waits for the other end of a FIFO."""
    return flags | os.O_NONBLOCK if "fifo" in path else flags


@call(slot, name, some(os.O_RDONLY, os.O_RDONLY, os.O_WRONLY, os.O_RDWR), open_flags, weight=8)
def openat(side: Side, at: int, path: str, mode: int, flags: int) -> str:
    return side.put(at, os.open(path, harmless(path, mode | flags), 0o600, dir_fd=side.root))


@call(slot, some(*FILES), weight=12)
def open_file(side: Side, at: int, path: str) -> str:
    return side.put(at, os.open(path, os.O_RDONLY, dir_fd=side.root))


@call(slot, name, open_flags, some(0, 0, 1, 2, 4, 8, 16, 12, 64), weight=4)
def openat2(side: Side, at: int, path: str, flags: int, resolve: int) -> str:
    mode = 0o600 if flags & (os.O_CREAT | os.O_TMPFILE) else 0
    how = struct.pack("QQQ", harmless(path, flags), mode, resolve)
    for _ in range(1000):
        # Any rename(2) on the machine may disturb a path with "..": openat2(2), EAGAIN.
        with suppress(BlockingIOError):
            return side.put(at, syscall("openat2", side.root, os.fsencode(path), how, len(how)))
    raise BlockingIOError(errno.EAGAIN, path)


@call(slot, slot, some(0, os.O_PATH, os.O_NOFOLLOW, os.O_DIRECT, os.O_RDWR))
def open_again(side: Side, at: int, other: int, flags: int) -> str | None:
    if at not in side.fds:
        return None
    path = f"/proc/self/fd/{side.fds[at]}"
    if stat.S_ISFIFO(os.fstat(side.fds[at]).st_mode):
        return None
    return side.put(other, os.open(path, flags | os.O_NONBLOCK))


@call(name, some(True, False), weight=6)
def fstatat(side: Side, path: str, follow: bool) -> Any:
    return shown(os.stat(path, dir_fd=side.root, follow_symlinks=follow))


@call(name, bits(AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH),
      some(0, 0x2000, 0x4000, 0x800, 0x6000), some(0, 1, 0x7FF, 0xFFF, 0x200, 1 << 31))  # fmt: skip
def statx(side: Side, path: str, flags: int, sync: int, mask: int) -> Any:
    buffer = ctypes.create_string_buffer(256)
    syscall("statx", side.root, os.fsencode(path), flags | sync, ctypes.c_uint(mask), buffer)
    got, block, _attributes, links, uid, gid, mode = struct.unpack_from("IIQIIIH", buffer)
    length, blocks = struct.unpack_from("QQ", buffer, 40)
    return got & mask & 0x7FF, block, links, uid, gid, oct(mode), length, blocks


@call(name, some(0, 1, 2, 4, 5, 6, 7, 9), bits(AT_EACCESS, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH))
def faccessat2(side: Side, path: str, mode: int, flags: int) -> int:
    try:
        return syscall("faccessat2", side.root, os.fsencode(path), mode, flags)
    except PermissionError:
        # A file system that is read-only says so first, a mount that is read-only last.
        raise OSError(errno.EROFS if mode & os.W_OK else errno.EACCES, path) from None


@call(name, some(0, 1, 3, 100, 2000))
def readlinkat(side: Side, path: str, room: int) -> Any:
    return filled("readlinkat", side.root, os.fsencode(path), room=room)


@call(name, weight=3)
def listdir(side: Side, path: str) -> Any:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=side.root)
    try:
        with os.scandir(fd) as scan:
            return sorted((e.name, e.is_dir(follow_symlinks=False), e.is_symlink()) for e in scan)
    finally:
        os.close(fd)


@call(some(*DIRECTORIES, "small", "dirlink"), some(300, 1000, 4096, 32768))
def getdents(side: Side, path: str, room: int) -> Any:
    fd = os.open(path, os.O_RDONLY, dir_fd=side.root)
    try:
        buffer, found = ctypes.create_string_buffer(room), []
        while got := syscall("getdents64", fd, buffer, room):
            at = 0
            while at < got:
                length, kind = struct.unpack_from("HB", buffer, at + 16)
                found.append((buffer.raw[at + 19 : at + length].split(b"\0")[0], kind))
                at += length
        return sorted(found)
    finally:
        os.close(fd)


@call(name, some(*XATTRS), some(0, 1, 3, 100, 3000, 65536), some("getxattr", "lgetxattr"))
def getxattr(side: Side, path: str, attribute: str, room: int, function: str) -> Any:
    full = os.fsencode(f"/proc/self/fd/{side.root}/{path}")
    return filled(function, full, attribute.encode(), room=room)


@call(name, some(0, 1, 8, 300), some("listxattr", "llistxattr"))
def listxattr(side: Side, path: str, room: int, function: str) -> Any:
    full = os.fsencode(f"/proc/self/fd/{side.root}/{path}")
    got, names = filled(function, full, room=room)
    return got, sorted(names.split(b"\0"))


@call(name, name, some(*range(12)), weight=3)
def write_attempt(side: Side, path: str, other: str, what: int) -> Any:
    root = side.root
    full = f"/proc/self/fd/{root}/{path}"
    attempts: list[Callable[[], Any]] = [
        lambda: os.mkdir(path, dir_fd=root),
        lambda: os.rmdir(path, dir_fd=root),
        lambda: os.unlink(path, dir_fd=root),
        lambda: os.rename(path, other, src_dir_fd=root, dst_dir_fd=root),
        lambda: os.link(path, other, src_dir_fd=root, dst_dir_fd=root),
        lambda: os.symlink(other, path, dir_fd=root),
        lambda: os.mknod(path, 0o100644, dir_fd=root),
        lambda: os.chmod(path, 0o777, dir_fd=root),
        lambda: os.utime(path, dir_fd=root),
        lambda: os.truncate(full, 3),
        lambda: os.setxattr(full, "user.new", b"x"),
        lambda: os.chown(path, 1, 1, dir_fd=root, follow_symlinks=False),
    ]
    return attempts[what]()


@call(weight=0)
def end_all(side: Side) -> None:
    side.end_all()


@call(slot, size, weight=6)
def read(side: Side, at: int, count: int) -> Any:
    return aligned(side, at, count, 0) and os.read(side.fds[at], count)


@call(slot, size, offset, weight=12)
def pread(side: Side, at: int, count: int, where: int) -> Any:
    return aligned(side, at, count, where) and os.pread(side.fds[at], count, where)


@call(slot, size, size, offset, some(0, 0, 2, 4, 1 << 20), weight=3)
def preadv2(side: Side, at: int, one: int, two: int, where: int, flags: int) -> Any:
    if not aligned(side, at, one | two, where) or where < 0:
        return None  # -1 stands for the descriptor's own offset there
    buffers = bytearray(one), bytearray(two)
    got = os.preadv(side.fds[at], buffers, where, flags)
    return got, (bytes(buffers[0]) + bytes(buffers[1]))[:got]


@call(slot, some(1, 2, 33, 256), some(0, 1, 31, 256, 768, 17_000), weight=6)
def pread_pages(side: Side, at: int, pages: int, start: int) -> Any:
    """Aligned in every way, as O_DIRECT may want it."""
    with mmap.mmap(-1, pages * 4096) as room:
        got = os.preadv(side.fds[at], [room], start * 4096)
        return got, room[:got]


@call(slot, weight=4)
def open_direct(side: Side, at: int) -> Any:
    if not stat.S_ISREG(os.fstat(side.fds[at]).st_mode):
        return None
    return side.put(at, os.open(f"/proc/self/fd/{side.fds[at]}", os.O_RDONLY | os.O_DIRECT))


def aligned(side: Side, at: int, count: int, where: int) -> bool:
    """Past the page cache a mount takes any offset, the source's file system may not: that is left
    to ``pread_pages``."""
    flags = fcntl.fcntl(side.fds[at], fcntl.F_GETFL)
    return not flags & os.O_DIRECT or (flags & os.O_PATH) != 0


@call(slot, offset, some(os.SEEK_SET, os.SEEK_CUR, os.SEEK_END, os.SEEK_DATA, os.SEEK_HOLE, 9))
def lseek(side: Side, at: int, where: int, whence: int) -> Any:
    fd = side.fds[at]
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return None  # a directory's offsets are each file system's own
    if whence not in (os.SEEK_DATA, os.SEEK_HOLE) or side.mirrored:
        return os.lseek(fd, where, whence)
    # Holes are not mirrored: to the mount all of a file is data.
    os.lseek(fd, 0, os.SEEK_CUR)  # fails where the descriptor allows none
    if not 0 <= where < (end := os.fstat(fd).st_size):
        raise OSError(errno.ENXIO, "beyond the end of the file")
    return os.lseek(fd, where if whence == os.SEEK_DATA else end, os.SEEK_SET)


@call(slot, slot)
def dup(side: Side, at: int, other: int) -> Any:
    return side.put(other, os.dup(side.fds[at]))


@call(slot, weight=4)
def close(side: Side, at: int) -> None:
    side.end(at)


@call(slot, size)
def in_child(side: Side, at: int, count: int) -> Any:
    """A child reads on with what it inherited; the offset is common."""
    fd = side.fds[at]
    if not aligned(side, at, count, 0) or not stat.S_ISREG(os.fstat(fd).st_mode):
        return None
    child = os.fork()
    if child == 0:
        with suppress(OSError):
            os._exit(sum(os.read(fd, count)) % 200)
        os._exit(255)
    return os.waitpid(child, 0)[1], os.lseek(fd, 0, os.SEEK_CUR)


@call(slot, size, offset, some("splice", "sendfile", "copy_file_range"), weight=4)
def moved(side: Side, at: int, count: int, where: int, how: str) -> Any:
    fd, count = side.fds[at], min(count, 60_000)
    if not aligned(side, at, count, where) or stat.S_ISFIFO(os.fstat(fd).st_mode):
        return None
    out, into = os.pipe() if how != "copy_file_range" else (target := os.memfd_create("m"), target)
    try:
        match how:
            case "splice":
                got = os.splice(fd, into, count, offset_src=where)
            case "sendfile":
                got = os.sendfile(into, fd, where, count)
            case _:
                got = os.copy_file_range(fd, into, count, where, 0)
        return got, os.pread(out, got, 0) if out == into else got and os.read(out, got)
    finally:
        for end in {out, into}:
            os.close(end)


@call(slot, slot, some(mmap.MAP_SHARED, mmap.MAP_PRIVATE), size, some(0, 0, 4096, 131072, 1 << 20))
def map_it(side: Side, at: int, where: int, flags: int, length: int, start: int) -> Any:
    if (before := side.maps.pop(where, None)) is not None:
        before.close()
    end = os.fstat(side.fds[at]).st_size
    if not 0 < length <= end - start:
        return None  # beyond its end is SIGBUS
    side.maps[where] = pages = mmap.mmap(
        side.fds[at], length, flags=flags, prot=mmap.PROT_READ, offset=start
    )
    return pages[:]


@call(slot, some(mmap.MADV_WILLNEED, mmap.MADV_DONTNEED, mmap.MADV_RANDOM, mmap.MADV_SEQUENTIAL))
def map_read(side: Side, where: int, advice: int) -> Any:
    if (pages := side.maps.get(where)) is None:
        return None
    pages.madvise(advice)
    return pages[:]


@call(slot, offset, size)
def readahead(side: Side, at: int, where: int, length: int) -> Any:
    if libc.readahead(side.fds[at], ctypes.c_long(where), length) < 0:
        raise OSError(ctypes.get_errno(), "readahead")
    return 0


def of_one(word: str, function: Callable[..., Any], *more: Argument, weight: int = 2) -> None:
    """A call of a descriptor and plain values alone."""
    CALLS[word] = lambda side, at, *rest: function(side.fds[at], *rest), (slot, *more), weight


of_one("fstat", lambda fd: shown(os.fstat(fd)), weight=3)
of_one("fadvise", os.posix_fadvise, offset, size, some(*range(7)), weight=4)
of_one("flock", lambda fd, how: fcntl.flock(fd, how | fcntl.LOCK_NB), some(*range(8)))
ASKED = fcntl.F_GETFL, fcntl.F_GETFD, fcntl.F_GETLEASE, fcntl.F_GETPIPE_SZ, 1034
of_one("control", fcntl.fcntl, some(*ASKED))


@call(slot, some(5, 6, 36, 37), some(0, 1, 2), some(0, 1, 2), offset, some(0, 1, 100, -1), weight=4)
def lock(side: Side, at: int, command: int, kind: int, whence: int, where: int, n: int) -> Any:
    wanted = struct.pack("hhqqi4x", kind, whence, where, n, 0)
    return struct.unpack("hhqqi4x", fcntl.fcntl(side.fds[at], command, wanted))[:4]


@call(slot, some(*range(6)))
def write_on(side: Side, at: int, what: int) -> Any:
    fd = side.fds[at]
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return None
    attempts: list[Callable[[], Any]] = [
        lambda: os.write(fd, b"x"),
        lambda: os.ftruncate(fd, 1),
        lambda: os.fsync(fd),
        lambda: os.posix_fallocate(fd, 0, 9),
        lambda: os.fchmod(fd, 0o777),
        lambda: os.fdatasync(fd),
    ]
    return attempts[what]()


@call(slot)
def poll(side: Side, at: int) -> Any:
    poller = select.poll()
    poller.register(side.fds[at], select.POLLIN | select.POLLOUT | select.POLLPRI)
    return [events for _fd, events in poller.poll(0)]


OPENS = {"openat", "open_file", "openat2", "map_read"}
"""Calls whose first slot need not be open."""
