"""Extended attributes and access rights: the source's, remembered, and this file system's own.

``ls -l`` asks for two attributes of each file. Hardly any file has them, and the kernel caches no
answer. So the first such question asks listxattr(2), for all attributes of that kind at once, and
for the access ACL itself, which not every file system lists. The errno for an attribute that is
not listed (ENODATA, EOPNOTSUPP) is asked once for each name and type of file; that also finds
file systems whose getxattr(2) knows more than their listxattr(2). With ``allow_other`` the kernel
checks ACLs itself (FUSE_POSIX_ACL) and caches them; other mounts may not use that, because it
would then check modes as well, where the source decides.
"""

from __future__ import annotations

import errno
import math
import os
import stat as stat_module
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import trio

from monarchfs.fs.residency import Residency
from monarchfs.metadata.batches import BATCH_SECONDS
from monarchfs.metadata.freshness import past_racy_window
from monarchfs.metadata.statahead import Statahead
from monarchfs.metadata.tree import Tree
from monarchfs.source.source import Source
from monarchfs.system.listeners import Listeners
from monarchfs.types import (
    DirectoryChanged,
    Dirent,
    FileType,
    Lane,
    Node,
    SourceChanged,
    SourceVersion,
)

PREFIX = b"user.monarchfs."
STATE, TIER, REASON = PREFIX + b"state", PREFIX + b"tier", PREFIX + b"reason"

LIST = b""
"""The name under which the index keeps the list of names, NUL-joined."""

ACCESS_KEPT = 100_000

WRITTEN = {stat_module.S_IFREG, stat_module.S_IFDIR, stat_module.S_IFLNK}

LASTING = {errno.ENODATA, errno.EOPNOTSUPP}
"""Errors that say something about the attribute, and not about the source's state."""

ACLS = b"system.posix_acl_"

LISTED = (b"security.", ACLS)
"""Prefixes of the attributes that ``ls -l`` asks for of every file, although few files have them. A
file system that has them lists them in listxattr(2): one call for all."""

LABEL = b"security.selinux"
"""With SELinux the kernel answers for it and never asks. Without it nobody uses the attribute, but
``ls -l`` asks for it of each file, unless it hears once that the file system has no labels."""

Names = list[bytes]

T = TypeVar("T")


class _Kind(NamedTuple):
    """Files that answer alike when they are asked for an attribute that they do not have."""

    device: int
    type: int
    name: bytes


