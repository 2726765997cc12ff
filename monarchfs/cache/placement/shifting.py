"""Replicas that go to another tier, and what goes where a tier has to shrink."""

from __future__ import annotations

from monarchfs.cache.placement.events import Action, EvictionReason, Owner
from monarchfs.cache.placement.ledger import BLOCK_BYTES, Ledger, reservation
from monarchfs.cache.placement.policies import Policy
from monarchfs.cache.placement.traffic import Traffic
from monarchfs.cache.placement.victims import Budget, Victim, Victims

DEMOTE_SHARE = 4
"""Where a tier has to give up more than one part in so many, there is no time for moving."""

SWAP_EXAMINED = 10
"""So many of the coldest replicas are looked at for one to change places with."""


class Shifting:
    """Promotion, demotion and pressure. Has no state of its own."""

    def __init__(
        self, ledgers: dict[int, Ledger], policy: Policy, traffic: Traffic, victims: Victims
    ) -> None:
        """``ledgers`` by tier, fastest first."""
        self._ledgers = ledgers
        self._policy = policy
        self._traffic = traffic
        self._victims = victims

    def accessed(self, ino: int, tier: int) -> list[Action]:
        """A replica that was opened moves up if a faster tier has room for it.

        Else it takes the place of the coldest replica in the fastest tier, if it ``outranks`` that
        one. By time: if that one was not opened since this one's previous open. A single open is
        no reason."""
        last_access = self._policy.last_access(tier, ino)
        self._policy.accessed(tier, ino)
        return self._promote(ino, tier, last_access)

    def _promote(self, ino: int, tier: int, last_access: int) -> list[Action]:
        if not self._traffic.free_moves or not self._ledgers[tier].usable:
            return []
        faster = self._faster(tier)
        # Checked first because it is cheapest: usually the faster tiers are full.
        if not faster or not (last_access or any(self._takes(to, BLOCK_BYTES) for to in faster)):
            return []
        allocated_bytes = self._victims.allocated_bytes(ino, tier)
        if allocated_bytes is None or self._traffic.busy(ino, tier) or self._traffic.awaited(ino):
            return []
        for to in faster:
            if self._takes(to, reservation(allocated_bytes)):
                return [self._traffic.move(ino, tier, to, allocated_bytes)]
        if not last_access:
            return []
        return self._swap(
            Victim(ino, allocated_bytes, EvictionReason.POLICY), tier, faster[0], last_access
        )

    def _swap(self, hot: Victim, tier: int, to: int, last_access: int) -> list[Action]:
        ledger = self._ledgers[to]
        need = reservation(hot.allocated_bytes)
        outdated = self._victims.enough(
            to, ledger, need, 1, None, Owner.NOBODY, Budget(SWAP_EXAMINED)
        )
        if outdated is not None:
            return self._replace(outdated, hot, tier, to)
        cold = self._victims.coldest(to, Budget(SWAP_EXAMINED))
        if cold is None or not self._policy.outranks(hot.ino, last_access, cold.ino, to):
            return []
        victims = list(self._victims.outdated(to, Budget(SWAP_EXAMINED)))
        if all(victim.ino != cold.ino for victim in victims):
            victims.append(cold)
        room = ledger.room_bytes() + sum(victim.allocated_bytes for victim in victims)
        if room < need or ledger.room_inodes() < 0:
            return []
        below = self._below(to, cold)
        lighter: list[Victim] | None = []
        if below is None and self._policy.selective:
            below, lighter = tier, self._lighter(cold, tier)
        if below is None or lighter is None or len(victims) > 1:
            return self._replace(victims, hot, tier, to)
        # The other one follows when this one has made room.
        then = (hot.ino, tier)
        return [
            *(self._traffic.evict(below, victim) for victim in lighter),
            self._traffic.move(cold.ino, to, below, cold.allocated_bytes, then),
        ]

    def _lighter(self, cold: Victim, tier: int) -> list[Victim] | None:
        """What goes from a slower tier rather than a replica that leaves a faster one."""
        need, budget = reservation(cold.allocated_bytes), Budget(SWAP_EXAMINED)
        return self._victims.enough(
            tier, self._ledgers[tier], need, 1, cold.ino, Owner.NOBODY, budget
        )

    def _replace(self, victims: list[Victim], hot: Victim, tier: int, to: int) -> list[Action]:
        return [
            *(self._traffic.evict(to, victim) for victim in victims),
            self._traffic.move(hot.ino, tier, to, hot.allocated_bytes),
        ]

    def moved(self, ino: int, allocated_bytes: int) -> list[Action]:
        move = self._traffic.moved(ino, allocated_bytes)
        return [] if move.then is None else self._promote(*move.then, last_access=0)

    def failed(self, ino: int) -> list[Action]:
        move = self._traffic.move_failed(ino)
        if move.dropped or move.to in self._faster(move.tier):
            return []
        # It was moved because its tier has to shrink, and the tier still has to.
        return self.relieve(move.tier, demote=False)

    def relieve(self, tier: int, demote: bool) -> list[Action]:
        """Evict or move replicas at rest until the tier keeps its promises, or none is left."""
        ledger = self._ledgers[tier]
        if not ledger.usable or not _excessive(ledger):
            return []
        demote = demote and ledger.excess_bytes() <= ledger.capacity_bytes // DEMOTE_SHARE
        actions: list[Action] = []
        for victim in self._victims.for_pressure(tier, Budget()):
            if not victim.allocated_bytes and ledger.excess_files() <= 0:
                continue
            below = None
            if demote and self._traffic.free_moves and victim.reason is EvictionReason.PRESSURE:
                below = self._below(tier, victim)
            if below is None:
                actions.append(self._traffic.evict(tier, victim))
            else:
                actions.append(self._traffic.move(victim.ino, tier, below, victim.allocated_bytes))
            if not _excessive(ledger):
                break
        return actions

    def _faster(self, tier: int) -> list[int]:
        """The usable tiers above that one, fastest first."""
        faster = []
        for at, ledger in self._ledgers.items():
            if at == tier:
                break
            if ledger.usable:
                faster.append(at)
        return faster

    def _below(self, tier: int, victim: Victim) -> int | None:
        """The next slower tier that has room for the replica."""
        tiers = list(self._ledgers)
        for to in tiers[tiers.index(tier) + 1 :]:
            if self._takes(to, reservation(victim.allocated_bytes)):
                return to
        return None

    def _takes(self, tier: int, need_bytes: int) -> bool:
        ledger = self._ledgers[tier]
        return ledger.usable and ledger.takes(need_bytes)


def _excessive(ledger: Ledger) -> bool:
    return ledger.excess_bytes() > 0 or ledger.excess_files() > 0
