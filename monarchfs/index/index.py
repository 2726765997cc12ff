"""The index: what is known of the source and of the local copies, in one LMDB environment.

Every change is one transaction, committed before the call returns but not synced: it survives the
death of this process, and once ``sync`` has returned also that of the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from monarchfs.index import recovery
from monarchfs.index.listings import Listings
from monarchfs.index.recovery import INDEX_DIRECTORY, LastClose
from monarchfs.index.replicas import Replicas
from monarchfs.index.tables import MAP_BYTES, Databases, open_environment
from monarchfs.types import IndexUnusable


class Index(Listings, Replicas):
    """The open index. All calls but ``sync`` come from one thread at a time.

    Calls take microseconds, except where they say otherwise. Writing calls raise IndexWriteError
    (then nothing was changed), reading ones IndexUnusable.
    """

    def __init__(self, directory: str, env: Any, databases: Databases, next_id: int) -> None:
        super().__init__(env, databases, next_id)
        self._directory = directory

    @classmethod
    def open(
        cls,
        directory: str,
        *,
        source_id: str,
        trust_after_kill: bool = False,
        map_bytes: int = MAP_BYTES,
    ) -> Index:
        """Open the index in the state directory ``directory``, or make it there.

        ``source_id`` names the mirrored source; an index of another one is refused. Blocks for the
        disk, and, if the index was not closed cleanly, for ``recovery.check_in_child``.
        ``trust_after_kill`` leaves that check out where only the process died, not the machine.
        Call ``recovery.set_aside`` and this again to go on with an empty index.

        Raises IndexUnusable (damaged, foreign, or of another schema version), IndexWriteError
        (the disk is full or fails), OSError.
        """
        left = recovery.last_close(directory)
        suspicious = left is LastClose.CRASHED or (
            left is LastClose.KILLED and not trust_after_kill
        )
        path = Path(directory, INDEX_DIRECTORY)
        if suspicious and not recovery.check_in_child(directory):
            raise IndexUnusable(f"the index in {path} is damaged")
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError as error:
            raise IndexUnusable(f"{path} is not a directory") from error
        environment = open_environment(str(path), source_id, map_bytes)
        index = cls(directory, *environment)
        try:
            # Before anything is written that a crash could tear.
            recovery.mark_open(directory)
        except OSError:
            index._close_environment(sync=False)
            raise
        return index

    def close(self, *, clean: bool = True) -> None:
        """Close it; idempotent. ``clean`` syncs it and spares the next opener the check.

        Blocks for the disk, and for a ``sync`` of another thread. Raises IndexWriteError, OSError;
        it is closed all the same.
        """
        if self._close_environment(sync=clean) and clean:
            recovery.mark_closed(self._directory)
