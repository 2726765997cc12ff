"""Extended attributes and access rights: the source's, remembered, and this file system's own."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict

from monarchfs.fs.files import Files
from monarchfs.fs.reasons import Reasons
from monarchfs.fs.tree import Tree
from monarchfs.source.source import Source
from monarchfs.types import Lane, SourceChanged

PREFIX = b"user.monarchfs."
STATE, TIER, REASON = PREFIX + b"state", PREFIX + b"tier", PREFIX + b"reason"

LIST = b""
"""The name under which the index keeps the list of names, NUL-joined."""

ACCESS_KEPT = 100_000

LASTING = {errno.ENODATA, errno.EOPNOTSUPP}
"""Errors that are an answer about the attribute, and not about the source's day."""


class Xattrs:
    """What one inode (one version of a file) has; therefore what was asked once stays true.

    The attributes of a directory and the rights on it may change under the same number: they are
    remembered with its ctime.
    """

    def __init__(self, tree: Tree, files: Files, reasons: Reasons, source: Source) -> None:
        self._tree = tree
        self._files = files
        self._reasons = reasons
        self._source = source
        self._access: OrderedDict[tuple[int, int, int], bool] = OrderedDict()

    def known(self, ino: int, name: bytes) -> bytes | None:
        """The value where it is known. Raises OSError where it is known that there is none."""
        if name.startswith(PREFIX) and (own := self._own(ino, name)) is not None:
            return own
        value = self._tree.index.xattr(ino, self._key(ino, name))
        if isinstance(value, int):
            raise OSError(value, os.strerror(value))
        return value

    def _key(self, ino: int, name: bytes) -> bytes:
        node = self._tree.index.node(ino)
        if node is not None and node.stat is not None and node.stat.is_directory:
            return node.stat.ctime_ns.to_bytes(8, "big", signed=True) + name
        return name

    def _own(self, ino: int, name: bytes) -> bytes | None:
        node = self._tree.index.node(ino)
        if node is None or node.stat is None or not node.stat.is_regular:
            return None
        value: str | None = None
        if name == STATE:
            value = self._files.state(ino)
        elif name == TIER:
            value = self._files.tier(ino)
        elif name == REASON:
            value = self._reasons.sentence(node)
        if value is None:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        return value.encode("utf-8", "surrogateescape")

    async def get(self, ino: int, name: bytes) -> bytes:
        if (known := self.known(ino, name)) is not None:
            return known
        place = self._tree.place(ino)
        try:
            value = await self._source.getxattr(*place, name, Lane.DEMAND)
        except SourceChanged as exc:
            raise OSError(errno.ESTALE, "its directory was replaced") from exc
        except OSError as exc:
            if exc.errno in LASTING:
                self._tree.index.put_xattr(ino, self._key(ino, name), exc.errno)
            raise
        self._tree.index.put_xattr(ino, self._key(ino, name), value)
        return value

    async def list(self, ino: int) -> list[bytes]:
        """The source's names. Ours are not among them: ``cp -a`` and ``rsync -X`` copy what is
        listed."""
        key = self._key(ino, LIST)
        value = self._tree.index.xattr(ino, key)
        if value is None:
            place = self._tree.place(ino)
            try:
                names = await self._source.listxattr(*place, Lane.DEMAND)
            except SourceChanged as exc:
                raise OSError(errno.ESTALE, "its directory was replaced") from exc
            value = b"\0".join(names)
            self._tree.index.put_xattr(ino, key, value)
        assert isinstance(value, bytes)
        return value.split(b"\0") if value else []

    def known_access(self, ino: int, mask: int) -> bool | None:
        """Whether the user may (os.R_OK | os.X_OK); None where the source has to be asked."""
        if not mask & (os.R_OK | os.X_OK | os.W_OK):
            return True
        if mask & os.W_OK:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        node = self._tree.index.node(ino)
        if node is None or node.stat is None:
            return None
        return self._access.get((ino, mask, node.stat.ctime_ns))

    async def access(self, ino: int, mask: int) -> bool:
        """Raises OSError with the source's errno."""
        if (known := self.known_access(ino, mask)) is not None:
            return known
        try:
            allowed = await self._source.access(*self._tree.place(ino), mask, Lane.DEMAND)
        except SourceChanged as exc:
            raise OSError(errno.ESTALE, "its directory was replaced") from exc
        node = self._tree.index.node(ino)
        if node is not None and node.stat is not None:
            self._access[(ino, mask, node.stat.ctime_ns)] = allowed
            if len(self._access) > ACCESS_KEPT:
                self._access.popitem(last=False)
        return allowed
