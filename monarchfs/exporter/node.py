"""All mounts of a node on one page: the part of the exporter without privileges.

Each scrape asks all mounts anew, at once. A mount that has not answered by the deadline is reported
as down, without values: no value is reported twice. Scrapes that come meanwhile share the page
under way, so a mount that hangs has one question to answer at a time.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import trio

from monarchfs.config.places import name_of
from monarchfs.control import messages, peers, registration
from monarchfs.exporter import broker
from monarchfs.exporter.discovery import DiscoveredMount
from monarchfs.exporter.http import exposition, serve
from monarchfs.exporter.wire import decode
from monarchfs.fuse.mountinfo import MONARCHFS, Mount, read_mountinfo
from monarchfs.metrics import NS, names
from monarchfs.metrics.names import FAMILIES, Family, Sample, Values
from monarchfs.supervisor.recover import is_about
from monarchfs.system.escaping import printable

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.5
ASK_SECONDS = 2.0
"""Together less than a connection gets (``http.CONNECTION_SECONDS``)."""

NAME_SECONDS = 1.0
NAME_THREADS = 8
MOST_ANSWER_BYTES = 256 << 10
MOST_PATH_CHARACTERS = 1024

_DROPPED = ("source", "mountpoint")

Labels = tuple[str, str, str]
"""User, source and mount point."""


@dataclass(slots=True)
class Seen:
    """A mount in one scrape. ``key`` identifies it while it exists; ``values`` is None if it did
    not answer."""

    key: str
    uid: int
    source: str
    mountpoint: str
    started_ns: int | None = None
    jobs: tuple[str, ...] = ()
    owner_uid: int = 0
    entry: registration.Registration | None = None
    values: Values | None = None

    def means(self, mount: Mount) -> bool:
        """Whether its registration is about a mount of the table."""
        return self.entry is not None and is_about(self.entry, self.owner_uid, mount)


def label_mounts(
    given: Mapping[str, Labels], mounts: Iterable[tuple[str, Labels]]
) -> dict[str, Labels]:
    """Labels by key, for all mounts there are: unique, and kept while the mount exists (``given``
    are those of before). A duplicate gets a number, as may be if jobs have mount namespaces of
    their own."""
    there = dict(mounts)
    kept = {key: labels for key, labels in given.items() if key in there}
    taken = set(kept.values())
    for key, (user, source, mount) in there.items():
        if key not in kept:
            labels, number = (user, source, mount), 1
            while labels in taken:
                number += 1
                labels = (user, source, f"{mount} ({number})")
            kept[key] = labels
            taken.add(labels)
    return kept


async def learn_names(
    known: dict[int, str], uids: Iterable[int], threads: trio.CapacityLimiter
) -> None:
    """Adds the names of users. If the name service hangs, a user keeps the number for good, because
    a label that changes is another series. Takes NAME_SECONDS at most; ``threads`` may hang with
    it for longer, so nothing else may need them."""

    async def look_up(uid: int) -> None:
        name = await trio.to_thread.run_sync(name_of, uid, abandon_on_cancel=True, limiter=threads)
        known.setdefault(uid, name)

    new = set(uids) - known.keys()
    with trio.move_on_after(NAME_SECONDS):
        async with trio.open_nursery() as nursery:
            for uid in new:
                nursery.start_soon(look_up, uid)
    for uid in new:
        known.setdefault(uid, str(uid))


class _PendingPage:
    """A page on its way, for all who wait for it; None where it could not be made."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.page: bytes | None = None