class Xattrs:
    """An inode is one version of a file, so what was asked once stays true, unless that was in the
    tick of its last change: a later one may not show in its ctime.

    The attributes of a directory and the rights on it may change under the same number: they are
    remembered with its ctime. Changing: ``_absent``, the errno of attributes that a file does not
    have; ``_unlisted``, file systems (st_dev, 0: the source's own) whose lists do not tell all;
    ``_labelled``, whether a file with a ``LABEL`` was seen.
    """

    def __init__(
        self,
        tree: Tree,
        residency: Residency,
        source: Source,
        nursery: trio.Nursery,
        *,
        kernel_checks: bool = False,
    ) -> None:
        """``kernel_checks``: the kernel checks ACLs, and takes ENODATA alone for "there is none"
        (fs/fuse/acl.c)."""
        self._tree = tree
        self._index = tree.index
        self._residency = residency
        self._source = source
        self._kernel_checks = kernel_checks
        self._access: OrderedDict[tuple[int, int, int], bool] = OrderedDict()
        self._absent: dict[_Kind, int] = {}
        self._unlisted: set[int] = set()
        self._labelled = False
        self.name_seconds = 0.0  # not known
        self._statahead = Statahead(nursery, tree.index, self)
        self.on_plain: Listeners[[list[int]]] = Listeners()
        """Hear of regular files on the source's own file system that have no attribute of
        ``LISTED``: ``absent`` answers for them, for good."""

    def known(self, ino: int, name: bytes) -> bytes | None:
        """The value where it is known. Raises OSError where it is known that there is none."""
        if name.startswith(PREFIX) and (own := self._own(ino, name)) is not None:
            return own
        node = self._index.nodes.node(ino)
        if name.startswith(LISTED) and node is not None:
            code = self._known_absent(node, name)
            if code is not None:
                raise self._error(name, code)
        value = self._index.xattrs.xattr(ino, _key(node, name))
        if isinstance(value, int):
            raise self._error(name, value)
        return value

    def _error(self, name: bytes, code: int) -> OSError:
        """For who asked, of an attribute that is not there."""
        if self._kernel_checks and name.startswith(ACLS):
            code = errno.ENODATA
        return OSError(code, os.strerror(code))

    def _known_absent(self, node: Node, name: bytes) -> int | None:
        """The errno if the attribute is one of ``LISTED``, and known not to be there."""
        names = self._known_list(node)
        if names is None:
            code = self._absent.get(_kind(node, name))
            return code if code == errno.EOPNOTSUPP else None
        return None if name in names else self._errno(_kind(node, name))

    def _errno(self, kind: _Kind) -> int | None:
        """Of an attribute that is not in the list; None where it has not been asked for yet."""
        if kind.name == LABEL and not self._labelled:
            return errno.EOPNOTSUPP
        return self._absent.get(kind)

    def absent(self, name: bytes) -> int | None:
        """What is answered where a file that ``on_plain`` was got is asked for ``name``; None where
        that is not known yet."""
        code = self._errno(_Kind(0, FileType.REGULAR, name))
        return code and self._error(name, code).errno

    def plain(self, ino: int) -> bool:
        """Whether it is one of those that ``on_plain`` gets."""
        node = self._index.nodes.node(ino)
        names = None if node is None else self._known_list(node)
        return node is not None and names is not None and self._is_plain(node, names)

    def _note_list(self, node: Node, names: Names) -> bool:
        """A list was read. Whether the file is one of those that ``on_plain`` gets."""
        self._labelled = self._labelled or LABEL in names
        return self._is_plain(node, names)

    def _is_plain(self, node: Node, names: Names) -> bool:
        return (
            node.stat.is_regular
            and node.stat.device == 0
            and not self._unlisted
            and not any(name.startswith(LISTED) for name in names)
        )

    def _known_list(self, node: Node) -> Names | None:
        """The names that the source's list has, where it is known and can be relied on."""
        if node.stat.device in self._unlisted:
            return None
        value = self._index.xattrs.xattr(node.ino, _key(node, LIST))
        if not isinstance(value, bytes):
            return None
        return value.split(b"\0") if value else []

    def _own(self, ino: int, name: bytes) -> bytes | None:
        node = self._index.nodes.node(ino)
        if node is None or not node.stat.is_regular:
            return None
        value: str | None = None
        if name == STATE:
            value = self._residency.state(ino)
        elif name == TIER:
            value = self._residency.tier(ino)
        elif name == REASON:
            value = self._residency.sentence(node)
        if value is None:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        return value.encode("utf-8", "surrogateescape")

    async def get(self, ino: int, name: bytes, *, again: bool = False) -> bytes:
        """Raises OSError with the source's errno; ESTALE for an ACL that the kernel would check for
        another version than the source has. ``again``: the kernel looked the name up after that."""
        if (known := self.known(ino, name)) is not None:
            return known
        listed = name.startswith(LISTED) and await self._listed(ino)
        if listed and (known := self.known(ino, name)) is not None:
            return known

        async def ask(version: SourceVersion | None) -> bytes | int:
            source, place = self._source, self._tree.known.place(ino)
            try:
                return await source.call(Lane.DEMAND, source.posix.getxattr, *place, name, version)
            except OSError as exc:
                if exc.errno not in LASTING:
                    raise
                return exc.errno

        strict = self._kernel_checks and name.startswith(ACLS) and not again
        node = self._index.nodes.node(ino)
        answer, lasts = await self._of_version(ino, ask, strict=strict)
        if node is not None:
            self._answered(node, name, answer, lasts=lasts)
        if isinstance(answer, int):
            raise self._error(name, answer)
        return answer

    def _answered(self, node: Node, name: bytes, answer: bytes | int, *, lasts: bool) -> None:
        """The source was asked for an attribute."""
        if name.startswith(LISTED):
            names = self._known_list(node)
            if isinstance(answer, bytes):
                if lasts and names is not None and name not in names:
                    self._unlisted.add(node.stat.device)
            elif answer == errno.EOPNOTSUPP or (names is not None and name not in names):
                self._absent[_kind(node, name)] = answer
                return
        if lasts:
            self._index.xattrs.put_xattr(node.ino, _key(node, name), answer)

    async def list(self, ino: int) -> Names:
        """The source's names. Ours are not among them: ``cp -a`` and ``rsync -X`` copy what is
        listed."""
        node = self._index.nodes.node(ino)
        key = _key(node, LIST)
        value = self._index.xattrs.xattr(ino, key)
        if value is None:

            async def ask(version: SourceVersion | None) -> Names:
                place = self._tree.known.place(ino)
                return await self._source.listxattr(*place, version, Lane.DEMAND)

            names, lasts = await self._of_version(ino, ask)
            value = b"\0".join(names)
            if node is not None and lasts:
                self._index.xattrs.put_xattr(ino, key, value)
                if self._note_list(node, names):
                    self.on_plain([ino])
        assert isinstance(value, bytes)
        return value.split(b"\0") if value else []

    async def _of_version(
        self, ino: int, ask: Callable[[SourceVersion | None], Awaitable[T]], *, strict: bool = False
    ) -> tuple[T, bool]:
        """What ``ask`` answers for the version that ``ino`` stands for, and whether that can be
        remembered. Of another version, what the source says now; ``strict``: OSError ESTALE."""
        asked_ns, node = time.time_ns(), self._index.nodes.node(ino)
        file = None if node is None or node.stat.is_directory else node
        with self._tree.recorder.estale_if_replaced(ino if file is None else file.parent):
            try:
                answer = await ask(None if file is None else file.stat.version)
            except DirectoryChanged:
                raise
            except SourceChanged as exc:
                if strict:
                    self._tree.recorder.outdate(ino)
                    raise OSError(errno.ESTALE, "the source has another version") from exc
                return await ask(None), False
        return answer, node is not None and past_racy_window(node.stat.ctime_ns, asked_ns)

    # -- the lists of many files

    def lacks(self, dirent: Dirent, node: Node | None) -> bool:
        """As ``Questions``. Of what was never looked up nothing can be recorded."""
        if node is None or node.outdated or node.stat.device in self._unlisted:
            return False
        return self._index.xattrs.xattr(node.ino, _key(node, LIST)) is None

    async def _listed(self, ino: int) -> bool:
        """Have the list of names, and those of files that follow; whether there is one."""
        node = self._index.nodes.node(ino)
        if node is None or node.stat.device in self._unlisted:
            return False
        dirent = self._index.nodes.dirent(node.parent, node.name)
        if dirent is not None and dirent.ino == ino and self.lacks(dirent, node):
            await self._statahead.bring(node.parent, dirent)
        try:
            await self.list(ino)
        except OSError as exc:
            if exc.errno in LASTING:
                self._unlisted.add(node.stat.device)
                return False
            raise
        return True

    async def list_each(self, parent: int, names: Names, lane: Lane) -> None:
        """Have the lists of these files, as far as the source tells. Raises OSError if the
        directory cannot be used, and IndexWriteError."""
        index = self._index
        lacking = []
        for name in names:
            dirent = index.nodes.dirent(parent, name)
            if dirent is not None and self.lacks(dirent, index.nodes.node(dirent.ino)):
                lacking.append(name)
        if lacking:
            await self._ask_lists(parent, lacking, lane, math.inf)

    async def ask_ahead(self, parent: int, names: Names) -> tuple[Names, int]:
        return await self._ask_lists(parent, names, Lane.DEMAND, BATCH_SECONDS)

    async def _ask_lists(
        self, parent: int, names: Names, lane: Lane, seconds: float
    ) -> tuple[Names, int]:
        """Ask for the lists of the first names, as many as can be asked for in ``seconds``. Returns
        these names, and the number of the lists."""
        index = self._index
        directory = self._tree.known.directory(parent)
        asked_ns = time.time_ns()
        nodes = [index.nodes.named(parent, name) for name in names]
        entries = [
            (name, None if node is None else node.stat.version)
            for name, node in zip(names, nodes, strict=True)
        ]
        with self._tree.recorder.estale_if_replaced(parent):
            answers = await self._source.listxattr_each(directory, entries, lane, seconds)
        rows: list[tuple[int, bytes, bytes]] = []
        plain: list[int] = []
        for node, answer in zip(nodes, answers, strict=False):
            if node is None:
                continue
            if isinstance(answer, OSError):
                if answer.errno in LASTING:
                    self._unlisted.add(node.stat.device)
                continue
            if not past_racy_window(node.stat.ctime_ns, asked_ns):
                continue
            rows.append((node.ino, _key(node, LIST), b"\0".join(answer)))
            if self._note_list(node, answer):
                plain.append(node.ino)
        index.xattrs.put_xattrs(rows)
        self.on_plain(plain)
        return names[: len(answers)], len(rows)

    # -- rights

    def known_access(self, ino: int, mask: int) -> bool | None:
        """Whether the user may (os.R_OK | os.X_OK); None where the source has to be asked. Raises
        OSError EROFS for os.W_OK, but of what can be written to on a read-only file system:
        sockets, FIFOs, devices (fs/namei.c, sb_permission)."""
        if not mask & (os.R_OK | os.X_OK | os.W_OK):
            return True
        node = self._index.nodes.node(ino)
        if mask & os.W_OK and (node is None or stat_module.S_IFMT(node.stat.mode) in WRITTEN):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if node is None:
            return None
        return self._access.get((ino, mask, node.stat.ctime_ns))

    async def access(self, ino: int, mask: int) -> bool:
        """Raises OSError with the source's errno."""
        if (known := self.known_access(ino, mask)) is not None:
            return known

        async def ask(version: SourceVersion | None) -> bool:
            source, place = self._source, self._tree.known.place(ino)
            return await source.call(Lane.DEMAND, source.posix.access, *place, mask, version)

        node = self._index.nodes.node(ino)
        allowed, lasts = await self._of_version(ino, ask)
        if node is not None and lasts:
            self._access[(ino, mask, node.stat.ctime_ns)] = allowed
            if len(self._access) > ACCESS_KEPT:
                self._access.popitem(last=False)
        return allowed


def _key(node: Node | None, name: bytes) -> bytes:
    if node is not None and node.stat.is_directory:
        return node.stat.ctime_ns.to_bytes(8, "big", signed=True) + name
    return name


def _kind(node: Node, name: bytes) -> _Kind:
    return _Kind(node.stat.device, node.stat.mode >> 12, name)
