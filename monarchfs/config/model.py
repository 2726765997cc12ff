"""The frozen description of one mount, as the supervisor and the worker share it.

Paths are ``str`` with surrogateescape, so that any bytes survive; JSON keeps them, because lone
surrogates are escaped there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from monarchfs.types import EvictionPolicy, FreshnessMode, TierSize

PROTOCOL_VERSION = 1
"""The bootstrap document and the messages of the channel (docs/ARCHITECTURE.md): to be raised when
either changes, so that a supervisor does not hand its mount to a worker of another release that
would not understand it."""


class PrefetchMode(Enum):
    """What is copied without being asked for: nothing, opened files, those and as much again of
    the small ones beside them, all, or a list's files."""

    NONE = "none"
    ACCESS = "access"
    AUTO = "auto"
    ALL = "all"
    FILE = "file"


class DataPath(Enum):
    """How bytes of resident files reach their reader: the daemon answers each read, the kernel
    reads the replica itself, or what is better for the dataset where both are possible."""

    AUTO = "auto"
    RELAY = "relay"
    PASSTHROUGH = "passthrough"


@dataclass(frozen=True, slots=True)
class FreshnessSetting:
    """``ttl_seconds`` counts in mode TTL only."""

    mode: FreshnessMode = FreshnessMode.TTL
    ttl_seconds: float = 60.0


DEFAULT_FRESHNESS = FreshnessSetting()


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier as the user named it. The dataset's own directory below ``path`` is called
    ``directory``, once the supervisor has opened it."""

    path: str
    size: TierSize
    directory: str = ""


@dataclass(frozen=True, slots=True)
class User:
    """Whom the worker runs as. ``groups`` are the supplementary groups."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Config:
    """One mount. All paths are absolute; ``source`` and ``mountpoint`` have no symbolic links.

    ``dataset_id`` is a short name of what the user sees of the source. ``runtime_dir`` holds the
    control socket. ``source_deadline_seconds`` is how long a revalidation may take before what is
    known is served instead (freshness ``ttl``). ``reserve_percent`` of each tier's file system is
    never used. ``prefetch_list`` is set in mode FILE only. ``scrub_bytes_per_second`` is how fast
    the replicas are read again and compared with their checksums, 0 for not at all.
    ``metrics_port`` is where 127.0.0.1 serves the metrics, None for nowhere.
    ``touch_source_seconds`` is how often what is used is touched in the source, 0 for never.
    ``index_file`` holds names and attributes that another node has looked up. ``kernel_resend``:
    requests that a dead worker took are the kernel's to hand out again, where it can.
    ``prefetch_bytes_per_second`` is how fast files are copied that nobody has open, 0 for as fast
    as can be; ``prefetch_jitter_seconds`` by how much, at most, the scan is put off.
    ``copy_nice`` is the priority (nice(1)) of threads that nobody waits for.
    """

    source: str
    mountpoint: str
    tiers: tuple[TierSpec, ...]
    state_dir: str
    runtime_dir: str
    dataset_id: str
    user: User
    prefetch: PrefetchMode = PrefetchMode.AUTO
    prefetch_list: str | None = None
    freshness: FreshnessSetting = DEFAULT_FRESHNESS
    evict: EvictionPolicy = EvictionPolicy.KEEP
    data_path: DataPath = DataPath.AUTO
    allow_other: bool = False
    noexec: bool = False
    foreground: bool = False
    log_file: str | None = None
    log_level: str = "info"
    copy_workers: int = 4
    source_threads: int = 64
    local_threads: int = 8
    source_deadline_seconds: float = 2.0
    start_timeout_seconds: float = 30.0
    reserve_percent: float = 10.0
    scrub_bytes_per_second: int = 0
    metrics_port: int | None = None
    touch_source_seconds: float = 0.0
    index_file: str | None = None
    kernel_resend: bool = True
    prefetch_bytes_per_second: int = 0
    prefetch_jitter_seconds: float = 0.0
    copy_nice: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=_enum_value)

    @classmethod
    def from_json(cls, text: str) -> Config:
        """The Config that `to_json` wrote; raises KeyError, TypeError or ValueError otherwise."""
        fields: dict[str, Any] = json.loads(text)
        fields["tiers"] = tuple(
            TierSpec(
                tier["path"],
                TierSize(**tier["size"]),
                # A supervisor of an earlier release names it as the dataset.
                tier.get("directory", fields["dataset_id"]),
            )
            for tier in fields["tiers"]
        )
        user = fields["user"]
        fields["user"] = User(user["name"], user["uid"], user["gid"], tuple(user["groups"]))
        freshness = fields["freshness"]
        fields["freshness"] = FreshnessSetting(
            FreshnessMode(freshness["mode"]), freshness["ttl_seconds"]
        )
        fields["prefetch"] = PrefetchMode(fields["prefetch"])
        fields["evict"] = EvictionPolicy(fields["evict"])
        fields["data_path"] = DataPath(fields["data_path"])
        return cls(**fields)


def _enum_value(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
