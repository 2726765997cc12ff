"""The FUSE session: taking over a mounted descriptor, and the loop over its requests, all of which
``Answerer`` answers.

The supervisor mounts, reads FUSE_INIT from the kernel and answers it with libfuse's reply, amended
(``monarchfs.fuse.protocol``). To get that reply, libfuse is first given one end of a socket pair
as its device; when INIT went through, the real descriptor takes that place.
"""

from __future__ import annotations

import errno
import os
import sys

import trio

from monarchfs.metrics import DURATION_BOUNDS_NS

if "pyfuse3" in sys.modules:
    raise ImportError("monarchfs.fuse.session must be imported before pyfuse3")
# libfuse finds the C part's functions in the global scope, so pyfuse3 comes after it.
_flags = sys.getdlopenflags()
sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)
try:
    from monarchfs.core import _session
finally:
    sys.setdlopenflags(_flags)
hooks = _session

import pyfuse3  # noqa: E402

RELAY_THREADS = 10
"""All but two may wait for a local disk; further reads are put off, so that a slow tier holds up
nothing else. Idle ones cost nothing."""

on_interrupt = _session.set_interrupt_handler
"""Have FUSE_INTERRUPT reported. The handler answers False for a request that it does not know."""

on_request = _session.set_request_handlers
"""Have ``Answerer.answer`` and ``Answerer.answer_known`` answer requests."""


def invalidate_inode(ino: int, attributes_only: bool) -> None:
    """Have the kernel forget the attributes of an inode and, unless ``attributes_only``, its pages.

    Blocks until pages that are being read have been answered, so call it in a thread (pyfuse3's
    invalidate_inode lets other threads run). An inode that the kernel does not know passes; raises
    OSError for the rest, ENOTCONN after the end of the mount included.
    """
    try:
        pyfuse3.invalidate_inode(pyfuse3.InodeT(ino), attributes_only)
    except OSError as exc:
        if exc.errno != errno.ENOENT:
            raise


def invalidate_entry(parent: int, name: bytes) -> None:
    """Have the kernel forget what a name stands for, or that there is none.

    Blocks until nobody looks up, or lists, in that directory; otherwise as ``invalidate_inode``.
    """
    try:
        pyfuse3.invalidate_entry(pyfuse3.InodeT(parent), pyfuse3.FileNameT(name))
    except OSError as exc:
        if exc.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise


class Session:
    """One libfuse session in this process (pyfuse3 knows only one).

    Constant: ``init_fd``, libfuse's idea of its device from beginning to end; ``fuse_fd``, the
    mounted descriptor, which replaces what is behind ``init_fd``.
    """

    def __init__(
        self,
        init_fd: int,
        fuse_fd: int,
        *,
        relays: bool = True,
        free_opens: bool = False,
        waiting_reads: int = 0,
        journal: int | None = None,
    ) -> None:
        """Without ``relays`` all requests are read on the event loop; ``free_opens``: where they
        are not, have the kernel open files on its own; ``waiting_reads``: and so many reads at most
        wait for the source outside of it. ``journal``: the descriptor of one (``fuse.requests``);
        it takes ``relays``. Raises OSError."""
        self._free_opens = free_opens
        self._waiting_reads = waiting_reads
        self._init_fd = init_fd
        self._fuse_fd = fuse_fd
        self._relays = relays
        self._handed_over = False
        if not relays:
            hooks.read_directly()
        if journal is not None:
            hooks.journal(journal)
        pyfuse3.init(pyfuse3.Operations(), f"/dev/fd/{init_fd}", set())

    def hand_over(self) -> None:
        """FUSE_INIT is answered: take the real descriptor. No checkpoint."""
        if not self._relays or not hooks.start_relay(
            self._init_fd,
            self._fuse_fd,
            RELAY_THREADS,
            self._waiting_reads,
            self._free_opens,
            DURATION_BOUNDS_NS,
        ):
            # An earlier worker may have had threads that waited in read(2).
            os.set_blocking(self._fuse_fd, False)
            # First wake and unregister, while the old descriptor is still what epoll knows.
            trio.lowlevel.notify_closing(self._init_fd)
        # libfuse answers here; the threads, where there are any, are the only ones that read.
        os.dup2(self._fuse_fd, self._init_fd, inheritable=False)
        self._handed_over = True

    async def serve(self) -> None:
        """Answer requests until the file system is unmounted."""
        # Without threads, the hand-over ends the task that waits for the old descriptor just
        # then, if there is one, and the loop with it if that was the only one.
        while not self._handed_over:
            await pyfuse3.main()
            await trio.lowlevel.checkpoint()
        await pyfuse3.main()  # at once where it was unmounted
