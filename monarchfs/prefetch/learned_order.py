"""An order that nobody announced: files are opened as they were before. Pure.

Only opens of files that are not on this node count. The others are fast, and nobody hears of each.

The numbers of the last million such opens are remembered. One number of 16 is a mark: when it is
opened again, the following opens are compared with those that followed it before. If 24 agree,
what comes next is an order like an announced one. No more than a quarter of an epoch is ahead of
readers, because the next epoch may be in another order. An open costs 1 to 2 us for it.
"""

from __future__ import annotations

from array import array

MOST_OPENS = 1 << 20
"""Opens that are remembered, of 8 bytes. An order that is longer is not learned."""

MARK_BITS = 4
"""One of 16 inode numbers is a mark: the place of its last open is remembered, too."""

SHORTEST = 256
"""An order that is shorter is not learned: opens agree with it by chance."""

NEAR = 32
"""An open agrees if the file was opened so near the expected place before. Worker processes that
read side by side change places, and files that are on this node now are left out."""

SURE = 24
"""After so many opens that agree, the order is followed."""

MOST_STRAYED = 8
"""With so many more opens that do not agree than do, they were alike by chance."""

LONG = 4096
"""An order that was lost before so many files of it were given out has to agree for twice as long
the next time."""

MOST_AHEAD = 4096
SHARE_AHEAD = 4
"""So many files are given out before they are opened, or this part of an epoch if that is less: the
next epoch may be in another order."""

STEP = 32
"""Files that are given out at once, at least."""


class LearnedOrder:
    """Changing: the last opens (``_log``, inode numbers), and how many there were before
    (``_forgotten``); the places of marks; the place where the next open is expected (``_at``, -1:
    nowhere), the opens that agreed, how many more did not of late, and how many have to agree
    (``_sure``); up to which place files were given out, and at most how many ahead;
    ``times_learned``, how often an order began to be followed. Places count all opens.
    """

    def __init__(self) -> None:
        self._log = array("Q")
        self._forgotten = 0
        self._marks: dict[int, int] = {}
        self._at = -1
        self._agreed = self._strayed = 0
        self._sure = SURE
        self._given_out = self._most_ahead = 0
        self.times_learned = 0

    @property
    def followed(self) -> bool:
        """Whether files are opened as they were before. It is so until ``lost``."""
        return self._agreed >= self._sure

    def note_open(self, ino: int) -> None:
        """A file was opened that is not on this node. 1 us."""
        if self._at >= 0 and not self.followed:
            self._compare(ino)
        place = self._forgotten + len(self._log)
        # Multiplied by the golden ratio, so that numbers in any steps are marks.
        if not (ino * 0x9E3779B97F4A7C15 >> 40) % (1 << MARK_BITS):
            before = self._marks.get(ino, place)
            if self._at < 0 and place - before >= SHORTEST:
                self._at, self._agreed, self._strayed = before + 1, 1, 0
            self._marks[ino] = place
        self._log.append(ino)
        if len(self._log) >= MOST_OPENS:
            self._forget()

    def _compare(self, ino: int) -> None:
        first = max(0, self._at - NEAR - self._forgotten)
        try:
            found = self._log.index(ino, first, first + 2 * NEAR)
        except ValueError:
            self._strayed += 1
            if self._strayed >= MOST_STRAYED:
                self._forget_place()
            return
        self._at = max(self._at, self._forgotten + found + 1)
        self._agreed += 1
        self._strayed = max(0, self._strayed - 1)
        if self.followed:
            self.times_learned += 1
            self._given_out = self._at
            epoch = self._forgotten + len(self._log) - self._at
            self._most_ahead = min(MOST_AHEAD, epoch // SHARE_AHEAD)

    def lost(self) -> None:
        """Files are opened in another order now, or nobody follows this one any more."""
        if self.followed:
            long = self._given_out - self._at >= LONG
            self._sure = SURE if long else 2 * self._sure
        self._forget_place()

    def _forget_place(self) -> None:
        self._at = -1
        self._agreed = self._strayed = 0

    def _forget(self) -> None:
        """The older half."""
        half = len(self._log) // 2
        del self._log[:half]
        self._forgotten += half
        self._marks = {ino: at for ino, at in self._marks.items() if at >= self._forgotten}
        if (self._given_out if self.followed else self._at) < self._forgotten:
            self._forget_place()

    def take_inos(self, ahead: int) -> list[int]:
        """Inode numbers of files that will be opened next, if the order is followed, and only so
        many (``ahead``) that were given out before are still to be opened."""
        first = self._given_out - self._forgotten
        end = min(first + self._most_ahead - ahead, len(self._log))
        if not self.followed or end - first < STEP:
            return []
        self._given_out = self._forgotten + end
        return self._log[first:end].tolist()
