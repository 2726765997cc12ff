"""An announced order of files, and how far its readers have come.

An open agrees with the order if one of the eight files before it, of those that are not local,
was opened, too. If less than half of the last 32 agree, the file is looked for in the list, and
the order goes on behind it, at most twice; then it is given up. Even a policy that knew the whole
future would miss the share of each epoch that does not fit, so an order saves latency; it saves
bytes only where files go for others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import takewhile

from monarchfs.system.process_stat import start_ticks
from monarchfs.types import Node

LAG = 4096
"""Files of the order that are so far behind the last one that was opened will not be opened. Worker
processes of a loader that read side by side are less apart."""

SHORT_LAG = 256
"""Files that are farther behind than this may take a quarter of the room."""

FIRST_BYTES = 1 << 20
"""What may be read ahead of readers before any of the order was opened. It grows by twice of what
was opened, and what was wasted counts against it, so a wrong order costs no more than this."""

NEAR = 8
"""An open agrees with the order if one of so many files before it was opened, too, of those that
are not on this node. So it does where processes take batches in turn, and in no other order."""

SHARE = 1 / 32
"""How much an open counts in ``_agreement``: about the last 32 do."""

LOST = 0.5
"""An order that fewer opens agree with is not the one in which files are read now."""

MOST_SEARCHES = 2
"""How often the readers' place in an order is looked for, unless LAG files agreed since."""

MOST_STRAYS = 1 << 14
"""The most opens of other files until one of them is looked for in the order."""

DESERTED_SECONDS = 10.0
"""If who announced an order has exited, it is suspended when no open agreed with it for so long."""


