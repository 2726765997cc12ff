"""A kernel that holds opens to its rules, and the supervisor's half of passthrough without one."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

from monarchfs.fuse.session import hooks  # isort: skip  # before pyfuse3
from monarchfs.config import Config, TierSpec, User
from monarchfs.fs.file_system import FileSystem
from monarchfs.fuse.adapter import Adapter, SessionCalls
from monarchfs.fuse.handle_table import HandleTable, make_table
from monarchfs.fuse.interrupts import Interrupts
from monarchfs.fuse.passthrough import Passthrough
from monarchfs.fuse.relay import Relay
from monarchfs.supervisor import backing
from monarchfs.supervisor.backing import BackingFiles
from monarchfs.supervisor.messages import Back, Unback, parse
from monarchfs.types import TierSize
from tests.layers.no_readers import NoReaders
from tests.support.mirror import Mirror


class Registry:
    """The kernel's backing files: a descriptor of its own for each id."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.files: dict[int, int] = {}
        self.made = 0
        self.refuses = self.refuses_next = 0
        patch.setattr(backing, "register", self._register)
        patch.setattr(backing, "unregister", self._unregister)

    def _register(self, _fuse: int, descriptor: int) -> int:
        code, self.refuses_next = self.refuses_next or self.refuses, 0
        if code:
            raise OSError(code, os.strerror(code))
        self.made += 1
        self.files[self.made] = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        return self.made

    def _unregister(self, _fuse: int, number: int) -> None:
        os.close(self.files.pop(number))

    def close(self) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)


@dataclass(eq=False)
class Open:
    """One open file of a process: its own descriptor of the backing file, as the kernel has."""

    ino: int
    number: int
    backing_id: int
    descriptor: int = -1


class Threads(NoReaders):
    """Those of the C part, to which inodes are lent, and which open what is not resident in the
    source. Changing: which are; their own opens, by number, of both kinds; ``misses``, the share
    that they open of what has no replica; what those read, ``held``."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.random = rng
        self.lent: dict[int, int] = {}
        self.own: dict[int, int] = {}
        self.missed: dict[int, int] = {}
        self.misses = 0.0
        self.missed_opens = 0
        self.held: dict[int, bytes] = {}
        self.missing: Callable[[int], bytes | None] = lambda ino: None
        self.wanted: Callable[[int], None] = lambda ino: None
        self.opened = 0
        self.slots: HandleTable

    def begin(self, slots: HandleTable) -> None:
        self.slots = slots
        self.lent.clear()
        self.own.clear()
        self.missed.clear()
        self.held.clear()

    def delegate(self, ino: int, backing_id: int) -> bool:
        if self.used(ino):
            raise AssertionError(f"inode {ino} is lent while it is open")
        if self.random.random() < 0.2:
            return False
        self.lent[ino] = backing_id
        return True

    def reclaim(self, ino: int) -> int:
        del self.lent[ino]
        return _forget(self.own, ino)

    def cached(self, ino: int) -> int:
        return _forget(self.missed, ino)

    def open(self, ino: int, unique: int) -> tuple[int, int] | None:
        """Number and backing id; None where the open is Python's."""
        if self.random.random() < self.misses and (data := self.missing(ino)) is not None:
            number = self.slots.add(ino, unique, 0)
            self.missed[number] = ino
            self.held[number] = data
            self.missed_opens += 1
            self.wanted(ino)
            return number, 0
        if (backing_id := self.lent.get(ino)) is None:
            return None
        number = self.slots.add(ino, unique, backing_id)
        self.own[number] = ino
        self.opened += 1
        return number, backing_id

    def release(self, number: int) -> bool:
        """Whether the RELEASE is theirs."""
        self.held.pop(number, None)
        if self.own.pop(number, None) is None and self.missed.pop(number, None) is None:
            return False
        self.slots.end(number)
        return True

    def used(self, ino: int) -> bool:
        return any(slot.ino == ino for slot in self.slots)

    def try_remove(self, ino: int) -> bool:
        return not self.used(ino)


def _forget(opens: dict[int, int], ino: int) -> int:
    numbers = [number for number, opened in opens.items() if opened == ino]
    for number in numbers:
        del opens[number]
    return len(numbers)


