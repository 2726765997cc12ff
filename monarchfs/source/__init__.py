"""The source: the only package that touches the parallel file system.

``posix`` holds the blocking functions on names, ``open_files`` those on open files, ``source`` the
asynchronous facade over both, whose calls ``calls`` makes in threads.
"""

from monarchfs.source.lanes import SourceCounters
from monarchfs.source.posix import PosixSource, SourceEntry
from monarchfs.source.single_flight import SingleFlight
from monarchfs.source.source import Source, SourceListing

__all__ = [
    "PosixSource",
    "SingleFlight",
    "Source",
    "SourceCounters",
    "SourceEntry",
    "SourceListing",
]
