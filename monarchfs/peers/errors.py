"""What goes wrong with peers. It never reaches a reader."""

from monarchfs.types import MonarchError


class PeerError(MonarchError):
    """A peer does not answer, or its answer is wrong."""
