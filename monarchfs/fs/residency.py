"""Where the bytes of a file are, and why, in words and in numbers. Answers from what is known."""

from __future__ import annotations

import time
from typing import Any

from monarchfs.cache.cache import Cache
from monarchfs.cache.reasons import Cause, Reason
from monarchfs.cache.usage import TierRoom
from monarchfs.metrics import NS
from monarchfs.prefetch.copier import Copier
from monarchfs.system.sizes import format_bytes, format_seconds
from monarchfs.types import Node, Replica, ReplicaState

MOST_TIERS = 4
"""A sentence names so many tiers at most."""


class Residency:
    """Constant: its parts."""

    def __init__(self, cache: Cache, copies: Copier) -> None:
        self._cache = cache
        self._copies = copies

    def state(self, ino: int) -> str:
        """One of resident, partial, copying, remote."""
        record = self._cache.accounts.state(ino)
        if record is not None and record.state is ReplicaState.RESIDENT:
            return "resident"
        if self._copies.jobs.copying(ino):
            return "copying"
        nonresident = self._copies.files.get(ino)
        local = record is not None or (nonresident is not None and nonresident.copy.partial)
        return "partial" if local else "remote"

    def tier(self, ino: int) -> str | None:
        """The path of the tier that has a replica, whole or partial."""
        record = self._cache.accounts.state(ino)
        return None if record is None else self._cache.tiers[record.tier].path

    def report(self, node: Node) -> dict[str, Any]:
        """All that is known, with the keys of ``why --json``. Takes long: it looks at the whole
        queue."""
        record, now_ns = self._cache.accounts.state(node.ino), time.time_ns()
        since_ns = (record.created_ns or None) if record is not None else None
        return {
            "state": self.state(node.ino),
            "cause": self.cause(node),
            "reason": self.sentence(node, exact=True),
            "tier": self.tier(node.ino),
            "since_unix_seconds": None if since_ns is None else since_ns / NS,
            "since_seconds_ago": None if since_ns is None else max(0, now_ns - since_ns) / NS,
            "size_bytes": node.stat.size,
            "local_bytes": self._local_bytes(node, record),
            "allocated_bytes": record.allocated_bytes if record is not None else 0,
            "mtime_unix_seconds": node.stat.mtime_ns / NS,
        }

    def cause(self, node: Node) -> str | None:
        """In two or three words, the same for all files of which the same is so; None where the
        file is resident."""
        state = self.state(node.ino)
        if state == "resident":
            return None if self._unreadable(node) is None else Cause.NO_TIER.value
        if state == "copying":
            return "being copied"
        if self._copies.jobs.get(node.ino).queued:
            return "queued"
        reason = self._reason(node)
        if reason is not None:
            return reason.cause.value
        if state == "partial":
            return "copied in part"
        return "not opened yet" if self._copies.jobs.keeps else "nothing is copied"

    def sentence(self, node: Node, *, exact: bool = False) -> str | None:
        """Why the file is not resident; None where it is. ``exact``: also how many files go before
        it, which has to look at the whole queue."""
        ino, state = node.ino, self.state(node.ino)
        if state == "resident":
            why = self._unreadable(node)
            return None if why is None else f"it is read from the source: {why}"
        if state == "copying":
            nonresident = self._copies.files.get(ino)
            done = 0 if nonresident is None else nonresident.copy.local_bytes
            return f"it is being copied: {_share(done, node.stat.size)}"
        job = self._copies.jobs.get(ino)
        if job.queued:
            before = self._copies.jobs.queue.position(job) if exact else None
            waits = "it waits to be copied" + ("" if before is None else f": {_before(before)}")
            if (slow := self._copies.governor.reason) is not None:
                waits += f"; copies give way to others, as {slow}"
            reason = self._cache.reasons.get(ino)
            return waits if reason is None else f"{waits}; before, {self._said(node, reason)}"
        reason = self._reason(node)
        if reason is not None:
            return self._said(node, reason)
        if state == "partial":
            kept = (
                "" if self._copies.jobs.keeps else " by a mount that copies (not --prefetch none)"
            )
            return f"it is copied in part; the rest follows when it is opened{kept}"
        if self._copies.jobs.keeps:
            return "not opened yet"
        return "nothing is copied (--prefetch none), but by monarchfs warm"

    def _reason(self, node: Node) -> Reason | None:
        reasons = self._cache.reasons
        return reasons.get(node.ino) or reasons.of_earlier_version(node)

    def _said(self, node: Node, reason: Reason) -> str:
        seconds = (time.time_ns() - reason.at_ns) / NS
        ago = f"{format_seconds(round(seconds))} ago" if seconds >= 1 else "just now"
        again = self._copies.jobs.retry_in(node.ino)
        then = "" if again is None else f"; it is tried again in {format_seconds(round(again))}"
        match reason.cause:
            case Cause.NO_ROOM if reason.missing_bytes:
                return self._no_room(node, reason, ago)
            case Cause.NO_TIER:
                return self._no_tier(reason, ago)
            case Cause.CHANGED if self._cache.reasons.get(node.ino) is None:
                return f"not opened yet since the version before changed while it was copied, {ago}"
        return f"{reason.text} ({ago}{then})"

    def _no_room(self, node: Node, reason: Reason, ago: str) -> str:
        record = self._cache.accounts.state(node.ino)
        local = self._local_bytes(node, record)
        need, rooms = self._cache.usage.room_for(_rest(node, record, local))
        # A part grows step by step: what the last step lacked says nothing of the rest.
        short = "" if local else f"{format_bytes(reason.missing_bytes)} short"
        if any(room.takes(need) for room in rooms):
            when = f"{short}, {ago}" if short else ago
            return (
                f"no room when it was wanted ({when}); there is now: it is copied when it"
                " is opened or warmed next"
            )
        what = "no room for the rest of it" if local else "no room"
        then = f", {short} when it was wanted" if short else ""
        left = ", ".join(_left(room) for room in rooms[:MOST_TIERS])
        return f"{what}: it needs {format_bytes(need)}{then}; {left}"

    def _no_tier(self, reason: Reason, ago: str) -> str:
        rooms = self._cache.usage.room_for(0)[1]
        if any(room.out_of_service is None for room in rooms):
            return f"{reason.text} when it was wanted, {ago}; it is copied when it is opened next"
        tiers = "; ".join(f"{room.path}: {room.out_of_service}" for room in rooms[:MOST_TIERS])
        return f"{reason.text}: {tiers}" if tiers else reason.text

    def _unreadable(self, node: Node) -> str | None:
        record = self._cache.accounts.state(node.ino)
        if record is None:
            return None
        why = self._cache.usage.out_of_reach(record.tier)
        return None if why is None else f"{self._cache.tiers[record.tier].path}: {why}"

    def _local_bytes(self, node: Node, record: Replica | None) -> int:
        nonresident = self._copies.files.get(node.ino)
        if record is not None and record.state is ReplicaState.RESIDENT:
            return node.stat.size
        if nonresident is not None and nonresident.copy.local_bytes:
            return nonresident.copy.local_bytes
        if record is None or record.state is not ReplicaState.PARTIAL:
            return 0
        return self._cache.index.replicas.present_bytes(node.ino)


def _rest(node: Node, record: Replica | None, local: int) -> int:
    """What a copy may still need: of a file with holes what they leave, as far as is known."""
    size, expected = node.stat.size, node.stat.occupied_bytes
    held = 0 if record is None else record.allocated_bytes
    return expected - held if held < expected < size else size - local


def _left(room: TierRoom) -> str:
    if room.out_of_service is not None:
        return f"{room.path} takes nothing ({room.out_of_service})"
    left = f"{format_bytes(max(0, room.room.bytes))} of {format_bytes(room.capacity_bytes)}"
    others = ", as its file system keeps the rest free for others" if room.room.for_others else ""
    return f"{room.path} has {left} left{others}"


def _share(done: int, size: int) -> str:
    share = f" ({100 * done // size}%)" if size else ""
    return f"{format_bytes(done)} of {format_bytes(size)}{share}"


def _before(count: int) -> str:
    match count:
        case 0:
            return "it is the next"
        case 1:
            return "1 file goes before it"
        case _:
            return f"{count:,} files go before it"