class NodeExporter:
    """Constant: the socket to the broker; ``own_uid`` unless root looks. Changing: the page under
    way, the number of the look and its results, the names that were given."""

    def __init__(self, channel: socket.socket, nursery: trio.Nursery, own_uid: int | None) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._nursery = nursery
        self._own_uid = own_uid
        self._number = 0
        self._arrived, _ = trio.open_memory_channel[DiscoveredMount | int](math.inf)
        self._pending: _PendingPage | None = None
        self._labelled: dict[str, Labels] = {}
        self._users: dict[int, str] = {}
        self._naming = trio.CapacityLimiter(NAME_THREADS)

    async def page(self) -> bytes:
        """The text of all mounts, within LOOK_SECONDS and ASK_SECONDS and a little. Raises OSError
        if it cannot be made."""
        pending = self._pending
        if pending is None:
            pending = self._pending = _PendingPage()
            self._nursery.start_soon(self._make, pending)
        await pending.done.wait()
        if pending.page is None:
            raise OSError("the page could not be made")
        return pending.page

    async def _make(self, pending: _PendingPage) -> None:
        try:
            found, left_off = await self._discover()
            mounts = await self._ask(found)
            await learn_names(self._users, (mount.uid for mount in mounts), self._naming)
            self._labelled = label_mounts(
                self._labelled, ((one.key, self._labels(one)) for one in mounts)
            )
            values = page_values([(self._labelled[mount.key], mount) for mount in mounts], left_off)
            pending.page = await trio.to_thread.run_sync(exposition, values)
        except trio.TooSlowError:
            log.warning("metrics: the part that looks for mounts does not answer")
        except Exception:  # a bug, and no reason to end
            log.exception("metrics")
        finally:
            self._pending = None
            pending.done.set()

    def _labels(self, mount: Seen) -> Labels:
        source, mountpoint = (
            printable(path[:MOST_PATH_CHARACTERS]) for path in (mount.source, mount.mountpoint)
        )
        return printable(self._users[mount.uid]), source, mountpoint

    async def receive(self) -> None:
        """Take what the broker sends until it is gone; what comes too late is closed."""
        while True:
            await trio.lowlevel.wait_readable(self._channel)
            received = broker.receive(self._channel)
            if received is None:
                return
            number, what = received
            if number == self._number:
                self._arrived.send_nowait(what)
            elif isinstance(what, DiscoveredMount):
                what.close()

    async def _discover(self) -> tuple[list[DiscoveredMount], int]:
        """All registered mounts, and how many were left off. Raises trio.TooSlowError."""
        self._number += 1
        self._arrived, arrivals = trio.open_memory_channel[DiscoveredMount | int](math.inf)
        found: list[DiscoveredMount] = []
        try:
            broker.ask(self._channel, self._number)
            with trio.fail_after(LOOK_SECONDS):
                while isinstance(what := await arrivals.receive(), DiscoveredMount):
                    found.append(what)
        except (trio.TooSlowError, OSError):
            self._number += 1
            with suppress(trio.WouldBlock):
                while isinstance(late := arrivals.receive_nowait(), DiscoveredMount):
                    found.append(late)
            for mount in found:
                mount.close()
            raise trio.TooSlowError from None
        return found, what

    async def _ask(self, found: Iterable[DiscoveredMount]) -> list[Seen]:
        """All mounts there are, with what those said that answered within ASK_SECONDS."""
        table = [mount for mount in read_mountinfo() if mount.fstype == MONARCHFS]
        mounts = []
        with trio.move_on_after(ASK_SECONDS):
            async with trio.open_nursery() as nursery:
                for mount in found:
                    seen = _seen(mount)
                    is_heard = mount.connection is not None or mount.full
                    if seen is None or not (is_heard or any(map(seen.means, table))):
                        mount.close()  # the registration of a dead daemon, or none
                        continue
                    os.close(mount.registration)
                    mounts.append(seen)
                    if mount.connection is not None:
                        nursery.start_soon(_ask, seen, mount.connection, mount.owner_uid)
        # A connection may have several mounts: bind mounts.
        return mounts + [
            Seen(f"{one.mountpoint}\0{one.user_id}", one.user_id or 0, one.source, one.mountpoint)
            for one in {mount.minor: mount for mount in reversed(table)}.values()
            if not any(seen.means(one) for seen in mounts) and self._own_uid in (None, one.user_id)
        ]


