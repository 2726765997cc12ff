"""The file system as those see it who answer the kernel."""

from __future__ import annotations

from typing import NamedTuple

from monarchfs.fs.files import Files
from monarchfs.fs.xattrs import Xattrs
from monarchfs.metadata.tree import Tree


class FileSystem(NamedTuple):
    """Names and attributes, open files, extended attributes."""

    tree: Tree
    files: Files
    xattrs: Xattrs
