"""What a worker opens when it begins: its index, its tiers, the counts of the worker before."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace

from monarchfs.config.model import Config, DataPath, PrefetchMode
from monarchfs.fuse.datapath import ResidentReplicas, kernel_reads
from monarchfs.index import Index, OnChange, set_aside
from monarchfs.metrics.persistent import PersistentCounts
from monarchfs.store.tier import Tier
from monarchfs.types import (
    ROOT_INO,
    EvictionPolicy,
    FreshnessMode,
    IndexUnusable,
    OperationError,
    TierSize,
)
from monarchfs.worker.bootstrap import Bootstrap

log = logging.getLogger(__name__)


def safe(config: Config) -> Config:
    """What is left of a mount whose workers died and died: the source."""
    return replace(
        config,
        tiers=(),
        prefetch=PrefetchMode.NONE,
        prefetch_list=None,
        index_file=None,
        scrub_bytes_per_second=0,
        touch_source_seconds=0.0,
    )


def free_opens(config: Config) -> bool:
    """Whether the kernel may open files without asking: the same for all workers of a mount, as it
    does not begin to ask again. Not where somebody has to hear of each open: the source, or who
    goes by what was used, as files that the kernel has in memory are used unseen."""
    return (
        config.freshness.mode is FreshnessMode.IMMUTABLE
        and config.evict is EvictionPolicy.KEEP
        and not config.touch_source_seconds
    )


def reads_by_kernel(config: Config, index: Index, *, passes: bool) -> bool:
    """Whether resident files are for the kernel to read; ``passes``: it may come to that. To be
    decided once a mount: the kernel goes by the first answer to an open."""
    totals = index.tier_totals().values()
    dataset = ResidentReplicas(
        sum(tier.resident for tier in totals), sum(tier.allocated_bytes for tier in totals)
    )
    return passes and (
        config.data_path is DataPath.PASSTHROUGH
        or kernel_reads(dataset, free_opens=free_opens(config))
    )


def open_index(config: Config, state_dir: str, root_ino: int, on_change: OnChange) -> Index:
    """The index; one that cannot be used is set aside and a new one made. ``root_ino`` is that of
    the source's root directory."""
    try:
        return _open_index_of_root(config, state_dir, root_ino, on_change)
    except IndexUnusable as exc:
        aside = set_aside(state_dir)
        told = f"{exc}: kept as {aside}, starting with an empty one"
        log.warning("%s", told.replace(state_dir, config.state_dir))
        return _open_index_of_root(config, state_dir, root_ino, on_change)


def _open_index_of_root(
    config: Config, state_dir: str, root_ino: int, on_change: OnChange
) -> Index:
    # A commit that a killed process made is in the page cache, whole: that index is sound.
    index = Index.open(
        state_dir, source_id=config.dataset_id, trust_after_kill=True, on_change=on_change
    )
    try:
        known = index.node(ROOT_INO)
        if known is not None and known.stat is not None and known.stat.ino != root_ino:
            raise IndexUnusable("the index is of another source: its root is another directory")
    except IndexUnusable:
        index.close(clean=False)
        raise
    return index


def open_tiers(config: Config, bootstrap: Bootstrap, index: Index) -> list[tuple[Tier, TierSize]]:
    """Raises OperationError for one in which something lies that is not ours."""
    return [
        (
            _open_tier(
                *(fd, spec.path, index.tier_number(spec.path)),
                os.path.join(spec.path, spec.directory),
            ),
            spec.size,
        )
        for spec, fd in zip(config.tiers, bootstrap.tier_fds, strict=not bootstrap.safe)
    ]


def _open_tier(fd: int, path: str, number: int, directory: str) -> Tier:
    try:
        return Tier(fd, path, number, directory=directory)
    except OSError as exc:
        place = os.path.normpath(os.path.join(directory, exc.filename or ""))
        raise OperationError(
            f"tier {path}: {place}: {exc.strerror}: remove it, or name another --tier"
        ) from None


def keep_counts(descriptor: int | None, parts: Mapping[str, object]) -> PersistentCounts:
    """Goes on from what the worker before has counted."""
    kept = PersistentCounts(descriptor, parts)
    try:
        kept.restore()
    except ValueError as error:
        log.warning("counting from 0 again: %s", error)
    return kept


def boot_id() -> bytes:
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read().strip()