class Order:
    """``names`` are separated by NUL: paths relative to the mount, or ``/`` and an inode number.

    Changing: how many names were taken; by inode number, the places of files that were found and
    not opened yet (``_places``), in the order of places (``_found``); those of them that were not
    fetched yet (``_next``), and those that were (``fetched``); the places that were
    read (``_read``), and the last of them; how many bytes may be ahead of readers (``_allowed``);
    how far opens agree with the order, whether the last one did (``_agreed_last``), and when one
    did last (``agreed_at``; infinite before the first); how many did not since a search
    (``_strays``), and how many may not before the next one (``_patience``); ``suspended``, whether
    nothing is fetched until one does again.
    """

    def __init__(
        self, names: bytes, pid: int = 0, pid_began: int | None = None, *, begun: bool = False
    ) -> None:
        """``pid`` is the process that announced it, which began at ``pid_began`` (``start_ticks``;
        None where it is not known, as one of another pid namespace). ``begun``: readers may be
        anywhere in it, so nothing is fetched before an open, and the first one that does not agree
        with its beginning shows where they are."""
        self._names = b"\0%s\0" % names.strip(b"\0")
        self._pid, self._pid_began = pid, pid_began
        self._at = 1
        self.fetched: dict[int, Node] = {}
        self.fetched_bytes = 0
        self.opened_at = 0.0
        self.agreed_at = math.inf
        self.suspended = False
        self._taken = 0
        self._places: dict[int, int] = {}
        self._found: deque[tuple[int, int]] = deque()
        self._next: deque[Node] = deque()
        self._read: set[int] = set()
        self._read_to = 0
        self._looked_at = self._remote = 1
        self._allowed = 0 if begun else FIRST_BYTES
        self._agreed_last = False
        self._agreement = LOST if begun else 1.0
        self._searches = self._since_search = 0
        self._strays = self._patience = 0

    @property
    def exited(self) -> bool:
        """Whether the process that announced it has exited, as far as that is known."""
        return self._pid_began is not None and start_ticks(self._pid) != self._pid_began

    def __len__(self) -> int:
        """How much memory its names take."""
        return len(self._names)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to fetch, and no file that is to be opened."""
        return not (self.unfetched or self.fetched)

    @property
    def unfetched(self) -> bool:
        return bool(self._next) or self._at < len(self._names)

    # -- what comes next

    @property
    def ahead(self) -> int:
        """How many names were taken, or files found, that nobody has come to."""
        return self._taken - self._read_to

    @property
    def sees_far(self) -> bool:
        """Whether enough of it was taken to tell what it does not need for long."""
        return self.ahead >= LAG // 2 or self._at >= len(self._names)

    def take_names(self, most: int) -> list[bytes]:
        """The next names, unless LAG files were found already that nobody has come to."""
        names: list[bytes] = []
        most = min(most, LAG - self.ahead)
        while len(names) < most and self._at < len(self._names):
            end = self._names.index(b"\0", self._at)
            if end > self._at:
                names.append(self._names[self._at : end])
            self._at = end + 1
        return names

    def found(self, nodes: Sequence[Node | None]) -> None:
        """What the names stand for that were taken; None for those that are of no use."""
        for node in nodes:
            self._taken += 1
            if node is not None and node.ino not in self._places:
                self._places[node.ino] = self._taken
                self._found.append((self._taken, node.ino))
                self._next.append(node)

    def next_files(self, most: int, distance: int) -> Iterator[Node]:
        """Files that may be fetched now: at most so many, until ``distance`` bytes wait for their
        readers."""
        left = self._limit(distance) - self.fetched_bytes
        while self._next and most > 0 and left > 0:
            node = self._next.popleft()
            if node.ino in self._places:
                most -= 1
                left -= node.stat.size
                yield node

    def looked_at(self, files: int, remote: int) -> None:
        """So many of the next files were not on this node."""
        self._looked_at += files
        self._remote += remote

    def wants(self, ino: int) -> bool:
        """Whether it is still to be opened, and not fetched."""
        return ino in self._places and ino not in self.fetched

    def fetch(self, node: Node) -> None:
        """It is fetched now. The order ``wants`` it."""
        self.fetched[node.ino] = node
        self.fetched_bytes += node.stat.size

    def awaits(self, ino: int) -> bool:
        """Whether it is one of the next files: others should go from this node before it."""
        return ino in self._places and not self.suspended

    def takes_back(self, ino: int) -> bool:
        """It was not fetched after all. Whether the order ``wants`` it now."""
        self._forget_fetched(ino)
        return self.wants(ino)

    # -- what was opened

    def expects(self, ino: int) -> bool:
        """Whether an open of it agrees with the order."""
        place = self._places.get(ino)
        if place is None:
            return False
        reach = min(LAG, NEAR * self._looked_at // self._remote)
        before = range(place - reach, place)
        return before.start <= 0 or not self._read.isdisjoint(before)

    def note_open(self, ino: int, size: int, now: float) -> None:
        """A file was opened that it ``expects``, or one that is local."""
        place = self._take_out(ino)
        if place:
            self.agreed_at, self.suspended = now, False
            self._read_to = max(self._read_to, place)
            # In a wrong order few opens agree by chance, and hardly two of them in a row.
            self._allowed += 2 * size if self._agreed_last else size
            self._agreed_last = True
            self._agreement += SHARE * (1 - self._agreement)
            self._since_search += 1
            if self._since_search > LAG:
                self._searches = 0

    def strayed(self, ino: int) -> bool:
        """A file was opened that no order expects. Whether it is to be looked for in this one,
        because too many were."""
        self._take_out(ino)
        self._agreed_last = False
        self._agreement -= SHARE * self._agreement
        self._strays += 1
        return self._agreement < LOST and self._strays > self._patience

    def _take_out(self, ino: int) -> int:
        """It is not expected any more. Its place; 0 if it was not before."""
        place = self._places.pop(ino, 0)
        if place:
            self._read.add(place)
            self._forget_fetched(ino)
        return place

    def _forget_fetched(self, ino: int) -> int:
        """How many bytes of it were fetched."""
        node = self.fetched.pop(ino, None)
        size = 0 if node is None else node.stat.size
        self.fetched_bytes -= size
        return size

    def _limit(self, distance: int) -> int:
        return min(distance, self._allowed)

    def passed(self, distance: int) -> list[int]:
        """What was fetched and will not be opened. It is not expected any more."""
        given_up = []
        excess = self._behind_bytes() - distance // 4
        while self._found:
            place, ino = self._found[0]
            is_behind = place < self._read_to - SHORT_LAG and excess > 0
            is_expected = self._places.get(ino) == place
            if is_expected and not (is_behind or place < self._read_to - LAG):
                break
            self._found.popleft()
            if not is_expected:
                continue  # it was opened, and may have a place farther ahead
            del self._places[ino]
            if size := self._forget_fetched(ino):
                excess -= size
                self._allowed -= size
                given_up.append(ino)
        if len(self._read) > 4 * LAG:
            self._read = {place for place in self._read if place > self._read_to - 2 * LAG}
        return given_up

    def _behind_bytes(self) -> int:
        """What was fetched and lies farther behind than SHORT_LAG."""
        behind = takewhile(lambda found: found[0] < self._read_to - SHORT_LAG, self._found)
        nodes = (self.fetched.get(ino) for place, ino in behind if self._places.get(ino) == place)
        return sum(node.stat.size for node in nodes if node is not None)

    def deserted(self, now: float) -> bool:
        """Whether it is time to ``suspend`` it. Only after a first open that agreed: a command that
        announces an order exits before anybody reads."""
        since = now - self.agreed_at
        return since >= DESERTED_SECONDS and not self.suspended and self.exited

    def suspend(self) -> list[int]:
        """Perhaps nobody reads in it any more. What was fetched is to be given up; it comes first
        when an open agrees."""
        given_up = sorted(self.fetched, key=self._places.__getitem__)
        self._next.extendleft(self.fetched[ino] for ino in reversed(given_up))
        self.fetched, self.fetched_bytes, self._allowed = {}, 0, 0
        self._agreed_last, self.suspended = False, True
        return given_up

    def seek(self, path: bytes, ino: int) -> bool:
        """``strayed`` said so: go on behind this file. False if that was done too often. What was
        fetched is in ``fetched`` until then."""
        self._agreement = (1 + LOST) / 2
        name = path
        if (at := self._names.find(b"\0%s\0" % name)) < 0:
            name = b"/%d" % ino
            if (at := self._names.find(b"\0%s\0" % name)) < 0:
                # Somebody else reads it, and goes on: a search in a long list takes a while.
                self._patience = min(2 * self._strays, MOST_STRAYS)
                self._strays = 0
                return True
        self._strays = self._patience = 0
        self._searches += 1
        if self._searches > MOST_SEARCHES:
            return False
        self._at = at + len(name) + 2
        self._taken = self._read_to = self._since_search = 0
        self._allowed = self.fetched_bytes = 0
        self.fetched, self._places, self._read = {}, {}, set()
        self._found.clear()
        self._next.clear()
        return True


class Orders(dict[str, Order]):
    """The orders that are followed, by name, the newest last."""

    def awaits(self, ino: int) -> bool:
        """Whether the file is one of the next of an order."""
        return any(order.awaits(ino) for order in self.values())
