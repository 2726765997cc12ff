"""What can be wrong with a replica itself."""

from __future__ import annotations

import errno


class ReplicaLost(OSError):
    """A replica is missing, or is not the file that was written (errno ESTALE).

    Any other OSError of the store is about the tier; this one means that the index is wrong about
    this replica.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(errno.ESTALE, reason, name)
