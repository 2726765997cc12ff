"""Asking the source again now, whatever the mount's promise is.

Below a path, every directory whose listing is known is listed again, and every name whose file is
known, or that may be a directory's, is asked for. What is known is served meanwhile, and corrected
name by name.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import trio

from monarchfs.metadata.cached_listings import Kernel
from monarchfs.metadata.directories import REFRESH_SECONDS, Differences
from monarchfs.metadata.tree import Tree
from monarchfs.types import ROOT_INO, FileType, IndexWriteError, Lane, Node, OperationError

T = TypeVar("T")

_MAY_BE_MOVED = (FileType.DIRECTORY, FileType.UNKNOWN)

WORKERS = 4
"""Directories that are refreshed side by side."""

BATCH = 64
"""Names asked for with one call."""

LISTED_BATCH = 200
"""Names of a listing compared at a time: two milliseconds on the event loop."""


@dataclass(slots=True)
class RefreshResult:
    """Counts, so far. ``checked``: names that were asked for, and listings; ``changed``: names that
    stand for another version or file, and directories with other attributes; ``appeared`` and
    ``gone``: names; ``failed``: what the source would not say, and ``error`` the first reason."""

    checked: int = 0
    changed: int = 0
    appeared: int = 0
    gone: int = 0
    failed: int = 0
    error: str = ""


class Refresh:
    """One refresh. Constant: its parts; ``progress`` is called after each call of the source, with
    ``result``.

    Changing: ``result``; ``_work``, directories to be listed (with -1), or their names from a
    cookie on, taken from its end, so that it holds no more than one batch of directories for each
    level of the tree; ``_active``, how many are being done; ``_silent``, why it ends early;
    ``_waiters`` wait for work, or for the end."""

    def __init__(
        self,
        tree: Tree,
        kernel: Kernel,
        progress: Callable[[RefreshResult], None] = lambda result: None,
    ) -> None:
        self.result = RefreshResult()
        self._tree = tree
        self._kernel = kernel
        self._progress = progress
        self._work: list[tuple[int, int]] = []
        self._active = 0
        self._silent: OperationError | None = None
        self._waiters = trio.lowlevel.ParkingLot()

    async def run(self, path: Sequence[bytes] = ()) -> RefreshResult:
        """Refresh what ``path`` (names from the mount's root on; none: all) is and holds. Once.

        Raises OperationError, with the path, where the source does not answer or does not have it;
        what was recorded until then stays.
        """
        self._tree.shared.refreshed()
        for number, (parent, name) in enumerate(self._tree.known.forget_absent()):
            self._kernel.invalidate_entry(parent, name)
            if number % LISTED_BATCH == 0:
                await self._kernel.room()
        node = await self._walk(path)
        if node is not None and node.stat.is_directory:
            self._work.append((node.ino, -1))
            async with trio.open_nursery() as nursery:
                for _ in range(WORKERS):
                    nursery.start_soon(self._take)
            if self._silent is not None:
                raise self._silent
        self._progress(self.result)
        return self.result

    # -- the path itself

    async def _walk(self, path: Sequence[bytes]) -> Node | None:
        """Ask for each name of the path; None where something that was known is gone."""
        shown = os.fsdecode(b"/".join(path)) or "/"
        try:
            await self._ask(self._tree.attributes.refresh_root, "/")
            self._kernel.invalidate_inode(ROOT_INO, attributes_only=True)
            node = self._tree.index.nodes.node(ROOT_INO)
            for name in path:
                assert node is not None
                if not node.stat.is_directory:
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                known = self._tree.index.nodes.dirent(node.ino, name) is not None
                (answer,) = await self._names(node.ino, [name])
                if isinstance(answer, OSError):
                    raise answer
                if answer is None and not known:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                node = answer
                if node is None:
                    return None
        except (OSError, IndexWriteError) as exc:
            raise OperationError(f"cannot refresh {shown!r}: {_reason(exc)}") from exc
        return node

    # -- below it

    async def _take(self) -> None:
        while self._silent is None and (self._work or self._active):
            if not self._work:
                await self._waiters.park()
                continue
            ino, after = self._work.pop()
            self._active += 1
            try:
                if after < 0:
                    await self._list(ino)
                else:
                    await self._ask_for_names(ino, after)
                await self._kernel.room()
            except OperationError as exc:
                self._silent = self._silent or exc
            except (OSError, IndexWriteError) as exc:
                self._failed(f"{self._path(ino)}: {_reason(exc)}")
            finally:
                self._active -= 1
                self._waiters.unpark_all()
            self._progress(self.result)

    async def _list(self, ino: int) -> None:
        was_known = self._tree.index.listings.listing(ino) is not None
        if was_known or self._tree.recorder.negative.possible(ino):
            differences = Differences(ino, self._kernel)
            self.result.checked += 1
            try:
                await self._ask(
                    lambda: self._tree.directories.list_again(
                        ino, Lane.BACKGROUND, LISTED_BATCH, differences
                    ),
                    self._path(ino),
                    differences.scope,
                )
            finally:
                self.result.gone += differences.gone
                self.result.appeared += differences.appeared if was_known else 0
        self._work.append((ino, 0))

    async def _ask_for_names(self, ino: int, after: int) -> None:
        rows = self._tree.index.listings.entries(ino, after, BATCH)
        # A directory that was only listed may be one that is known, and was moved.
        names = [
            dirent.name for dirent, node in rows if node is not None or dirent.type in _MAY_BE_MOVED
        ]
        answers = await self._names(ino, names) if names else []
        if len(rows) == BATCH:
            self._work.append((ino, rows[-1][0].cookie))
        for answer in answers:
            if isinstance(answer, Node) and answer.stat.is_directory and answer.ino != ROOT_INO:
                self._work.append((answer.ino, -1))

    def _failed(self, reason: str) -> None:
        self.result.failed += 1
        self.result.error = self.result.error or reason

    async def _names(self, parent: int, names: list[bytes]) -> list[Node | OSError | None]:
        """Ask for these, and have the kernel forget what is not so any more."""
        index = self._tree.index
        before = [index.nodes.dirent(parent, name) for name in names]
        nodes = [None if dirent is None else index.nodes.node(dirent.ino) for dirent in before]
        answers = await self._ask(
            lambda: self._tree.batches.ask_each(parent, names, Lane.BACKGROUND), self._path(parent)
        )
        result = self.result
        for name, dirent, known, answer in zip(names, before, nodes, answers, strict=True):
            result.checked += 1
            if isinstance(answer, OSError):
                self._failed(f"{os.fsdecode(name)!r}: {_reason(answer)}")
            elif answer is None:
                if dirent is not None:
                    result.gone += 1
                self._kernel.invalidate_entry(parent, name)
            elif dirent is None or dirent.ino != answer.ino:
                if dirent is None:
                    result.appeared += 1
                elif dirent.ino:
                    result.changed += 1
                self._kernel.invalidate_entry(parent, name)
            elif known is not None and not _alike(known, answer):
                result.changed += 1
                self._kernel.invalidate_inode(answer.ino, attributes_only=True)
        return answers

    async def _ask(
        self, ask: Callable[[], Awaitable[T]], path: str, scope: trio.CancelScope | None = None
    ) -> T:
        with scope or trio.CancelScope(deadline=trio.current_time() + REFRESH_SECONDS):
            return await ask()
        raise OperationError(f"the source does not answer: {path} ({REFRESH_SECONDS:g} s)")

    def _path(self, ino: int) -> str:
        directory = self._tree.index.nodes.dirref(ino)
        return "a directory" if directory is None else repr("/" + os.fsdecode(directory.path))


def _alike(before: Node, now: Node) -> bool:
    return before.stat == now.stat._replace(atime_ns=before.stat.atime_ns)


def _reason(exc: Exception) -> str:
    return (exc.strerror or str(exc)) if isinstance(exc, OSError) else str(exc)
