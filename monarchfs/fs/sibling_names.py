"""Names beside one that was looked up, for those who answer look-ups without Python.

A scan, a request to warm or an index from elsewhere may know a dataset before anybody looks up a
name. To tell of all of it would push out what is needed. So each look-up of a name that is known
here, and not there, brings some more of its directory.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from monarchfs.types import Dirent, Node

AT_ONCE = 16
"""Names, for one that is looked up: a quarter of a millisecond at most."""

FEW = 3
"""So many are looked up before others are told."""

REST_SECONDS = 10.0
"""After its last name a directory begins again, after so long."""

MOST_NAMES = 131_072
"""As in _names.c: of more, most would be pushed out before they are looked up."""

DIRECTORIES_KEPT = 30_000

Row = tuple[Dirent, Node | None]


class SiblingNames:
    """Constant: its parts. Changing: by directory, how many names were looked up, the cookie up to
    which others were told, and before when (time.monotonic) nothing is.

    ``count`` says how many nodes are known; ``rows`` (directory, after this cookie, at most so
    many) gives entries; ``tell`` (directory, entry, its node, nanoseconds since 1970) tells of
    one. Not only the thread of the event loop comes here (_handoff.c)."""

    def __init__(
        self,
        count: Callable[[], int],
        rows: Callable[[int, int, int], list[Row]],
        tell: Callable[[int, Dirent, Node | None, int], None],
    ) -> None:
        self._count = count
        self._rows = rows
        self._tell = tell
        self._directories: OrderedDict[int, tuple[int, int, float]] = OrderedDict()

    @property
    def fits(self) -> bool:
        """Whether all names that are known may be told of."""
        return self._count() <= MOST_NAMES

    def looked_up(self, parent: int) -> None:
        """A name there was known. No checkpoint."""
        times, after, rests_until = self._directories.pop(parent, (0, 0, 0.0))
        times += 1
        if times > FEW and time.monotonic() >= rests_until and self.fits:
            now_ns = time.time_ns()
            rows = self._rows(parent, after, AT_ONCE)
            for dirent, node in rows:
                self._tell(parent, dirent, node, now_ns)
            after = rows[-1][0].cookie if len(rows) == AT_ONCE else 0
            if not after:
                times, rests_until = 0, time.monotonic() + REST_SECONDS
        self._directories[parent] = times, after, rests_until
        if len(self._directories) > DIRECTORIES_KEPT:
            self._directories.popitem(last=False)
