"""Estimates: how long reads take, at measured rates, without the job's own computing and the page
cache; and what nodes that share a dataset keep of it, and read from where. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarchfs.insight.fitting import Amount, total

RELAY_BYTES_PER_SECOND = 2.0e9
RELAY_FILES_PER_SECOND = 6000.0
COPY_FILES_PER_SECOND = 2000.0
"""What one mount relays and copies if nothing else limits it, on the machine of README.md. Copying
10,000 files of 16 KiB took 0.46 ms each, and 0.84 ms on a busy machine."""


@dataclass(frozen=True, slots=True)
class SourceRates:
    """``read_bytes_per_second`` of all ``threads`` together, ``open_seconds`` of one open with the
    first read and the close (the median), ``sampled_bytes`` that were read. None if nothing could
    be measured."""

    read_bytes_per_second: float | None
    open_seconds: float | None
    threads: int
    sampled_bytes: int = 0
    sampled_files: int = 0

    def seconds(self, amount: Amount) -> float:
        """The seconds to read it all, file by file, with that many threads."""
        assert self.open_seconds is not None
        assert self.read_bytes_per_second is not None
        opening = amount.files * self.open_seconds / self.threads
        return amount.bytes / self.read_bytes_per_second + opening


@dataclass(frozen=True, slots=True)
class TierRates:
    """Of one stream; writing includes bringing it to the disk."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    sampled_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds. ``fill`` is the time that ``--prefetch all`` takes without readers."""

    fill: float
    plain_epoch: float
    first_epoch: float
    later_epoch: float

    def total(self, epochs: int) -> float:
        return self.first_epoch + (epochs - 1) * self.later_epoch

    def plain_total(self, epochs: int) -> float:
        return epochs * self.plain_epoch

    @property
    def pays_from_epoch(self) -> int | None:
        """The first epoch at whose end less time has passed than without a mount; None if never."""
        won = self.plain_epoch - self.later_epoch
        lost = self.first_epoch - self.plain_epoch
        if lost < 0:
            return 1
        return None if won <= 0 else 2 + int(lost / won)


def times(
    new_in_tier: Sequence[Amount],
    cached_in_tier: Sequence[Amount],
    remote: Amount,
    source: SourceRates,
    tiers: Sequence[TierRates],
) -> Times:
    """New files are copied into the tiers, cached ones are local already, and ``remote`` is read
    from the source in every epoch. ``source`` could be measured."""
    new = total(*new_in_tier)
    writing = sum(
        amount.bytes / tier.write_bytes_per_second
        for amount, tier in zip(new_in_tier, tiers, strict=True)
    )
    fill = max(source.seconds(new), writing, new.files / COPY_FILES_PER_SECOND)
    relayed = _relayed(remote, source.seconds(remote))
    resident = [total(*both) for both in zip(new_in_tier, cached_in_tier, strict=True)]
    return Times(
        fill=fill,
        plain_epoch=source.seconds(total(new, *cached_in_tier, remote)),
        first_epoch=fill + _local(cached_in_tier, tiers) + relayed,
        later_epoch=_local(resident, tiers) + relayed,
    )


def _local(amounts: Sequence[Amount], tiers: Sequence[TierRates]) -> float:
    reading = sum(
        amount.bytes / tier.read_bytes_per_second
        for amount, tier in zip(amounts, tiers, strict=True)
    )
    return _relayed(total(*amounts), reading)


def _relayed(amount: Amount, seconds: float) -> float:
    """``seconds``, or the time to relay it through the mount, if that is more."""
    return max(
        seconds, amount.bytes / RELAY_BYTES_PER_SECOND, amount.files / RELAY_FILES_PER_SECOND
    )


def plan_sharing(
    dataset_bytes: int, room_bytes: int, nodes: int, *, own_first: bool, keeps_foreign: bool
) -> dict[str, Any]:
    """What each node keeps of its own files and of others', and what is read in an epoch, in which
    each node reads the dataset once: of the source by all nodes, and what each gets from others.
    The keys are those of ``--json``.

    ``room_bytes``: how much of the dataset each node can keep; all are alike, and own as much.
    ``own_first``: a node's own files push out others' (else whatever comes first stays)."""
    room = min(room_bytes, dataset_bytes)
    share = dataset_bytes / nodes
    if not keeps_foreign:
        own, foreign = min(share, room), 0.0
    elif own_first:
        own = min(share, room)
        foreign = room - own
    else:
        own = room / nodes
        foreign = room - own
    owned = own / share if share else 1.0  # how much of what is owned its owner has
    had_elsewhere = owned * (dataset_bytes - share)
    # What its owner does not keep is read from the source by each node that does not keep it.
    unowned = (1 - owned) * dataset_bytes
    kept_unowned = max(0.0, foreign - had_elsewhere) if own_first else foreign * (1 - owned)
    network = max(0.0, had_elsewhere - (foreign - kept_unowned))
    fits = "all together" if nodes * room >= dataset_bytes else "nowhere"
    return {
        "fits": "each node" if room >= dataset_bytes else fits,
        "own_bytes": round(own),
        "foreign_bytes": round(foreign),
        "first_epoch": {
            "source_bytes": round(owned * dataset_bytes + nodes * unowned),
            "network_bytes": round(had_elsewhere),
        },
        "later_epoch": {
            "source_bytes": round(nodes * (unowned - kept_unowned)),
            "network_bytes": round(network),
        },
    }
