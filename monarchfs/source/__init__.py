"""The source: the only package that touches the parallel file system.

``posix`` holds the blocking functions, ``source`` the asynchronous facade over them.
"""

from monarchfs.source.flights import Flights
from monarchfs.source.lanes import SourceCounters
from monarchfs.source.posix import PosixSource, SourceEntry
from monarchfs.source.source import Source, SourceListing

__all__ = ["Flights", "PosixSource", "Source", "SourceCounters", "SourceEntry", "SourceListing"]