def _seen(mount: DiscoveredMount) -> Seen | None:
    """The mount of a registration; None if that is none."""
    try:
        content = os.pread(mount.registration, messages.MOST_REQUEST_BYTES, 0)
        entry = registration.decode_registration(content, mount.owner_uid)
    except (OSError, ValueError):
        return None
    return Seen(
        mount.stem,
        entry.uid,
        entry.source,
        entry.mountpoint,
        started_ns=entry.started_ns if 0 <= entry.started_ns < 1 << 63 else None,
        jobs=mount.jobs,
        owner_uid=mount.owner_uid,
        entry=entry,
    )


async def _ask(seen: Seen, connection: int, owner_uid: int) -> None:
    """Sets ``values`` if there is an answer that makes sense."""
    ours = socket.socket(fileno=connection)
    ours.setblocking(False)
    async with trio.SocketStream(trio.socket.from_stdlib_socket(ours)) as stream:
        with suppress(trio.BrokenResourceError, ValueError, OSError):
            if peers.peer_uid(ours) in (0, owner_uid):
                reply = messages.decode_message(await _line(stream))
                if reply.get("ok") is True and isinstance(reply.get("result"), dict):
                    seen.values = decode(reply["result"])


async def _line(stream: trio.SocketStream) -> bytes:
    """Raises ValueError for one that does not end, or not soon enough."""
    received = bytearray()
    while not received.endswith(b"\n"):
        part = await stream.receive_some(64 << 10)
        received += part
        if not part or len(received) > MOST_ANSWER_BYTES:
            raise ValueError("it is no line")
    return bytes(received)


def page_values(mounts: Iterable[tuple[Labels, Seen]], left_off: int) -> Values:
    """The samples of all mounts, by metric."""
    values: Values = {family: [] for family in names.NODE_FAMILIES}
    values[names.LEFT_OFF].append(((), left_off))
    for labels, mount in sorted(mounts, key=lambda one: one[0]):
        values[names.MOUNT_UP].append((labels, int(mount.values is not None)))
        if mount.started_ns is not None:
            values[names.MOUNT_STARTED].append((labels, mount.started_ns / NS))
        values[names.MOUNT_JOB] += [((*labels, job), 1) for job in mount.jobs]
        for family, samples in (mount.values or {}).items():
            values.setdefault(_WITH_LABELS[family], []).extend(_labelled(family, labels, samples))
    return values


def _labelled(family: Family, mount: Labels, samples: Iterable[Sample]) -> Iterator[Sample]:
    for labels, value in samples:
        own = zip(family.labels, labels, strict=True)
        yield (*mount, *(label for name, label in own if name not in _DROPPED)), value


def _with_labels(family: Family) -> Family:
    own = (name for name in family.labels if name not in _DROPPED)
    return replace(family, labels=(*names.MOUNT_LABELS, *own))


_WITH_LABELS: Mapping[Family, Family] = {family: _with_labels(family) for family in FAMILIES}


async def _run(channel: socket.socket, listener: socket.socket | None, own_uid: int | None) -> int:
    code = 0
    async with trio.open_nursery() as nursery:
        node = NodeExporter(channel, nursery, own_uid)

        async def receive() -> None:
            await node.receive()
            # The broker is gone, and this with it, even if a thread hangs in a name service.
            os._exit(1)

        nursery.start_soon(receive)
        if listener is not None:
            await serve(listener, node.page)
        else:
            code = _print(await node.page())
        nursery.cancel_scope.cancel()
    return code


def _print(page: bytes) -> int:
    """0, or the errno with which standard output took it not; a reader who left is no error."""
    try:
        sys.stdout.buffer.write(page)
        sys.stdout.flush()
    except BrokenPipeError:
        return 0
    except OSError as error:
        return error.errno or 1
    return 0


def serve_node(
    channel: socket.socket, *, listener: socket.socket | None, own_uid: int | None
) -> int:
    """Serves the page on ``listener`` until the broker is gone, or without one writes it to
    standard output once; the exit code, an errno if that fails."""
    return trio.run(_run, channel, listener, own_uid)
