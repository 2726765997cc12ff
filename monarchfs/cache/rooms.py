"""Room for replicas that are about to come: asked of placement, and journalled in the index."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from itertools import zip_longest

from monarchfs.cache.moves import Moves
from monarchfs.cache.reasons import Cause
from monarchfs.cache.replicas import Reservation
from monarchfs.placement.events import (
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
    Weighed,
)
from monarchfs.types import IndexWriteError, Node, Replica, ReplicaState

OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
"""What open(2) says of this process or this node, not of the file."""


class Rooms(Moves):
    """The part of the cache that copies ask for room. Changing: ``keeps_foreign``, whether files
    that other nodes own are kept."""

    keeps_foreign = True

    def claim(self, node: Node) -> Replica | None:
        """The record of the node's replica; also one that an earlier index, or an earlier number
        of the same version, left in a tier."""
        return self.index.replicas.replica(node.ino) or self._adopt(node)

    def _adopt(self, node: Node) -> Replica | None:
        """The record that an earlier index, or an earlier number of the same version, left."""
        if not self.index.replicas.claimable or not node.stat.is_regular:
            return None
        try:
            record = self.index.replicas.claim(
                node.ino, node.stat.version.replica_name, node.stat.size
            )
        except IndexWriteError:
            return None
        if record is not None:
            self._metrics.replicas_adopted += 1
        return record

    def weigh(self, weights: Sequence[tuple[int, float]], *, replace: bool) -> None:
        """Users gave these files (number, weight) weights."""
        self._handle(Weighed(weights, replace))
        self.weighed(weights, replace=replace)

    def reserve(self, node: Node, *, evicts: bool = True) -> Reservation | None:
        """Room for a replica of ``node``; None (and a reason) where there is none. A partial
        replica is taken up again. ``evicts``: somebody reads it, so that others may have to go."""
        self._tiers.measure()
        self.readers.catch_up()
        ino = node.ino
        if ino in self._busy or not self._may_keep(node):
            return None
        record = self.claim(node)
        if record is not None and record.tier in self.tiers:
            if record.state is not ReplicaState.PARTIAL:
                return None  # out of reach for the moment; a second one would be counted twice
            if (reason := self._tiers.out_of_service(record.tier)) is not None:
                path = self.tiers[record.tier].path
                self.reasons.put(ino, Cause.NO_TIER, f"its part lies in {path}: {reason}")
                return None
            try:
                return self._resume(node, record, evicts)
            except OSError as exc:
                self._tiers.failed(self.tiers[record.tier], "opening a part", exc, reading=True)
                if exc.errno in OUT_OF_DESCRIPTORS or not self.drop(ino, "its part was lost"):
                    return None
        place = self._room(node, evicts)
        return None if place is None else self._place([(node, place)])[0]

    def reserve_each(self, nodes: Sequence[Node], *, evicts: bool) -> list[Reservation | None]:
        """``reserve`` of each, in their order."""
        self._tiers.measure()
        self.readers.catch_up()
        reservations: list[Reservation | None] = [None] * len(nodes)
        new: list[tuple[int, Node]] = []
        known = self.index.replicas.replicas_of([node.ino for node in nodes])
        for n, node in enumerate(nodes):
            if not (self.keeps_foreign or self._may_keep(node)):
                continue
            if node.ino in self._busy or node.ino in known or self._adopt(node) is not None:
                reservations[n] = self.reserve(node, evicts=evicts)
            else:
                new.append((n, node))
        places: list[tuple[int, Node, Place]] = []
        groups: dict[Owner, list[tuple[int, Node]]] = {owner: [] for owner in Owner}
        for n, node in new:
            groups[self._owner(node)].append((n, node))
        for owner, group in groups.items():  # this node's own files first
            wanted = [(node.ino, node.stat.occupied_bytes) for _, node in group]
            answers = self._handle(WantedEach(wanted, evicts, owner)) if wanted else []
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
        (action,) = self._handle(wanted)
        if isinstance(action, Place):
            return action
        assert isinstance(action, Refuse)
        self._metrics.copy_refused(action.reason.value)
        self._refused(action)
        return None

    def _owner(self, node: Node) -> Owner:
        if self.lookup.owns is None:
            return Owner.NOBODY
        own = self.lookup.owns(node.stat.version.replica_name, node.stat.size)
        return Owner.THIS_NODE if own else Owner.OTHER_NODE

    def keeps(self, node: Node) -> bool:
        """Whether it is one to keep here: peers keep what they own."""
        return self.keeps_foreign or self._owner(node) is not Owner.OTHER_NODE

    def _may_keep(self, node: Node) -> bool:
        """``keeps``, and a reason if it is not."""
        if not self.keeps(node):
            self.reasons.put(node.ino, Cause.FOREIGN, "the node that owns it keeps it")
            return False
        return True

    def _place(self, places: Sequence[tuple[Node, Place]]) -> list[Reservation | None]:
        """Journal what is about to lie in the tiers. All are None where that fails."""
        copies = [(node.ino, place.tier, node.stat.version.replica_name) for node, place in places]
        shared = [
            place.whole
            and node.stat.occupied_bytes >= node.stat.size
            and self._segments.takes(place.tier, node.stat.size)
            for node, place in places
        ]
        try:
            if files := [copy for copy, shares in zip(copies, shared, strict=True) if not shares]:
                self.index.replicas.begin_copies(files)
        except IndexWriteError as exc:
            for ino, _tier, _name in copies:
                self._handle(Abandoned(ino))
                self.reasons.put(ino, Cause.UNRECORDED, str(exc))
            return [None] * len(copies)
        reservations: list[Reservation | None] = []
        # Files of one tier wait for its removals together.
        after = {tier_id: self._removals.pending(tier_id) for _, tier_id, _ in copies}
        for (node, place), (ino, tier_id, name), shares in zip(places, copies, shared, strict=True):
            self._busy[ino] = name
            reservations.append(
                Reservation(
                    *(node, name, self.tiers[tier_id]),
                    whole=place.whole,
                    shares=shares,
                    after=after[tier_id],
                    reserved_bytes=place.reserved_bytes,
                )
            )
        return reservations

    def _resume(self, node: Node, record: Replica, evicts: bool) -> Reservation | None:
        """None where it cannot be recorded. Raises OSError of the tier, ReplicaLost among them."""
        tier = self.tiers[record.tier]
        after = self._removals.pending(tier.id)
        reservation = Reservation(node, record.name, tier, whole=False, after=after, resumed=record)
        reservation.fd = tier.files.open_part(record.name, record.size)
        try:
            # It grows from now on: after a crash its blocks have to be counted anew.
            self.index.replicas.begin_copy(node.ino, tier.id, record.name)
        except IndexWriteError as exc:
            reservation.close_now()
            self.reasons.put(node.ino, Cause.UNRECORDED, str(exc))
            return None
        owner = self._owner(node)
        self._handle(Resumed(node.ino, record.tier, record.allocated_bytes, evicts, owner))
        self._busy[node.ino] = record.name
        return reservation

    def grow(self, reservation: Reservation, size: int) -> bool:
        """``size`` bytes more for a partial replica; False where there is no room. How much of them
        a file with holes needs shows when they are written, and is asked for then."""
        if reservation.whole or (reservation.sparse and not reservation.tight):
            return True
        return self._grow(reservation, size)

    def _grow(self, reservation: Reservation, size: int) -> bool:
        self._tiers.measure()
        (action,) = self._handle(RoomWanted(reservation.node.ino, size))
        if not isinstance(action, Grant):
            assert isinstance(action, Refuse)
            self._refused(action)
            return False
        reservation.after += self._removals.pending(reservation.tier.id)
        reservation.reserved_bytes += size
        return True

    def _take(self, reservation: Reservation, size: int) -> bool:
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
        self.reasons.put(refusal.ino, cause, text, refusal.missing_bytes)
