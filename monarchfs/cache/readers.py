"""Who reads replicas apart from this process' Python: the threads of the C part, if there are any.

They are told what they may read, and asked before it is taken away. Files that are not resident
they may read from the source.
"""

from __future__ import annotations

from typing import Protocol

from monarchfs.types import SourceVersion


class Readers(Protocol):
    """No method has a checkpoint, or waits for anything but local files to be closed."""

    def stored(self, ino: int) -> None:
        """The index has a complete replica of ``ino``: a new one, or one at another place."""

    def stop(self, ino: int) -> None:
        """Its replica is not to be read any more, whoever has it open."""

    def retire(self, ino: int) -> bool:
        """The same, unless it is open or being read: then False."""

    def outdated(self, ino: int) -> None:
        """Its version is not the source's any more: who has it open keeps it, nobody opens it."""

    def used(self, ino: int) -> bool:
        """Whether they know of a handle for it."""

    def serve(self, tier_id: int, dir_fd: int | None) -> None:
        """What the tier holds in this directory may be read from now on; with None, nothing. The
        descriptor is the caller's."""

    def catch_up(self) -> None:
        """Say what was opened since the last time: ``Cache.accessed``."""

    def from_source(self, ino: int, fd: int, version: SourceVersion) -> bool:
        """It may be read from the source, where nothing of it is kept; whether it will. The
        descriptor is the caller's. As soon as the source has another version, it is not."""

    def not_from_source(self, ino: int) -> None:
        """That ends. What is being read is answered."""

    def reads_source(self, ino: int) -> bool:
        """Whether it was so read since this was asked the last time."""


class NoReaders:
    """Where all reads come to Python."""

    def stored(self, ino: int) -> None:
        """As Readers."""

    def stop(self, ino: int) -> None:
        """As Readers."""

    def retire(self, ino: int) -> bool:
        return True

    def outdated(self, ino: int) -> None:
        """As Readers."""

    def used(self, ino: int) -> bool:
        return False

    def serve(self, tier_id: int, dir_fd: int | None) -> None:
        """As Readers."""

    def catch_up(self) -> None:
        """As Readers."""

    def from_source(self, ino: int, fd: int, version: SourceVersion) -> bool:
        return False

    def not_from_source(self, ino: int) -> None:
        """As Readers."""

    def reads_source(self, ino: int) -> bool:
        return False
