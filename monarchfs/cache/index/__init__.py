"""What is known of the source and of the local copies: the only user of lmdb."""

from monarchfs.cache.index.environment import OnChange
from monarchfs.cache.index.index import Index
from monarchfs.cache.index.recovery import (
    LastClose,
    check_in_child,
    last_close,
    mark_suspect,
    problems,
    remove_aside,
    set_aside,
)

__all__ = [
    "Index",
    "LastClose",
    "OnChange",
    "check_in_child",
    "last_close",
    "mark_suspect",
    "problems",
    "remove_aside",
    "set_aside",
]
