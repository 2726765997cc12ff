"""What a worker opens when it begins: its index, its tiers, the counts of the worker before."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from monarchfs.cache.index import Index, OnChange, set_aside
from monarchfs.cache.index.recovery import INDEX_DIRECTORY
from monarchfs.cache.store.tier import Tier
from monarchfs.config.model import Config, DataPath, PrefetchMode
from monarchfs.fuse.mountinfo import RENUMBERING, is_user_space, type_of_device
from monarchfs.fuse.passthrough import kernel_reads
from monarchfs.metrics.persistent import PersistentCounts
from monarchfs.source.posix import PosixSource
from monarchfs.types import (
    ROOT_INO,
    EvictionPolicy,
    FreshnessMode,
    IndexUnusable,
    OperationError,
    SourceChanged,
    TierSize,
)
from monarchfs.worker.bootstrap import Bootstrap

SAMPLE = 8
"""So many files with copies are looked up to see whether the source keeps its inode numbers."""

_COPIES = re.compile("[0-9a-f]{2}|parts|segments")
"""Directories of a tier. Anything else there is somebody else's (docs/FORMATS.md)."""

log = logging.getLogger(__name__)


def safe(config: Config) -> Config:
    """The configuration of safe mode, for a mount whose workers died again and again."""
    return replace(
        config,
        tiers=(),
        prefetch=PrefetchMode.NONE,
        prefetch_list=None,
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
    totals = index.replicas.tier_totals().values()
    files = sum(tier.resident for tier in totals)
    size = sum(tier.allocated_bytes for tier in totals)
    if config.data_path is DataPath.DIRECT:
        return False
    return passes and (
        config.data_path is DataPath.PASSTHROUGH
        or kernel_reads(files, size, free_opens=free_opens(config))
    )


def forget_earlier_mounts(
    bootstrap: Bootstrap, state_dir: str, index: Index, source: PosixSource
) -> bool:
    """For the first worker of a mount, before it opens a tier. Where the source gives files other
    inode numbers each time that it is mounted, number, size and times tell nothing: they may be
    another file's by now. Removes what lies in the tiers then, closes the index and removes it.
    True if the index has to be opened again. Raises OSError."""
    fstype = type_of_device(bootstrap.source_root[0])
    if not is_user_space(fstype) or (fstype not in RENUMBERING and _numbers_stay(index, source)):
        return False
    left = [
        f"/proc/self/fd/{fd}/{entry.name}"
        for fd in bootstrap.fds.tiers
        for entry in os.scandir(fd)
        if _COPIES.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    ]
    if not left and next(index.replicas.all(), None) is None:
        return False
    index.close()
    for path in (*left, os.path.join(state_dir, INDEX_DIRECTORY)):
        shutil.rmtree(path)
    log.warning("%s gives files other inode numbers: copies of earlier mounts are gone", fstype)
    return True


def _numbers_stay(index: Index, source: PosixSource) -> bool:
    """Whether most of some files with copies have the inode number that they had. Others may have
    been replaced; what is gone, or cannot be looked up, tells nothing."""
    # Names are hashes: those that follow any one stand for all, of which there may be millions.
    known = dict.fromkeys(
        ino
        for tier in index.replicas.tier_totals()
        for after in (random.randbytes(2), b"")
        for _name, ino in index.replicas.names(tier, b"", after, 8 * SAMPLE)
    )
    told = same = 0
    for ino in known:
        node = index.nodes.node(ino)
        directory = None if node is None else index.nodes.dirref(node.parent)
        if node is None or directory is None:
            continue
        try:
            same += source.stat(directory, node.name).ino == node.stat.ino
        except OSError:
            continue
        except SourceChanged:
            pass  # its directory has another number
        told += 1
        if told == SAMPLE:
            break
    return 2 * same > told


def open_index(
    config: Config,
    state_dir: str,
    root_ino: int,
    on_change: OnChange,
    goes_on: Callable[[], object],
) -> Index:
    """Open the index. One that cannot be used is set aside, and a new one is made. ``root_ino`` is
    the inode number of the source's root directory; ``goes_on`` is called while it is checked."""

    def open_of_root() -> Index:
        # The commits of a killed process are complete in the page cache, so its index is sound.
        index = Index.open(
            state_dir,
            source_id=config.dataset_id,
            trust_after_kill=True,
            on_change=on_change,
            goes_on=goes_on,
        )
        try:
            known = index.nodes.node(ROOT_INO)
            if known is not None and known.stat is not None and known.stat.ino != root_ino:
                raise IndexUnusable("the index is of another source: its root is another directory")
        except IndexUnusable:
            index.close(clean=False)
            raise
        return index

    try:
        return open_of_root()
    except IndexUnusable as exc:
        aside = set_aside(state_dir)
        told = f"{exc}: kept as {aside}, starting with an empty one"
        log.warning("%s", told.replace(state_dir, config.state_dir))
        return open_of_root()


def open_tiers(config: Config, bootstrap: Bootstrap, index: Index) -> list[tuple[Tier, TierSize]]:
    """Raises OperationError if something in it is not ours."""
    return [
        (
            _open_tier(
                fd,
                spec.path,
                index.meta.tier_number(spec.path),
                os.path.join(spec.path, spec.directory),
            ),
            spec.size,
        )
        for spec, fd in zip(config.tiers, bootstrap.fds.tiers, strict=not bootstrap.safe)
    ]


def _open_tier(fd: int, path: str, number: int, directory: str) -> Tier:
    try:
        tier = Tier(fd, path, number, directory=directory)
    except OSError as exc:
        place = os.path.normpath(os.path.join(directory, exc.filename or ""))
        raise OperationError(
            f"tier {path}: {place}: {exc.strerror}: remove it, or name another --tier"
        ) from None
    with suppress(OSError):  # else it is out of service until a probe succeeds
        try:
            tier.files.parts_directory.make()
        except FileNotFoundError:
            # The directory was removed under an earlier worker, which may have made another.
            tier.find_again()
    return tier


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
