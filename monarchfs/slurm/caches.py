"""The caches of shares: how much room each has on this node, and which go if that is too little.

A cache stays when its share is unmounted, for the next job. ``cache.json`` beside its state
directory is root's and says where it lies; copies and index are the user's.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from monarchfs.config.model import TierSpec, User
from monarchfs.config.places import ROOT_CACHE_DIR
from monarchfs.slurm.records import (
    locked,
    make_directory,
    names_in,
    read_record,
    remove_directory,
    unlink,
    write_record,
)
from monarchfs.slurm.shares import Share, record_of, share_key
from monarchfs.slurm.site import Site
from monarchfs.supervisor.directories import in_use, tree_size
from monarchfs.system.locks import Busy
from monarchfs.system.sizes import format_bytes
from monarchfs.types import OperationError, TierSize

_LEAST_BYTES = 16 << 20
"""A mount with less room than that would help nobody."""
_TRASH = ".trash-"
_BUDGET_LOCK = "budget"
_MEASURE_SECONDS = 2.0
"""For how long, at most, a prolog measures the caches of others."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheShare:
    """A cache by its share's key. ``granted`` and ``used`` are bytes in those of the site's tiers
    in which it has a directory of that name. ``used``: None if unknown; what was granted counts."""

    key: str
    source: str
    uid: int
    user: str
    granted: Mapping[str, int]
    used: Mapping[str, int] | None
    last_used: float

    def bytes_in(self, tier: str) -> int:
        return (self.granted if self.used is None else self.used).get(tier, 0)


def _record_path(site: Site, key: str) -> str:
    return os.path.join(site.cache(key), "cache.json")


