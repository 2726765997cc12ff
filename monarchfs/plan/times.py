"""Estimates of how long reads take, at measured rates, without the job's own computing and the page
cache. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monarchfs.plan.fitting import Amount

RELAY_BYTES_PER_SECOND = 2.0e9
RELAY_FILES_PER_SECOND = 6000.0
COPY_FILES_PER_SECOND = 2000.0
"""What one mount relays and copies if nothing else limits it, on the machine of README.md. Copying
10,000 files of 16 KiB took 0.46 ms each, and 0.84 ms on a busy machine."""


@dataclass(frozen=True, slots=True)
class SourceSpeed:
    """``bytes_per_second`` is that of all ``threads`` together, ``open_seconds`` that of one."""

    bytes_per_second: float
    open_seconds: float
    threads: int

    def seconds(self, amount: Amount) -> float:
        """The seconds to read it all, file by file, with that many threads."""
        opening = amount.files * self.open_seconds / self.threads
        return amount.bytes / self.bytes_per_second + opening


@dataclass(frozen=True, slots=True)
class TierSpeed:
    write_bytes_per_second: float
    read_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Work:
    """``new`` files are copied, to each tier those in ``new_in_tier``. ``cached`` files are local
    already, in each tier those in ``cached_in_tier``. ``remote`` is read from the source in every
    epoch."""

    new: Amount
    cached: Amount
    remote: Amount
    new_in_tier: Sequence[Amount]
    cached_in_tier: Sequence[Amount]


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


def times(work: Work, source: SourceSpeed, tiers: Sequence[TierSpeed]) -> Times:
    everything = total(work.new, work.cached, work.remote)
    writing = sum(
        amount.bytes / tier.write_bytes_per_second
        for amount, tier in zip(work.new_in_tier, tiers, strict=True)
    )
    fill = max(source.seconds(work.new), writing, work.new.files / COPY_FILES_PER_SECOND)
    remote = _relayed(work.remote, source.seconds(work.remote))
    cached = _local(work.cached_in_tier, tiers)
    resident = [total(*both) for both in zip(work.new_in_tier, work.cached_in_tier, strict=True)]
    return Times(
        fill=fill,
        plain_epoch=source.seconds(everything),
        first_epoch=fill + cached + remote,
        later_epoch=_local(resident, tiers) + remote,
    )


def total(*amounts: Amount) -> Amount:
    return Amount(sum(a.files for a in amounts), sum(a.bytes for a in amounts))


def _local(amounts: Sequence[Amount], tiers: Sequence[TierSpeed]) -> float:
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
