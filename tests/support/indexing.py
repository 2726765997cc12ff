"""An index, as tests fill it: a name at a time."""

from monarchfs.cache.index import Index
from monarchfs.types import Node, SourceStat


def record_found(
    index: Index, parent: int, name: bytes, stat: SourceStat, target: bytes, now_ns: int
) -> Node:
    return index.nodes.record_found_each(parent, [(name, stat, target)], now_ns)[0][0]
