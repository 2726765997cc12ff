"""The kernel is told what to forget by threads, each thing once, and nobody's request waits."""

from __future__ import annotations

import errno
import threading

import trio
import trio.testing

from monarchfs.fuse import notify
from monarchfs.fuse.notify import Notifier
from tests.support.mirror import until


class Told:
    """What the kernel was told; it takes its time while ``blocks`` is not set."""

    def __init__(self) -> None:
        self.inodes: list[tuple[int, bool]] = []
        self.entries: list[tuple[int, bytes]] = []
        self.blocks = threading.Event()

    def inode(self, ino: int, attributes_only: bool) -> None:
        assert self.blocks.wait(30)
        if ino == 13:
            raise OSError(errno.EIO, "refused")
        self.inodes.append((ino, attributes_only))

    def entry(self, parent: int, name: bytes) -> None:
        assert self.blocks.wait(30)
        self.entries.append((parent, name))


async def test_each_thing_once_and_pages_before_attributes() -> None:
    told = Told()
    told.blocks.set()
    notifier = Notifier(told.inode, told.entry)
    for _ in range(3):
        notifier.invalidate_inode(2, attributes_only=True)
        notifier.invalidate_inode(3)
        notifier.invalidate_inode(3, attributes_only=True)
        notifier.invalidate_entry(1, b"name")
    notifier.invalidate_inode(13)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(notifier.run)
        await until(
            lambda: len(told.inodes) == 2 and bool(told.entries) and bool(notifier.failed),
            "the kernel to be told",
        )
        nursery.cancel_scope.cancel()
    assert sorted(told.inodes) == [(2, True), (3, False)]
    assert told.entries == [(1, b"name")]
    assert (notifier.failed, notifier.waiting) == (1, 0)


async def test_a_kernel_that_has_to_wait_holds_up_who_can_and_nobody_else() -> None:
    told = Told()
    notifier = Notifier(told.inode, told.entry)
    passed = trio.Event()

    async def refresh() -> None:
        await notifier.room()
        passed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(notifier.run)
        count = notify.MOST_WAITING + notify.THREADS + 5
        for ino in range(100, 100 + count):
            notifier.invalidate_inode(ino)  # as a request does: at once
        await trio.testing.wait_all_tasks_blocked()
        assert notifier.waiting == notify.MOST_WAITING + 5
        nursery.start_soon(refresh)
        nursery.start_soon(refresh)
        await trio.testing.wait_all_tasks_blocked()
        assert not passed.is_set()
        told.blocks.set()
        with trio.fail_after(10):
            await passed.wait()
            await until(lambda: len(told.inodes) == count, "the kernel to be told")
        nursery.cancel_scope.cancel()


async def test_the_end_does_not_wait_for_the_kernel() -> None:
    told = Told()
    notifier = Notifier(told.inode, told.entry)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notifier.run)
            notifier.invalidate_inode(5)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    told.blocks.set()
