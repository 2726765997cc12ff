"""The frozen description of one mount, as the supervisor and the worker share it.

Paths are ``str`` with surrogateescape, so that any bytes survive; JSON keeps them, because lone
surrogates are escaped there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from enum import Enum
from operator import attrgetter
from typing import Any

from monarchfs.types import EvictionPolicy, FreshnessMode, TierSize

PROTOCOL_VERSION = 4
"""The bootstrap document and the messages of the channel (docs/ARCHITECTURE.md): to be raised when
either changes, so that a supervisor does not hand its mount to a worker of another release that
would not understand it."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What a worker and its successors inherit. ``tiers`` are the dataset's directories in the
    order of the tiers, ``handles`` is the table of open files, ``requests`` the request journal,
    ``counts`` memory for counts, ``metrics`` and ``peers`` listening sockets, if there are any."""

    fuse: int
    source: int
    state: int
    tiers: tuple[int, ...]
    handles: int
    counts: int | None
    requests: int | None
    metrics: int | None = None
    peers: int | None = None


class PrefetchMode(Enum):
    """What is copied without being asked for: nothing, opened files, those and as much again of
    the small ones beside them, all, or a list's files."""

    NONE = "none"
    ACCESS = "access"
    AUTO = "auto"
    ALL = "all"
    FILE = "file"


class DataPath(Enum):
    """How bytes of resident files reach their reader: the daemon answers what is not in the page
    cache, the kernel reads the replica itself, or what is better for the dataset where both are
    possible. Or the daemon answers each read and open, so that a recording has them all."""

    AUTO = "auto"
    RELAY = "relay"
    PASSTHROUGH = "passthrough"
    DIRECT = "direct"


class ShareMode(Enum):
    """What a node that shares keeps of files that other nodes own: what it can, nothing, or what
    its own files leave room for."""

    REPLICATE = "replicate"
    PARTITION = "partition"
    AUTO = "auto"


class Profile(Enum):
    """What kind of dataset the options are chosen for (`settings.PROFILES`)."""

    NONE = "none"
    TRAINING = "training"
    SMALL_FILES = "small-files"
    SHARDS = "shards"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSettings:
    """Settings that `Config` takes over as the user gave them.

    ``source_deadline_seconds`` is how long a revalidation may take before what is known is served
    instead (freshness ``ttl``). ``reserve_percent`` of each tier's file system is never used.
    ``metrics_port`` is where 127.0.0.1 serves the metrics, None for nowhere. ``kernel_resend``: the
    kernel repeats requests that a dead worker took, where it can. ``standby``: the next worker is
    loaded ahead. ``copy_nice`` is the priority (nice(1)) of threads that nobody waits for.
    ``peers`` are the job's nodes that share what they have, this one among them, as ``peer_name``;
    ``peer_key`` is a file with the site's key. With ``peer_tls`` they encrypt what they send.
    ``share`` says what of the others' files this node keeps. ``prefetch_floor`` is how many percent
    of ``copy_workers`` go on while the source is slower than usual. ``profile`` chose the other
    settings that nobody named.
    """

    profile: Profile = Profile.NONE
    freshness: FreshnessSetting = DEFAULT_FRESHNESS
    evict: EvictionPolicy = EvictionPolicy.KEEP
    data_path: DataPath = DataPath.AUTO
    allow_other: bool = False
    noexec: bool = False
    foreground: bool = False
    log_file: str | None = None
    log_level: str = "info"
    copy_workers: int = 4
    prefetch_floor: float = 25.0
    source_threads: int = 64
    local_threads: int = 8
    source_deadline_seconds: float = 2.0
    start_timeout_seconds: float = 30.0
    reserve_percent: float = 10.0
    metrics_port: int | None = None
    kernel_resend: bool = True
    standby: bool = True
    copy_nice: int = 0
    peers: tuple[str, ...] = ()
    peer_name: str | None = None
    peer_port: int = 9466
    peer_key: str | None = None
    peer_tls: bool = False
    share: ShareMode = ShareMode.AUTO
    window: int = 512 << 20
    """The memory for files that were fetched ahead of their readers, in bytes; 0: none."""


@dataclass(frozen=True, slots=True)
class Config(PlainSettings):
    """One mount. All paths are absolute; ``source`` and ``mountpoint`` have no symbolic links.

    ``dataset_id`` is a short name of what the user sees of the source. ``runtime_dir`` holds the
    control socket. ``prefetch_list`` is set in mode FILE only. ``scrub_bytes_per_second`` is how
    fast the replicas are read again and compared with their checksums, 0 for not at all.
    ``touch_source_seconds`` is how often what is used is touched in the source, 0 for never.
    ``prefetch_bytes_per_second`` is how fast files are copied that nobody has open, 0 without a
    limit; ``prefetch_jitter_seconds`` is the longest delay of the scan.
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
    scrub_bytes_per_second: int = 0
    touch_source_seconds: float = 0.0
    prefetch_bytes_per_second: int = 0
    prefetch_jitter_seconds: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=attrgetter("value"))  # of an Enum

    @classmethod
    def from_json(cls, text: str) -> Config:
        """The Config that `to_json` wrote; raises KeyError, TypeError or ValueError otherwise."""
        fields: dict[str, Any] = json.loads(text)
        user, freshness = fields["user"], fields["freshness"]
        fields["tiers"] = tuple(
            TierSpec(tier["path"], TierSize(**tier["size"]), tier["directory"])
            for tier in fields["tiers"]
        )
        fields["peers"] = tuple(fields["peers"])
        fields["user"] = User(**{**user, "groups": tuple(user["groups"])})
        mode = FreshnessMode(freshness["mode"])
        fields["freshness"] = FreshnessSetting(mode, freshness["ttl_seconds"])
        for one in dataclass_fields(cls):
            if isinstance(one.default, Enum):
                fields[one.name] = type(one.default)(fields[one.name])
        return cls(**fields)
