"""Room for replicas that are about to come: asked of placement, and journalled in the index."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from itertools import zip_longest

from monarchfs.cache.accounts import Accounts
from monarchfs.cache.placement.events import (
    Abandoned,
    Grant,
    Owner,
    Place,
    RefusalReason,
    Refuse,
    Resumed,
    RoomWanted,
    Wanted,
    WantedEach,
)
from monarchfs.cache.reasons import Cause
from monarchfs.cache.replicas import Reservation
from monarchfs.types import IndexWriteError, Node, Replica, ReplicaState

OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
"""What open(2) says of this process or this node, not of the file."""


MOST_BYTES = 16 << 40
"""Of a file that is copied: its map and its digests are in memory. A sparse file may be larger than
all storage."""


class Reservations:
    """Room for copies. Constant: ``keeps_foreign``, whether files that other nodes own are kept."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self.keeps_foreign = accounts.keeps_foreign

    def reserve(self, node: Node, *, evicts: bool = True) -> Reservation | None:
        """Room for a replica of ``node``; None (and a reason) where there is none. A partial
        replica is taken up again. ``evicts``: somebody reads it, so that others may have to go."""
        self._accounts.all_tiers.measure()
        self._accounts.readers.catch_up()
        ino = node.ino
        if ino in self._accounts.busy or not self._may_keep(node):
            return None
        record = self._accounts.claim(node)
        if record is not None and record.tier in self._accounts.tiers:
            if record.state is not ReplicaState.PARTIAL:
                return None  # out of reach for the moment; a second one would be counted twice
            if (reason := self._accounts.all_tiers.out_of_service(record.tier)) is not None:
                path = self._accounts.tiers[record.tier].path
                self._accounts.reasons.put(ino, Cause.NO_TIER, f"its part lies in {path}: {reason}")
                return None
            try:
                part = self._accounts.index.replicas.part(ino)
                return None if part is None else self._resume(node, part, evicts)
            except OSError as exc:
                self._accounts.all_tiers.failed(
                    self._accounts.tiers[record.tier], "opening a part", exc, reading=True
                )
                if exc.errno in OUT_OF_DESCRIPTORS or not self._accounts.drop(
                    ino, "its part was lost"
                ):
                    return None
        place = self._room(node, evicts)
        return None if place is None else self._place([(node, place)])[0]

    def reserve_each(self, nodes: Sequence[Node], *, evicts: bool) -> list[Reservation | None]:
        """``reserve`` of each, in their order."""
        self._accounts.all_tiers.measure()
        self._accounts.readers.catch_up()
        reservations: list[Reservation | None] = [None] * len(nodes)
        new: list[tuple[int, Node]] = []
        known = self._accounts.index.replicas.replicas_of([node.ino for node in nodes])
        for n, node in enumerate(nodes):
            if not (self.keeps_foreign or self._may_keep(node)):
                continue
            if (
                node.ino in self._accounts.busy
                or node.ino in known
                or self._accounts.adopt(node) is not None
            ):
                reservations[n] = self.reserve(node, evicts=evicts)
            else:
                new.append((n, node))
        places: list[tuple[int, Node, Place]] = []
        groups: dict[Owner, list[tuple[int, Node]]] = {owner: [] for owner in Owner}
        for n, node in new:
            groups[self._owner(node)].append((n, node))
        for owner, group in groups.items():  # this node's own files first
            wanted = [(node.ino, node.stat.occupied_bytes) for _, node in group]
            answers = self._accounts.handle(WantedEach(wanted, evicts, owner)) if wanted else []
            for (n, node), answer in zip_longest(group, answers):
                place = answer if isinstance(answer, Place) else self._room(node, evicts)
                if place is not None:
                    places.append((n, node, place))
        placed = self._place([(node, place) for _, node, place in places])
        for (n, _, _), reservation in zip(places, placed, strict=True):
            reservations[n] = reservation
        return reservations

    def _room(self, node: Node, evicts: bool) -> Place | None:
        """Ask placement for room; None, and a reason, where it refuses."""
        wanted = Wanted(node.ino, node.stat.occupied_bytes, evicts, self._owner(node))
        (action,) = self._accounts.handle(wanted)
        if isinstance(action, Place):
            return action
        assert isinstance(action, Refuse)
        self._accounts.metrics.copy_refused(action.reason.value)
        self._refused(action)
        return None

    def _owner(self, node: Node) -> Owner:
        if self._accounts.lookup.owns is None:
            return Owner.NOBODY
        own = self._accounts.lookup.owns(node.stat.version.replica_name, node.stat.size)
        return Owner.THIS_NODE if own else Owner.OTHER_NODE

    def keeps(self, node: Node) -> bool:
        """Whether it is one to keep here: peers keep what they own."""
        return self.keeps_foreign or self._owner(node) is not Owner.OTHER_NODE

    def _may_keep(self, node: Node) -> bool:
        """Whether ``keeps``, and it is not too large; a reason if it is not so."""
        if node.stat.size > MOST_BYTES:
            reason = f"copying failed: it is larger than {MOST_BYTES >> 40} TiB"
            self._accounts.reasons.put(node.ino, Cause.FAILED, reason)
            return False
        if not self.keeps(node):
            self._accounts.reasons.put(node.ino, Cause.FOREIGN, "the node that owns it keeps it")
            return False
        return True

    def _place(self, places: Sequence[tuple[Node, Place]]) -> list[Reservation | None]:
        """Journal what is about to lie in the tiers. All are None where that fails."""
        copies = [(node.ino, place.tier, node.stat.version.replica_name) for node, place in places]
        shared = [
            place.whole
            and node.stat.occupied_bytes >= node.stat.size
            and self._accounts.segments.takes(place.tier, node.stat.size)
            for node, place in places
        ]
        try:
            if files := [copy for copy, shares in zip(copies, shared, strict=True) if not shares]:
                self._accounts.index.replicas.begin_copies(files)
        except IndexWriteError as exc:
            for ino, _tier, _name in copies:
                self._accounts.handle(Abandoned(ino))
                self._accounts.reasons.put(ino, Cause.UNRECORDED, str(exc))
            return [None] * len(copies)
        reservations: list[Reservation | None] = []
        # Files of one tier wait for its removals together.
        after = {tier_id: self._accounts.removals.pending(tier_id) for _, tier_id, _ in copies}
        for (node, place), (ino, tier_id, name), shares in zip(places, copies, shared, strict=True):
            self._accounts.busy[ino] = name
            reservations.append(
                Reservation(
                    node,
                    name,
                    self._accounts.tiers[tier_id],
                    whole=place.whole,
                    shares=shares,
                    after=after[tier_id],
                    reserved_bytes=place.reserved_bytes,
                )
            )
        return reservations

    def _resume(self, node: Node, record: Replica, evicts: bool) -> Reservation | None:
        """None where it cannot be recorded. Raises OSError of the tier, ReplicaLost among them."""
        tier = self._accounts.tiers[record.tier]
        after = self._accounts.removals.pending(tier.id)
        reservation = Reservation(node, record.name, tier, whole=False, after=after, resumed=record)
        reservation.fd = tier.files.open_part(record.name, record.size)
        try:
            # It grows from now on: after a crash its blocks have to be counted anew.
            self._accounts.index.replicas.begin_copies([(node.ino, tier.id, record.name)])
        except IndexWriteError as exc:
            reservation.close_now()
            self._accounts.reasons.put(node.ino, Cause.UNRECORDED, str(exc))
            return None
        owner = self._owner(node)
        self._accounts.handle(Resumed(node.ino, record.tier, record.allocated_bytes, evicts, owner))
        self._accounts.busy[node.ino] = record.name
        return reservation

    def grow(self, reservation: Reservation, size: int) -> bool:
        """``size`` bytes more for a partial replica; False where there is no room. How much of them
        a file with holes needs shows when they are written, and is asked for then."""
        if reservation.whole or (reservation.sparse and not reservation.tight):
            return True
        return self._grow(reservation, size)

    def _grow(self, reservation: Reservation, size: int) -> bool:
        self._accounts.all_tiers.measure()
        (action,) = self._accounts.handle(RoomWanted(reservation.node.ino, size))
        if not isinstance(action, Grant):
            assert isinstance(action, Refuse)
            self._refused(action)
            return False
        reservation.after += self._accounts.removals.pending(reservation.tier.id)
        reservation.reserved_bytes += size
        return True

    def take_room(self, reservation: Reservation, size: int) -> bool:
        """``size`` bytes of what is reserved for a file with holes, or more room; False where there
        is none. No checkpoint."""
        missing = max(reservation.needed, reservation.written) + size - reservation.reserved_bytes
        if missing > 0 and not self._grow(reservation, missing):
            reservation.tight = True
            return False
        reservation.needed += size
        return True

    def _refused(self, refusal: Refuse) -> None:
        """Remember that a file, or more of it, found no room."""
        match refusal.reason:
            case RefusalReason.NO_TIER:
                cause, text = Cause.NO_TIER, "no tier is in service"
            case RefusalReason.NO_INODES:
                cause, text = Cause.NO_ROOM, "no room: the tiers have no inodes to spare"
            case RefusalReason.NO_ROOM:
                cause, text = Cause.NO_ROOM, "no room"
        self._accounts.reasons.put(refusal.ino, cause, text, refusal.missing_bytes)
