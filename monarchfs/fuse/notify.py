"""Telling the kernel what to forget, in threads.

The kernel takes locks for that which a request of ours may hold until it is answered: to drop a
page it waits until that has been read (invalidate_inode_pages2), to drop a name until nobody looks
up or lists in its directory (fuse_reverse_inval_entry). So it is never done on the event loop, and
never waited for by a request.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

import trio

from monarchfs.fuse import session
from monarchfs.system.threads import run_sync

log = logging.getLogger(__name__)

THREADS = 8
"""More than one because each may have to wait for a source that hangs."""

MOST_WAITING = 1000
"""From how many on those wait who are not requests."""


FORGET_SECONDS = 1.0
"""So long a request waits for it, which takes microseconds."""


class Notifier:
    """The ``Kernel`` of ``metadata.cached_listings``. On the event loop.

    Changing: what is still to be done, each thing once; ``failed``, how often the kernel refused.
    """

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(THREADS)
        self._waiting: OrderedDict[int | tuple[int, bytes], bool] = OrderedDict()
        self._news = trio.Event()
        self._taken = trio.Event()
        self.failed = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def invalidate_inode(self, ino: int, *, attributes_only: bool = False) -> None:
        self._put(ino, attributes_only and self._waiting.get(ino, True))

    async def forget_attributes(self, ino: int) -> None:
        """After FORGET_SECONDS it is left to a thread. (For attributes alone the kernel takes no
        lock that a request may hold: fuse_reverse_inval_inode.)"""
        with trio.move_on_after(FORGET_SECONDS):
            try:
                await run_sync(session.invalidate_inode, ino, True, abandon_on_cancel=True)
            except OSError as exc:
                self._refused(ino, exc)
            return
        self.invalidate_inode(ino, attributes_only=True)

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        self._put((parent, name), False)

    async def room(self) -> None:
        """Wait until not too much is waiting; a checkpoint in any case."""
        await trio.lowlevel.checkpoint()
        while len(self._waiting) >= MOST_WAITING:
            if self._taken.is_set():
                self._taken = trio.Event()
            await self._taken.wait()

    def _put(self, what: int | tuple[int, bytes], attributes_only: bool) -> None:
        self._waiting[what] = attributes_only
        self._news.set()

    async def run(self) -> None:
        """Tell the kernel, for ever. To be started once the session has the mounted descriptor."""
        async with trio.open_nursery() as nursery:
            for _ in range(THREADS):
                nursery.start_soon(self._tell)

    async def _tell(self) -> None:
        while True:
            while not self._waiting:
                if self._news.is_set():
                    self._news = trio.Event()
                await self._news.wait()
            what, attributes_only = self._waiting.popitem(last=False)
            self._taken.set()
            try:
                # A thread that hangs must not keep the mount from ending.
                await run_sync(
                    _tell_kernel,
                    what,
                    attributes_only,
                    abandon_on_cancel=True,
                    limiter=self._limiter,
                )
            except OSError as exc:
                self._refused(what, exc)

    def _refused(self, what: int | tuple[int, bytes], exc: OSError) -> None:
        self.failed += 1
        log.warning("the kernel does not forget %r: %s", what, exc)


def _tell_kernel(what: int | tuple[int, bytes], attributes_only: bool) -> None:
    if isinstance(what, int):
        session.invalidate_inode(what, attributes_only)
    else:
        session.invalidate_entry(*what)
