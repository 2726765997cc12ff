"""Promotion and demotion: a complete replica goes from one tier to another.

The bytes are checked on their way against the checksum that was taken when they came from the
source. Until the index says that the new copy is the replica, readers have the old one.
"""

from __future__ import annotations

import errno
import logging
import os
import time

import trio

from monarchfs.cache.records import Records
from monarchfs.cache.segments import Written
from monarchfs.placement.events import Move, Moved, MoveFailed
from monarchfs.store.checksum import checksum, combine
from monarchfs.store.errors import ReplicaLost
from monarchfs.store.read import read_full
from monarchfs.store.tier import Tier
from monarchfs.types import IndexWriteError, Replica, ReplicaState

log = logging.getLogger(__name__)

MOVE_BYTES = 1 << 20
CLOSED_SECONDS = 10.0
"""A replica that stays open for so long stays where it is: its old blocks would stay occupied."""


class Moves(Records):
    """The part of the cache that moves replicas between tiers."""

    def _begin_move(self, action: Move) -> None:
        record = self.index.replicas.replica(action.ino)
        if (
            record is None
            or record.state is not ReplicaState.RESIDENT
            or record.tier != action.tier
            or action.ino in self._busy
        ):
            self._handle(MoveFailed(action.ino))
            return
        self._busy[action.ino] = record.name
        self._nursery.start_soon(self._move, action, record)

    async def _move(self, action: Move, record: Replica) -> None:
        ino, to = action.ino, self.tiers[action.to]
        corrupt = moved = False
        try:
            for removal in self._removals.pending(to.id):
                await removal.done.wait()
            shares = bool(record.segment) and self._segments.takes(to.id, record.size)
            if not shares:
                self.index.replicas.begin_copy(ino, to.id, record.name)
            moved = await self._copy_and_commit(ino, record, to, shares=shares)
        except ReplicaLost as exc:
            corrupt = True
            log.warning("inode %d is not moved: %s", ino, exc)
        except IndexWriteError as exc:
            log.warning("inode %d is not moved: %s", ino, exc)
        except OSError as exc:
            self._tiers.failed(to, "moving a replica there", exc)
        finally:
            self._busy.pop(ino, None)
        if moved:
            return
        self._handle(MoveFailed(ino))
        if corrupt:
            self.corrupt(ino)

    async def _copy_and_commit(self, ino: int, record: Replica, to: Tier, *, shares: bool) -> bool:
        """Raises OSError of the tiers, ReplicaLost where the replica is not what it was."""
        source = self.tiers[record.tier]
        written: Written | None = None
        try:
            if shares:
                data = await self._in_thread(_read, source, record)
                (result,) = await self._segments.write_each(to, [data])
                if isinstance(result, OSError):
                    raise result
                written = result
                allocated = written.allocated_bytes
            else:
                allocated = await self._in_thread(_copy, source, to, record)
            if not await self._closed(ino):
                raise OSError(errno.EBUSY, "it stays open")
            # No checkpoint between the index commit and placement.
            replica = record._replace(
                tier=to.id,
                allocated_bytes=allocated,
                durable=False,
                created_ns=time.time_ns(),
                segment=0 if written is None else written.segment,
                offset=0 if written is None else written.offset,
            )
            self.index.replicas.put_replica(ino, replica)
        except BaseException:
            with trio.CancelScope(shield=True):
                if written is not None:
                    await self._segments.discard(to, [written])
                elif not shares:
                    await self._in_thread(to.files.discard, record.name)
                    self._removals.gone(to.id, record.name)
            raise
        if written is not None:
            self._segments.recorded(replica)
        self._durability.changed(ino)
        self._durability.stored(ino, replica)
        self._metrics.replicas_moved += 1
        self._handle(Moved(ino, allocated))
        node = self.index.tree.node(ino)
        if node is None:
            self.readers.invalidate(ino)
        else:
            self.readers.stored([(node, replica)])
        self._removals.start(ino, record)
        if written is None:
            self._holder.stored(ino)
        return True

    async def _closed(self, ino: int) -> bool:
        """Wait until nobody has the replica open, within limits."""
        with trio.move_on_after(CLOSED_SECONDS):
            while True:
                self._holder.reclaim(ino)  # each time: who closed it may have lent it anew
                if (replica := self._open.get(ino)) is None:
                    return True
                closed = trio.Event()
                replica.then.append(closed.set)
                await closed.wait()
        return False

    def corrupt(self, ino: int) -> None:
        """The replica's bytes are not those that were copied: nobody gets any more of them."""
        self._metrics.replicas_corrupt += 1
        self._holder.reclaim(ino)
        replica = self._open.get(ino)
        if replica is not None:
            replica.bad = True
        self.readers.invalidate(ino)
        self.drop(ino, "its replica was corrupt")
        self._forget_pages(ino)


def _read(source: Tier, record: Replica) -> bytes:
    """All of a replica that shares its file. For a thread. Raises as ``_copy``."""
    fd = source.open_complete(record)
    try:
        data = read_full(fd, record.offset, record.size)
    except OSError as error:
        raise ReplicaLost(source.path, str(error)) from error
    finally:
        os.close(fd)
    if checksum(data) != record.checksum:
        raise ReplicaLost(source.path, "A replica's checksum is wrong")
    return data


def _copy(source: Tier, to: Tier, record: Replica) -> int:
    """Copy a replica under its name; its allocated bytes there. For a thread. Leaves what it wrote
    behind where it fails. Raises ReplicaLost where the bytes are not those of its checksum."""
    fd = source.open_complete(record)
    try:
        to.files.discard(record.name)
        part = to.files.create_part(record.name, record.size)
        try:
            digests = bytearray()
            for at in range(0, record.size, MOVE_BYTES):
                try:
                    data = read_full(fd, record.offset + at, min(MOVE_BYTES, record.size - at))
                except OSError as error:
                    raise ReplicaLost(source.path, str(error)) from error
                digests += to.files.write(part, at, data)
            if combine(digests) != record.checksum:
                raise ReplicaLost(source.path, "A replica's checksum is wrong")
            return to.files.finish_part(part, record.name, record.checksum)
        finally:
            os.close(part)
    finally:
        os.close(fd)
