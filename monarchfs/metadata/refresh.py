"""Asking the source again now, whatever the mount's promise is.

Below a path, every directory whose listing is known is listed again, and every name whose file is
known, or that may be a directory's, is asked for. What is known is served meanwhile, and corrected
name by name.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import trio

from monarchfs.metadata.kernel import Kernel
from monarchfs.metadata.tree import Tree
from monarchfs.types import (
    ROOT_INO,
    FileType,
    IndexWriteError,
    Lane,
    Node,
    OperationError,
)

T = TypeVar("T")

_MAY_BE_MOVED = (FileType.DIRECTORY, FileType.UNKNOWN)

WORKERS = 4
"""Directories that are refreshed side by side."""

BATCH = 64
"""Names asked for with one call."""

LISTED_BATCH = 200
"""Names of a listing compared at a time: two milliseconds on the event loop."""

SILENCE_SECONDS = 30.0
"""A source that takes longer for one call is not waited for."""


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


class _Work(NamedTuple):
    """A directory to be listed (``after`` is -1), or its names from a cookie on."""

    ino: int
    after: int


class _Run:
    """One refresh. ``work`` is taken from its end, so that it holds no more than one batch of
    directories for each level of the tree. ``waiters`` wait for work, or for the end."""

    def __init__(self) -> None:
        self.result = RefreshResult()
        self.work: list[_Work] = []
        self.active = 0
        self.silent: OperationError | None = None
        self.waiters = trio.lowlevel.ParkingLot()


class _Differences:
    """Counts what a listing has otherwise (``Differences``). ``scope`` is the time limit,
    put off as long as the source goes on answering."""

    def __init__(self, tree: Tree, kernel: Kernel, ino: int, result: RefreshResult) -> None:
        self.scope = trio.CancelScope()
        self._kernel = kernel
        self._ino = ino
        self._result = result
        self._was_known = tree.index.listings.listing(ino) is not None

    def name(self, name: bytes, *, gone: bool) -> None:
        self._kernel.invalidate_entry(self._ino, name)
        if gone:
            self._result.gone += 1
        else:
            self._result.appeared += self._was_known

    async def pause(self) -> None:
        self.scope.deadline = math.inf
        await self._kernel.room()
        self.scope.deadline = trio.current_time() + SILENCE_SECONDS


class Refresh:
    """Constant: its parts."""

    def __init__(self, tree: Tree, kernel: Kernel) -> None:
        self._tree = tree
        self._kernel = kernel

    async def run(
        self,
        path: Sequence[bytes] = (),
        progress: Callable[[RefreshResult], None] | None = None,
    ) -> RefreshResult:
        """Refresh what ``path`` (names from the mount's root on; none: all) is and holds.

        ``progress`` is called after each call of the source, with what is to be returned. Raises
        OperationError, with the path, where the source does not answer or does not have it; what
        was recorded until then stays.
        """
        run = _Run()
        self._tree.shared.refreshed()
        for number, (parent, name) in enumerate(self._tree.known.forget_absent()):
            self._kernel.invalidate_entry(parent, name)
            if number % LISTED_BATCH == 0:
                await self._kernel.room()
        node = await self._walk(run, path)
        if node is not None and node.stat.is_directory:
            run.work.append(_Work(node.ino, -1))
            async with trio.open_nursery() as nursery:
                for _ in range(WORKERS):
                    nursery.start_soon(self._take, run, progress)
            if run.silent is not None:
                raise run.silent
        if progress is not None:
            progress(run.result)
        return run.result

    # -- the path itself

    async def _walk(self, run: _Run, path: Sequence[bytes]) -> Node | None:
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
                (answer,) = await self._names(run, node.ino, [name])
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

    async def _take(self, run: _Run, progress: Callable[[RefreshResult], None] | None) -> None:
        while run.silent is None and (run.work or run.active):
            if not run.work:
                await run.waiters.park()
                continue
            work = run.work.pop()
            run.active += 1
            try:
                await self._do(run, work)
                await self._kernel.room()
            except OperationError as exc:
                run.silent = run.silent or exc
            except (OSError, IndexWriteError) as exc:
                run.result.failed += 1
                run.result.error = run.result.error or f"{self._path(work.ino)}: {_reason(exc)}"
            finally:
                run.active -= 1
                run.waiters.unpark_all()
            if progress is not None:
                progress(run.result)

    async def _do(self, run: _Run, work: _Work) -> None:
        if work.after < 0:
            if self._tree.index.listings.listing(work.ino) or self._tree.recorder.negative.possible(
                work.ino
            ):
                await self._list(run, work.ino)
            run.work.append(_Work(work.ino, 0))
            return
        rows = self._tree.index.listings.entries(work.ino, work.after, BATCH)
        # A directory that was only listed may be one that is known, and was moved.
        names = [
            dirent.name for dirent, node in rows if node is not None or dirent.type in _MAY_BE_MOVED
        ]
        answers = await self._names(run, work.ino, names) if names else []
        if len(rows) == BATCH:
            run.work.append(_Work(work.ino, rows[-1][0].cookie))
        for answer in answers:
            if isinstance(answer, Node) and answer.stat.is_directory and answer.ino != ROOT_INO:
                run.work.append(_Work(answer.ino, -1))

    async def _list(self, run: _Run, ino: int) -> None:
        differences = _Differences(self._tree, self._kernel, ino, run.result)
        run.result.checked += 1
        await self._ask(
            lambda: self._tree.directories.list_again(
                ino, Lane.BACKGROUND, LISTED_BATCH, differences
            ),
            self._path(ino),
            differences.scope,
        )

    async def _names(
        self, run: _Run, parent: int, names: list[bytes]
    ) -> list[Node | OSError | None]:
        """Ask for these, and have the kernel forget what is not so any more."""
        index = self._tree.index
        before = [index.nodes.dirent(parent, name) for name in names]
        nodes = [None if dirent is None else index.nodes.node(dirent.ino) for dirent in before]
        answers = await self._ask(
            lambda: self._tree.names.ask_each(parent, names, Lane.BACKGROUND), self._path(parent)
        )
        result = run.result
        for name, dirent, known, answer in zip(names, before, nodes, answers, strict=True):
            result.checked += 1
            if isinstance(answer, OSError):
                result.failed += 1
                result.error = result.error or f"{os.fsdecode(name)!r}: {_reason(answer)}"
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
        scope = scope or trio.CancelScope()
        scope.deadline = trio.current_time() + SILENCE_SECONDS
        with scope:
            return await ask()
        raise OperationError(f"the source does not answer: {path} ({SILENCE_SECONDS:g} s)")

    def _path(self, ino: int) -> str:
        directory = self._tree.index.nodes.dirref(ino)
        return "a directory" if directory is None else repr("/" + os.fsdecode(directory.path))


def _alike(before: Node, now: Node) -> bool:
    return before.stat == now.stat._replace(atime_ns=before.stat.atime_ns)


def _reason(exc: Exception) -> str:
    return (exc.strerror or str(exc)) if isinstance(exc, OSError) else str(exc)
