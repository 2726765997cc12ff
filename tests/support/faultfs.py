"""A source for tests and measurements: a FUSE mirror of a directory that is slow, fails or hangs on
demand, and counts what is asked of it.

Run as ``python -m tests.support.faultfs DIRECTORY MOUNTPOINT``. It answers JSON lines on standard
input with a JSON line on standard output:

    {"do": "faults", "delay": SECONDS, "delayed": [OP], "rate": BYTES_PER_SECOND,
     "fail": {"OP PATH": ERRNO}, "hang": ["OP PATH"], "flushes": BOOL,
     "targets": {PATH: [NUMBER]}}
    {"do": "counts", "reset": BOOL} -> {"operations": {"read": 3, ...}, "read_bytes": 17}

OP is one of lookup, getattr, readdir, open, read, flush, xattr, or ``*`` for all; PATH is relative
to the root, or ``*``. There is a flush (at close(2)) only where ``flushes`` was said before the
first one, and from then on. ``targets`` are the storage targets that have a file, as Lustre says
it in the attribute ``lustre.lov``; they stay, and a mount asks once whether there are any.
``delay`` is what each operation takes, of those in ``delayed`` (left out: of all), however many
there are at once; ``rate`` is shared by all reads. What a message leaves out is off. Reads are not
cached by the kernel, so that each one is seen and counted as it was made.
"""

import errno
import json
import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import pyfuse3
import trio

from monarchfs.source.layout import ATTRIBUTE
from tests.support.layouts import plain

P = ParamSpec("P")
T = TypeVar("T")


