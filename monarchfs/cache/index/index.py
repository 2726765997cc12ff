"""The index: what is known of the source and of the replicas, in one LMDB environment.

Every change is one transaction, committed before the call returns, but not synced. So it survives
the death of this process, and after ``environment.sync`` also that of the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from monarchfs.cache.index import disk, recovery
from monarchfs.cache.index.disk import DATA_FILE
from monarchfs.cache.index.environment import MAP_BYTES, Environment, OnChange
from monarchfs.cache.index.listings import Listings
from monarchfs.cache.index.meta import Meta
from monarchfs.cache.index.nodes import NodeTables
from monarchfs.cache.index.pins import Pins
from monarchfs.cache.index.recovery import INDEX_DIRECTORY, LastClose
from monarchfs.cache.index.replicas import Replicas
from monarchfs.cache.index.segments import Segments
from monarchfs.cache.index.xattrs import XattrTables
from monarchfs.types import IndexUnusable, IndexWriteError


class Index:
    """The open index, by tables. All calls but ``environment.sync`` come from one thread at a time.

    Calls take microseconds unless they say otherwise. Writing calls raise IndexWriteError (then
    nothing was changed), reading ones IndexUnusable. When the disk is full or fails, writing calls
    do not raise: the index is frozen, see ``Environment.frozen``.
    """

    def __init__(self, directory: str, environment: Environment) -> None:
        """``directory``: the state directory."""
        self._directory = directory
        self.environment = environment
        self.meta = Meta(environment)
        self.replicas = Replicas(environment)
        self.segments = Segments(environment)
        self.pins = Pins(environment)
        self.xattrs = XattrTables(environment)
        self.nodes = NodeTables(environment, self.replicas, self.pins, self.xattrs)
        self.listings = Listings(environment)

    @classmethod
    def open(
        cls,
        directory: str,
        *,
        source_id: str,
        trust_after_kill: bool = False,
        map_bytes: int = MAP_BYTES,
        on_change: OnChange = OnChange(),  # noqa: B008
        goes_on: Callable[[], object] = lambda: None,
    ) -> Index:
        """Open the index in the state directory ``directory``, or create it there.

        ``source_id`` names the mirrored source; an index of another one is refused. Waits for the
        disk, and for ``recovery.check_in_child``, which calls ``goes_on``, if the index was not
        closed cleanly.
        ``trust_after_kill`` skips that check if only the process died, not the machine, unless
        ``recovery.mark_suspect`` was called. To go on with an empty index, call
        ``recovery.set_aside`` and then this again. An index on a disk that is full, fails or is
        read-only is opened frozen.

        Raises IndexUnusable (damaged, foreign, or of another schema version), IndexWriteError
        (it cannot be opened, or moved to memory), OSError.
        """
        if (what := recovery.planted(directory)) is not None:
            raise IndexUnusable(what)
        left = recovery.last_close(directory)
        suspicious = (
            left is LastClose.CRASHED
            or (left is LastClose.KILLED and not trust_after_kill)
            or recovery.is_suspect(directory)
        )
        path = Path(directory, INDEX_DIRECTORY)
        if left is LastClose.CRASHED:
            recovery.forget_pages(directory)
        sound = left is LastClose.NEW or not suspicious
        if not sound and not recovery.check_in_child(directory, goes_on):
            raise IndexUnusable(f"the index in {path} is damaged")
        recovery.forget_suspicion(directory)
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError as error:
            raise IndexUnusable(f"{path} is not a directory") from error

        def open_in(place: str, frozen: str | None = None) -> Index:
            return cls(directory, Environment(place, source_id, map_bytes, on_change, frozen))

        try:
            index = open_in(str(path))
        except IndexWriteError as error:
            why = disk.trouble(error.__cause__)
            if why is None:
                raise
            index = _open_copy(str(path), why, open_in)
        if left is LastClose.CRASHED:
            # Before the mark says that it was open in this boot: a crash in between is one more.
            recovery.remove_mark(directory)
            index.replicas.end_boot()
        try:
            # Before anything else is written that a crash could tear.
            if index.environment.frozen is None or left is not LastClose.CRASHED:
                recovery.mark_open(directory)
            index.environment.keep_headroom()
        except OSError as error:
            _freeze_at_start(index.environment, error)
        if (
            index.environment.frozen is not None
            or left in (LastClose.KILLED, LastClose.CRASHED)
            or recovery.has_set_aside(directory)
        ):
            index.environment.skip_numbers_after(index.environment.next_id)
        return index

    def close(self, *, clean: bool = True) -> None:
        """Close it; idempotent. With ``clean`` it is synced, and the next opener need not check it.

        A frozen index is never marked as closed cleanly. Waits for the disk, and for a ``sync`` in
        another thread. Raises IndexWriteError, OSError; it is closed all the same.
        """
        if self.environment.close(sync=clean) and clean and self.environment.frozen is None:
            recovery.mark_closed(self._directory)


def _freeze_at_start(environment: Environment, error: OSError) -> None:
    """The mark that the index is open cannot be written, so nothing else may be."""
    if environment.frozen is not None:
        return
    try:
        why = disk.trouble(error)
        if why is None:
            raise error
        environment.freeze(why)
    except (OSError, IndexWriteError):
        environment.close(sync=False)
        raise


def _open_copy(path: str, why: str, open_in: Callable[[str, str], Index]) -> Index:
    """A copy in memory of an index on a read-only disk, which LMDB does not open for writing."""

    def fill(to: int) -> None:
        data = os.open(os.path.join(path, DATA_FILE), os.O_RDONLY | os.O_CLOEXEC)
        try:
            disk.copy_data(data, to)
        finally:
            os.close(data)

    try:
        with disk.memory_copy(fill) as copy:
            return open_in(copy, f"the index cannot be written: {why}")
    except OSError as error:
        raise IndexWriteError(f"the index in {path} cannot be opened: {why}") from error