class Passing:
    """A mirror with an adapter, a supervisor, and the kernel's view of what is open.

    ``eio`` are opens that the kernel would have answered with EIO.
    """

    def __init__(
        self, mirror: Mirror, patch: pytest.MonkeyPatch, *, most: int = 64, seed: int = 0
    ) -> None:
        self.mirror = mirror
        self.random = random.Random(seed)
        self.registry = Registry(patch)
        self.table = make_table(1024)
        user = User("me", os.getuid(), os.getgid())
        tiers = tuple(TierSpec(tier.path, TierSize(bytes=1)) for tier in mirror.tiers)
        config = Config("/s", "/m", tiers, "/state", "/run", "0" * 16, user)
        places = [tier.dir_fd for tier in mirror.tiers]
        self.supervisor = BackingFiles(config, -1, places, self.table)
        self.supervisor.most = most
        devices = frozenset(os.stat(tier.path).st_dev for tier in mirror.tiers)
        self.supervisor._devices = devices
        self.answers = True
        self.opens: list[Open] = []
        self.eio: list[str] = []
        self._unique = 0
        self.threads = Threads(self.random)
        self.threads.wanted = mirror.copier.jobs.opened
        self.threads.missing = self._missing
        mirror.cache.readers = mirror.cache.lookup._readers = self.threads
        self._backed = (0, 0)
        self._outbox: list[tuple[Passthrough, dict[str, Any]]] = []
        self._in: trio.MemorySendChannel[tuple[Passthrough, dict[str, Any]]]
        self._in, out = trio.open_memory_channel[tuple[Passthrough, dict[str, Any]]](10_000)
        mirror.nursery.start_soon(self._deliver, out)
        self.begin_worker()

    def begin_worker(self) -> None:
        """The first one, or one that takes the place of another."""
        mirror = self.mirror
        self.supervisor.close_unused()  # as ``supervisor.startup`` does
        self.passthrough = passthrough = Passthrough(
            mirror.files,
            lambda message: self._send(passthrough, message),
            mirror.metrics,
            self.threads,
            counts=True,
        )
        mirror.cache.accounts.bind(self.passthrough)
        self.slots = HandleTable(self.table, hooks)
        self.threads.begin(self.slots)
        self.adapter = Adapter(
            FileSystem(mirror.tree, mirror.files, mirror.xattrs),
            Interrupts(mirror.metrics),
            mirror.metrics,
            Relay(hooks, mirror.metrics, free_opens=False),
            self.slots,
            self.passthrough,
            SessionCalls(lambda: (self._unique, 0), lambda: 0, self._answer_with),
        )
        self.adapter.take_over()
        self.passthrough.begin(self.supervisor.most)

    def _missing(self, ino: int) -> bytes | None:
        """All of a file that has no replica, as the source has it; None for another version."""
        node = self.mirror.index.tree.node(ino)
        if node is None or node.outdated or self.mirror.index.replicas.replica(ino) is not None:
            return None
        path = self.mirror.area.source / os.fsdecode(node.name)
        st = path.stat()
        version = st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns
        return path.read_bytes() if version == node.stat.version[1:] else None

    def kill_worker(self) -> None:
        """All that it had in memory is gone; what the cache counts of it, too."""
        for handle in list(self.adapter.handles._open.values()):
            handle.release()
        for replica in self.passthrough._held.values():
            if replica is not None:
                self.mirror.cache.release(replica)
        self.slots.close()

    def close(self) -> None:
        self.slots.close()
        self.registry.close()
        os.close(self.table)

    # -- the channel

    def _send(self, sender: Passthrough, message: dict[str, Any]) -> bool:
        said = parse(json.dumps(message).encode())
        assert isinstance(said, (Back, Unback))
        reply = self.supervisor.answer(said)
        if self.answers:
            self._in.send_nowait((sender, reply))
        return True

    async def _deliver(
        self, out: trio.MemoryReceiveChannel[tuple[Passthrough, dict[str, Any]]]
    ) -> None:
        async for receiver, reply in out:
            for _ in range(self.random.randrange(4)):
                await trio.lowlevel.checkpoint()
            if receiver is not self.passthrough:
                continue  # it died
            receiver.answered(
                reply["number"], reply["ids"], reply.get("error", 0), reply.get("reason", "")
            )

    def answer_at_last(self) -> None:
        """What was asked first, before ``answers`` was set again."""
        self.answers = True
        self.passthrough.answered(2, [1], 0, "")

    # -- what processes do, by way of the kernel

    def _answer_with(self, number: int, backing_id: int) -> None:
        self._backed = (number, backing_id)

    async def open(self, path: str) -> Open:
        """As the kernel: an outdated inode is looked up once more."""
        try:
            return await self._open(await self.mirror.ino(path))
        except Exception as exc:
            if getattr(exc, "errno", None) != errno.ESTALE:
                raise
            return await self._open(await self.mirror.ino(path))

    async def _open(self, ino: int) -> Open:
        self._unique += 2
        keep_cache = False
        if (opened := self.threads.open(ino, self._unique)) is not None:
            number, backing_id = opened
        else:
            info = await self.adapter.open(ino, os.O_RDONLY, None)  # type: ignore[arg-type]
            number, backing_id = self._backed
            self._backed = (0, 0)
            if number != info.fh:
                number, backing_id = info.fh, 0
            keep_cache = info.keep_cache
        # Between the answer and the opener's turn others have theirs, but no RELEASE can come.
        one = Open(ino, number, backing_id)
        mode = next((o.backing_id for o in self.opens if o.ino == ino), None)
        if mode is not None and mode != backing_id:
            self.eio.append(f"inode {ino}: {backing_id} while {mode}")
        if backing_id and keep_cache:
            self.eio.append(f"inode {ino}: keep_cache with a backing file")
        self.opens.append(one)
        for _ in range(self.random.randrange(3)):
            await trio.lowlevel.checkpoint()
        if backing_id not in (0, *self.registry.files):
            self.eio.append(f"inode {ino}: there is no backing file {backing_id}")
        elif backing_id:
            one.descriptor = os.dup(self.registry.files[backing_id])
        return one

    async def read(self, one: Open) -> bytes:
        if one.backing_id:
            return os.pread(one.descriptor, 1 << 20, 0)
        if one.number in self.threads.held:
            return self.threads.held[one.number]
        return bytes(await self.adapter.read(one.number, 0, 1 << 20))

    async def release(self, one: Open) -> None:
        self.opens.remove(one)
        if one.descriptor >= 0:
            os.close(one.descriptor)
        if not self.threads.release(one.number):
            await self.adapter.release(one.number)

    async def read_file(self, path: str) -> tuple[bytes, bool]:
        """Its bytes, and whether the kernel read them itself."""
        one = await self.open(path)
        data = await self.read(one)
        await self.release(one)
        return data, one.backing_id != 0

    def open_replicas(self) -> list[Path]:
        """What backing files keep open."""
        return [Path(os.readlink(f"/proc/self/fd/{fd}")) for fd in self.registry.files.values()]