def mapped(handler: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    @wraps(handler)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await handler(*args, **kwargs)
        except OSError as exc:
            raise pyfuse3.FUSEError(exc.errno or errno.EIO) from exc

    return run


class FaultFS(pyfuse3.Operations):
    enable_acl = True

    def __init__(self, root: bytes) -> None:
        super().__init__()
        self.root = root
        self.paths: dict[int, bytes] = {pyfuse3.ROOT_INODE: b""}
        self.open_paths: dict[int, bytes] = {}
        self.listings: dict[int, tuple[bytes, list[bytes]]] = {}
        self.counts: Counter[str] = Counter()
        self.read_bytes = 0
        self.delay = 0.0
        self.delayed: set[str] | None = None
        self.rate = 0.0
        self.busy_until = 0.0
        self.fail: dict[str, int] = {}
        self.hang: set[str] = set()
        # The kernel remembers that a file system does not want to hear of close(2).
        self.flushes = False
        self.targets: dict[str, list[int]] = {}
        self.changed = trio.Event()

    def set_faults(self, message: dict[str, Any]) -> None:
        self.delay = message.get("delay", 0.0)
        self.delayed = set(message["delayed"]) if "delayed" in message else None
        self.rate = message.get("rate", 0.0)
        self.fail = message.get("fail", {})
        self.hang = set(message.get("hang", []))
        self.flushes = message.get("flushes", self.flushes)
        self.targets = message.get("targets", self.targets)
        self.changed.set()
        self.changed = trio.Event()

    async def fault(self, op: str, path: bytes) -> None:
        """Count the operation, and delay, hang or fail it as told."""
        self.counts[op] += 1
        name = os.fsdecode(path)
        keys = [f"{o} {p}" for o in (op, "*") for p in (name, "*")]
        while any(key in self.hang for key in keys):
            await self.changed.wait()
        if self.delay and (self.delayed is None or op in self.delayed):
            await trio.sleep(self.delay)
        for key in keys:
            if key in self.fail:
                raise OSError(self.fail[key], os.strerror(self.fail[key]))

    def full(self, path: bytes) -> bytes:
        return os.path.join(self.root, path) if path else self.root

    def entry(self, path: bytes) -> pyfuse3.EntryAttributes:
        st = os.lstat(self.full(path))
        ino = pyfuse3.ROOT_INODE if not path else st.st_ino
        self.paths[ino] = path
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = pyfuse3.InodeT(ino)
        entry.entry_timeout = entry.attr_timeout = 0
        for name in (
            *("st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_size", "st_blocks"),
            *("st_blksize", "st_atime_ns", "st_mtime_ns", "st_ctime_ns"),
        ):
            setattr(entry, name, getattr(st, name))
        return entry

    @mapped
    async def lookup(
        self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: Any
    ) -> pyfuse3.EntryAttributes:
        path = os.path.join(self.paths[parent_inode], name)
        await self.fault("lookup", path)
        return self.entry(path)

    @mapped
    async def getattr(self, inode: pyfuse3.InodeT, ctx: Any) -> pyfuse3.EntryAttributes:
        await self.fault("getattr", self.paths[inode])
        return self.entry(self.paths[inode])

    @mapped
    async def readlink(self, inode: pyfuse3.InodeT, ctx: Any) -> bytes:
        return os.readlink(self.full(self.paths[inode]))

    @mapped
    async def opendir(self, inode: pyfuse3.InodeT, ctx: Any) -> int:
        path = self.paths[inode]
        await self.fault("readdir", path)
        number = len(self.listings) + 1
        self.listings[number] = (path, sorted(os.listdir(self.full(path))))
        return number

    @mapped
    async def readdir(self, fh: pyfuse3.FileHandleT, start_id: int, token: Any) -> None:
        path, names = self.listings[fh]
        for number, name in enumerate(names[start_id:], start_id + 1):
            entry = self.entry(os.path.join(path, name))
            if not pyfuse3.readdir_reply(token, name, entry, number):
                break

    @mapped
    async def open(self, inode: pyfuse3.InodeT, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        path = self.paths[inode]
        await self.fault("open", path)
        fd = os.open(self.full(path), os.O_RDONLY)
        self.open_paths[fd] = path
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(fd), direct_io=True)

    @mapped
    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        await self.fault("read", self.open_paths[fh])
        data = os.pread(fh, size, off)
        if self.rate:
            self.busy_until = max(self.busy_until, trio.current_time()) + len(data) / self.rate
            await trio.sleep_until(self.busy_until)
        self.read_bytes += len(data)
        return data

    @mapped
    async def flush(self, fh: pyfuse3.FileHandleT) -> None:
        if not self.flushes:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        await self.fault("flush", self.open_paths[fh])

    @mapped
    async def release(self, fh: pyfuse3.FileHandleT) -> None:
        os.close(fh)
        del self.open_paths[fh]

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        return

    @mapped
    async def getxattr(self, inode: pyfuse3.InodeT, name: pyfuse3.XAttrNameT, ctx: Any) -> bytes:
        await self.fault("xattr", self.paths[inode])
        if name == ATTRIBUTE and self.targets:
            targets = self.targets.get(os.fsdecode(self.paths[inode]))
            if targets is None:
                raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
            return plain(targets)
        return os.getxattr(self.full(self.paths[inode]), name, follow_symlinks=False)

    @mapped
    async def listxattr(self, inode: pyfuse3.InodeT, ctx: Any) -> list[bytes]:
        await self.fault("xattr", self.paths[inode])
        names = os.listxattr(self.full(self.paths[inode]), follow_symlinks=False)
        return [os.fsencode(name) for name in names]

    @mapped
    async def statfs(self, ctx: Any) -> pyfuse3.StatvfsData:
        result = os.statvfs(self.root)
        data = pyfuse3.StatvfsData()
        for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files"):
            setattr(data, name, getattr(result, name))
        data.f_namemax = 255
        return data


async def serve(operations: FaultFS) -> None:
    async def commands() -> None:
        stream = trio.lowlevel.FdStream(os.dup(0))
        pending = b""
        async for part in stream:
            *lines, pending = (pending + part).split(b"\n")
            for line in lines:
                print(json.dumps(answer(operations, json.loads(line))), flush=True)
        pyfuse3.terminate()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(commands)
        await pyfuse3.main(max_tasks=1000)
        nursery.cancel_scope.cancel()


def answer(operations: FaultFS, message: dict[str, Any]) -> dict[str, Any]:
    if message["do"] == "faults":
        operations.set_faults(message)
        return {}
    counts = {"operations": dict(operations.counts), "read_bytes": operations.read_bytes}
    if message.get("reset"):
        operations.counts.clear()
        operations.read_bytes = 0
    return counts


def main() -> None:
    directory, mountpoint = sys.argv[1:]
    assert stat.S_ISDIR(os.stat(directory).st_mode)
    operations = FaultFS(os.fsencode(os.path.realpath(directory)))
    options = {"fsname=faultfs", "ro"}
    if os.geteuid() == 0:
        options.add("allow_other")
    pyfuse3.init(operations, mountpoint, options)
    print(json.dumps({}), flush=True)
    try:
        trio.run(serve, operations)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