def read_cache(site: Site, key: str) -> CacheShare | None:
    """What is recorded of a cache; None if that makes no sense."""
    record = read_record(_record_path(site, key))
    try:
        if record is None or share_key_of(record) != key:
            return None
        granted = {str(path): int(count) for path, count in record["granted"].items()}
        used = record.get("used")
        if used is not None:
            used = {path: int(used.get(path, 0)) for path in granted}
        return CacheShare(
            key,
            str(record["source"]),
            int(record["uid"]),
            str(record["user"]),
            granted,
            used,
            float(record["last_used_unix_seconds"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def share_key_of(record: Mapping[str, Any]) -> str:
    """The key that a record of a share or cache belongs to."""
    user = User(
        str(record["user"]), int(record["uid"]), int(record["gid"]), tuple(record["groups"])
    )
    return share_key(str(record["source"]), user)


def all_caches(site: Site) -> list[CacheShare]:
    found = (read_cache(site, key) for key in names_in(site.caches))
    return [cache for cache in found if cache is not None]


def open_cache(share: Share, source: str, user: User, deadline: float) -> list[str]:
    """Makes room for a share that is about to be mounted, and records that; the tiers as for mount,
    PATH=SIZE. The share's record must exist (its lock is held): mounted shares, and those about to
    be, keep what they were granted.

    Raises OperationError if mounted shares have used up the budget, or if others make room until
    ``deadline`` (time.monotonic).
    """
    site = share.site
    if site.budget:
        measure(site, min(_MEASURE_SECONDS, (deadline - time.monotonic()) / 3))
    make_directory(share.cache, 0o711)
    for tier in site.tiers:
        make_directory(tier.path, 0o755)
        if tier.path != ROOT_CACHE_DIR and os.stat(tier.path).st_dev == os.stat("/").st_dev:
            log.warning(
                "tier %s shares its file system with /: mount the disk that was meant", tier.path
            )
    used_now = {"used": None, "last_used_unix_seconds": time.time()}
    with locked(site.lock(_BUDGET_LOCK), deadline):
        granted = {tier.path: _grant(site, share.key, tier) for tier in site.tiers}
        record = {**record_of(source, user), **used_now, "granted": granted}
        write_record(_record_path(site, share.key), record)
    for tier in site.tiers:
        make_directory(os.path.join(tier.path, share.key), 0o755)
    return [
        f"{os.path.join(tier.path, share.key)}="
        + (str(granted[tier.path]) if tier.path in site.budget else _size(tier.size))
        for tier in site.tiers
    ]


def close_cache(site: Site, key: str, status: Mapping[str, Any] | None) -> None:
    """Records what an unmounted share's cache holds, by its last status: what the user's worker
    says, so it is never more than was granted, and others lose nothing by it."""
    path = _record_path(site, key)
    record = read_record(path)
    if record is None:
        return
    granted = record.get("granted", {})
    used: dict[str, int] | None
    try:
        tiers = (status or {})["tiers"]
        said = {os.path.dirname(tier["path"]): int(tier["used_bytes"]) for tier in tiers}
        used = {path: min(max(0, count), granted[path]) for path, count in said.items()}
    except (KeyError, TypeError, ValueError, OverflowError):
        used = None
    if used is not None and set(used) != set(granted):
        used = None
    write_record(path, {**record, "used": used, "last_used_unix_seconds": time.time()})


def measure(site: Site, seconds: float) -> None:
    """Measures the unmounted caches whose size is unknown, for so long at most, and records it of
    those that it has measured whole. Without the budget's lock, which others wait for."""
    until = time.monotonic() + seconds
    for cache in all_caches(site):
        share = Share(site, cache.key)
        if cache.used is not None or share.record():
            continue
        sizes = {
            tier: tree_size(os.path.join(tier, cache.key), until - time.monotonic())
            for tier in cache.granted
        }
        if not all(size.whole for size in sizes.values()):
            continue
        with suppress(OperationError, OSError), locked(share.lock, 0.0):
            path = _record_path(site, cache.key)
            # Unless a job has used it meanwhile.
            if (record := read_record(path)) and read_cache(site, cache.key) == cache:
                used = {tier: size.bytes for tier, size in sizes.items()}
                write_record(path, {**record, "used": used})


def throw_away(site: Site, cache: CacheShare) -> None:
    """Takes a cache out of use at once; it is removed later (`trash_in`). To be called with the
    share's lock held, and nothing mounted."""
    for directory in [*cache.granted, site.caches]:
        target = os.path.join(directory, f"{_TRASH}{cache.key}-{secrets.token_hex(4)}")
        try:
            os.rename(os.path.join(directory, cache.key), target)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.error("cannot remove the cache in %s: %s", directory, error.strerror)


def trash_in(site: Site) -> list[str]:
    """What waits to be removed."""
    directories = dict.fromkeys([*(tier.path for tier in site.tiers), site.caches])
    return [
        os.path.join(directory, name)
        for directory in directories
        for name in names_in(directory, hidden=True)
        if name.startswith(_TRASH)
    ]


def budget_bytes(site: Site, tier: str) -> int | None:
    """What all caches together may have in a tier, None without a limit."""
    spec = site.budget.get(tier)
    return None if spec is None else size_in_bytes(spec.path, spec.size)


def size_in_bytes(path: str, size: TierSize) -> int:
    """A size of the file system that ``path`` lies on."""
    st = os.statvfs(path)
    return size.resolve(st.f_blocks * st.f_frsize)


def usage_of(site: Site, tier: str, *, but: str = "") -> tuple[int, dict[str, tuple[float, int]]]:
    """The bytes of a tier that mounted caches were granted; and, of each unmounted one, when it was
    last used and its bytes there. ``but``: a cache that does not count."""
    held, resting = 0, {}
    for cache in all_caches(site):
        if cache.key == but or tier not in cache.granted:
            continue
        if Share(site, cache.key).record():
            held += cache.granted[tier]
        else:
            resting[cache.key] = (cache.last_used, cache.bytes_in(tier))
    return held, resting


def over_budget(
    budget: int, held: int, resting: Mapping[str, tuple[float, int]], wanted: int
) -> list[str]:
    """Which unmounted caches have to go so that ``wanted`` more bytes fit into ``budget`` beside
    the ``held`` ones of mounted caches: the least recently used first. ``resting``: when each was
    last used, and its bytes. Pure."""
    excess = held + wanted + sum(size for _, size in resting.values()) - budget
    chosen = []
    for key, (_, size) in sorted(resting.items(), key=lambda item: item[1]):
        if excess <= 0:
            break
        if size > 0:
            chosen.append(key)
            excess -= size
    return chosen


def _grant(site: Site, key: str, tier: TierSpec) -> int:
    """How much of a tier a share gets; unmounted caches of others make room."""
    wanted = size_in_bytes(tier.path, tier.size)
    budget = budget_bytes(site, tier.path)
    if budget is None:
        return wanted
    held, resting = usage_of(site, tier.path, but=key)
    granted = min(wanted, budget - held)
    if granted < min(_LEAST_BYTES, wanted):
        raise OperationError(
            f"the caches of {tier.path} have a budget of {format_bytes(budget)}, which what is"
            " mounted now has used up"
        )
    for other in over_budget(budget, held, resting, granted):
        discard(site, other, "to make room for another")
    return granted


def discard(site: Site, key: str, why: str) -> bool:
    """Throws away a cache that no share uses; whether it could be."""
    share = Share(site, key)
    with suppress(Busy), locked(share.lock, 0.0):
        cache = read_cache(site, key)
        state = os.path.join(share.cache, "state")
        if cache is None or share.record() or share.jobs() or in_use(state):
            return False
        log.info("removing the cache of %s of %s (%s)", cache.source, cache.user, why)
        throw_away(site, cache)
        return True
    return False


def _size(size: TierSize) -> str:
    return f"{size.percent:g}%" if size.percent is not None else str(size.bytes)


def remove_empty_cache(site: Site, key: str) -> None:
    """Takes back what `open_cache` made for a mount that failed, if it holds nothing."""
    cache = read_cache(site, key)
    if cache is None or os.path.lexists(os.path.join(site.cache(key), "state")):
        return
    for tier in cache.granted:
        remove_directory(os.path.join(tier, key))
    unlink(_record_path(site, key))
    remove_directory(site.cache(key))
