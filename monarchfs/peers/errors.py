"""What goes wrong with peers. It never reaches a reader."""

from monarchfs.types import MonarchError


class PeerError(MonarchError):
    """A peer is not there, or says what it should not."""
