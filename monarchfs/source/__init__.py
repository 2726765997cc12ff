"""The source: the only package that touches the parallel file system.

``posix`` has the blocking functions; ``source`` calls them in threads.
"""

from monarchfs.source.lanes import SourceCounters
from monarchfs.source.posix import PosixSource, SourceEntry
from monarchfs.source.single_flight import SingleFlight
from monarchfs.source.source import Source

__all__ = [
    "PosixSource",
    "SingleFlight",
    "Source",
    "SourceCounters",
    "SourceEntry",
]
