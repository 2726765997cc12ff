"""What a worker opens when it begins: its index, its tiers, the counts of the worker before."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace

from monarchfs.config.model import Config, DataPath, PrefetchMode
from monarchfs.fuse.datapath import ResidentReplicas, kernel_reads
from monarchfs.fuse.mountinfo import RENUMBERING, type_of_device
from monarchfs.index import Index, OnChange, set_aside
from monarchfs.index.recovery import INDEX_DIRECTORY
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
    """The configuration of safe mode, for a mount whose workers died again and again."""
    return replace(
        config,
        tiers=(),
        prefetch=PrefetchMode.NONE,
        prefetch_list=None,
        index_file=None,
        scrub_bytes_per_second=0,
        touch_source_seconds=0.0,
        window=0,
    )


def free_opens(config: Config) -> bool:
    """Whether the kernel may open files without asking. This is the same for all workers of a
    mount, because the kernel does not begin to ask again. It may not if each open has to be known:
    to the source, to a recording, or to a policy that goes by use, because files in the kernel's
    memory are used unseen."""
    return (
        config.freshness.mode is FreshnessMode.IMMUTABLE
        and config.evict is EvictionPolicy.KEEP
        and not config.touch_source_seconds
        and config.data_path is not DataPath.DIRECT
    )


def reads_by_kernel(config: Config, index: Index, *, passes: bool) -> bool:
    """Whether the kernel reads resident files itself; ``passes``: it is able to. Decided once for a
    mount, because the kernel goes by the first answer to an open."""
    totals = index.tier_totals().values()
    dataset = ResidentReplicas(
        sum(tier.resident for tier in totals), sum(tier.allocated_bytes for tier in totals)
    )
    if config.data_path is DataPath.DIRECT:
        return False
    return passes and (
        config.data_path is DataPath.PASSTHROUGH
        or kernel_reads(dataset, free_opens=free_opens(config))
    )


def forget_earlier_mounts(bootstrap: Bootstrap, state_dir: str) -> None:
    """For the first worker of a mount, before it opens anything: removes index and copies where
    the source gives files other inode numbers each time that it is mounted. A number, size and
    times would tell nothing there: they may be another file's by now. Raises OSError."""
    fstype = type_of_device(bootstrap.source_root[0]) if bootstrap.source_root else ""
    if fstype not in RENUMBERING:
        return
    left = [os.path.join(state_dir, INDEX_DIRECTORY)]
    for fd in bootstrap.tier_fds:
        # The supervisor has the owner's file locked.
        left += [f"/proc/self/fd/{fd}/{name}" for name in os.listdir(fd) if name != "owner"]
    left = [path for path in left if os.path.lexists(path)]
    for path in left:
        shutil.rmtree(path)
    if left:
        log.warning("%s gives files other inode numbers: copies of earlier mounts are gone", fstype)


def open_index(config: Config, state_dir: str, root_ino: int, on_change: OnChange) -> Index:
    """Open the index. One that cannot be used is set aside, and a new one is made. ``root_ino`` is
    the inode number of the source's root directory."""
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
    # The commits of a killed process are complete in the page cache, so its index is sound.
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
    """Raises OperationError if something in it is not ours."""
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
    """Goes on from the counts of the worker before."""
    kept = PersistentCounts(descriptor, parts)
    try:
        kept.restore()
    except ValueError as error:
        log.warning("counting from 0 again: %s", error)
    return kept


def boot_id() -> bytes:
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read().strip()
