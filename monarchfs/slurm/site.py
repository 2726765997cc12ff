"""What the site lets jobs have: ``/etc/monarchfs-slurm.toml``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from monarchfs.config.files import read_trusted, toml_table
from monarchfs.config.model import TierSpec
from monarchfs.config.places import DEFAULT_TIER_SIZE, ROOT_CACHE_DIR, ROOT_RUNTIME_DIR
from monarchfs.config.settings import from_mount_options
from monarchfs.config.values import (
    parse_flag,
    parse_interval,
    parse_nice,
    parse_path,
    parse_size,
    parse_tiers,
    parse_timeout,
)
from monarchfs.slurm.job import Job, JobId, Request, parse_dataset_path, parse_request
from monarchfs.types import UsageError

SITE_FILE = "/etc/monarchfs-slurm.toml"
_LEAST_DEADLINE, MOST_DEADLINE = 2.0, 45.0
_NOT_THE_SITES = {
    *("user", "tier", "state_dir", "foreground", "log_file", "metrics_port"),
    *("peers", "peer_name", "peer_port", "peer_key", "peer_tls"),
}
_RECORD_BYTES = 64 << 20
_PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Who:
    """The jobs of a table; an empty set means any."""

    users: frozenset[str] = frozenset()
    accounts: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()

    def matches(self, job: Job) -> bool:
        pairs = (
            (self.users, job.user),
            (self.accounts, job.account),
            (self.partitions, job.partition),
        )
        return all(not wanted or has in wanted for wanted, has in pairs)


@dataclass(frozen=True, slots=True)
class Allow:
    """Jobs that may ask for what lies at or below ``roots``."""

    who: Who
    roots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """The site's configuration. ``tiers`` as for mount: what one dataset of one user may take;
    ``budget``: what all together may, by the tier's path. ``options`` are those of ``mount -o``.
    ``path`` is the file, None for the usual one. What is ``given`` jobs get without asking. Times
    are in seconds. ``peer_key`` is a file, on each node, with the key by which the mounts of a
    job's nodes share, on one of ``peer_ports`` (the first and the last); None: they do not. With
    ``record_bytes`` the mounts of each job are recorded, in files of at most so many bytes. Files
    of prologs and epilogs lie in ``run_dir`` and
    ``cache_dir``: see ``slurm/records.py``."""

    run_dir: str = ROOT_RUNTIME_DIR + "/slurm"
    cache_dir: str = ROOT_CACHE_DIR
    path: str | None = None
    tiers: tuple[TierSpec, ...] = (TierSpec(ROOT_CACHE_DIR, DEFAULT_TIER_SIZE),)
    budget: Mapping[str, TierSpec] = field(default_factory=dict)
    options: tuple[str, ...] = ("freshness=immutable",)
    allow: tuple[Allow, ...] = ()
    given: tuple[tuple[Who, Request], ...] = ()
    deadline_seconds: float = 20.0
    linger_seconds: float = 0.0
    wipe: bool = False
    nice: int = 5
    peer_key: str | None = None
    peer_ports: tuple[int, int] = (21000, 23999)
    peer_tls: bool = True
    record_bytes: int = 0
    report_dir: str = "/var/log/monarchfs/jobs"
    log_file: str | None = "/var/log/monarchfs/slurm.log"

    def roots_for(self, job: Job) -> list[str]:
        """Below which directories a job may ask for datasets."""
        return [root for one in self.allow if one.who.matches(job) for root in one.roots]

    def given_to(self, job: Job) -> list[Request]:
        return [request for who, request in self.given if who.matches(job)]

    # Where files are

    def lock(self, key: str) -> str:
        return os.path.join(self.run_dir, "locks", key)

    @property
    def shares(self) -> str:
        return os.path.join(self.run_dir, "shares")

    @property
    def environments(self) -> str:
        return os.path.join(self.run_dir, "env")

    def environment(self, job: JobId) -> str:
        return os.path.join(self.environments, str(job))

    def facts(self, job: JobId) -> str:
        return os.path.join(self.run_dir, "jobs", str(job))

    @property
    def caches(self) -> str:
        return os.path.join(self.cache_dir, "slurm")

    def cache(self, key: str) -> str:
        return os.path.join(self.caches, key)

    @property
    def recordings(self) -> str:
        return os.path.join(self.cache_dir, "recordings")


def read_site(path: str | None = None) -> Site:
    """The site's configuration; without a file the defaults, by which no job may ask for anything.
    Raises UsageError for mistakes in it, and if others than root could have written it."""
    return parse_site(site_content(path), path)


def site_content(path: str | None) -> bytes | None:
    """What `parse_site` takes. Raises UsageError as `read_site`."""
    content = read_trusted(path or SITE_FILE)
    if content is None and path is not None:
        raise UsageError(f"there is no configuration {path}: name another with --config")
    return content


def parse_site(content: bytes | None, path: str | None) -> Site:
    """The site's configuration by a file's content. Raises UsageError for mistakes in it."""
    if content is None:
        return Site()
    return replace(site_from(toml_table(path or SITE_FILE, content), path or SITE_FILE), path=path)


def site_from(table: Mapping[str, Any], path: str) -> Site:
    """The Site of a TOML document; UsageError names ``path`` and the key."""
    place = f"configuration {path}"
    values: dict[str, Any] = {}
    allow: list[Allow] = []
    for key, value in table.items():
        try:
            match key:
                case "roots":
                    allow.append(Allow(Who(), _paths(value)))
                case "tier":
                    values["tiers"] = parse_tiers(value)
                case "budget":
                    values["budget"] = {one.path: one for one in parse_tiers(value)}
                case "options":
                    values["options"] = ("freshness=immutable", *_options(value))
                case "allow":
                    allow += [
                        Allow(_who(one, {"roots"}), _paths(one.get("roots", [])))
                        for one in _tables(value)
                    ]
                case "dataset":
                    values["given"] = tuple(_given(one) for one in _tables(value))
                case "log" if value == "syslog":
                    values["log_file"] = None
                case _ if key in _PARSERS:
                    field_name, parse = _PARSERS[key]
                    values[field_name] = parse(value)
                case _:
                    raise UsageError("this key is not known: see docs/SLURM.md")
        except UsageError as error:
            raise UsageError(f"{place}: {key}: {error}") from None
    site = Site(**{**values, "allow": tuple(allow)})
    unknown = set(site.budget) - {tier.path for tier in site.tiers}
    if unknown:
        raise UsageError(f"{place}: budget: {min(unknown)} is none of the tiers: name one of them")
    return site


def _ports(value: object) -> tuple[int, int]:
    match = _PORTS.fullmatch(value) if isinstance(value, str) else None
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1024 <= first <= last < 65536:
        raise UsageError(f'{value!r} is no range of ports: write it like "21000-23999"')
    return first, last


def _deadline(value: object) -> float:
    seconds = parse_timeout(value)
    if not _LEAST_DEADLINE <= seconds <= MOST_DEADLINE:
        raise UsageError(
            f"{seconds:g} seconds: use {_LEAST_DEADLINE:g} to {MOST_DEADLINE:g}: the scripts in"
            " slurm.conf are cut off a little later"
        )
    return seconds


def _record(value: object) -> int:
    if isinstance(value, bool):
        return _RECORD_BYTES * value
    size = parse_size(value).bytes if isinstance(value, str) else None
    if not size:
        raise UsageError('write true, or how large a recording may be, as "64M"')
    return size


_PARSERS: Mapping[str, tuple[str, Callable[[object], object]]] = {
    "deadline_seconds": ("deadline_seconds", _deadline),
    "linger": ("linger_seconds", parse_interval),
    "wipe": ("wipe", parse_flag),
    "nice": ("nice", parse_nice),
    "peer_key": ("peer_key", parse_path),
    "peer_ports": ("peer_ports", _ports),
    "peer_tls": ("peer_tls", parse_flag),
    "record": ("record_bytes", _record),
    "run_dir": ("run_dir", parse_path),
    "cache_dir": ("cache_dir", parse_path),
    "report_dir": ("report_dir", parse_path),
    "log": ("log_file", parse_path),
}


def _given(table: Mapping[str, Any]) -> tuple[Who, Request]:
    who = _who(table, {"path", "options"})
    if not isinstance(table.get("path"), str):
        raise UsageError('it needs a path, as in path = "/lustre/data/imagenet"')
    path = parse_dataset_path(table["path"])
    options = table.get("options", "")
    if not isinstance(options, str):
        raise UsageError('options is no text: write it like options = "prefetch=all:name=DATA"')
    # A stand-in for the path, which is not to be quoted in a configuration file.
    parsed = parse_request("/x" + (f":{options}" if options else ""))
    if len(parsed) != 1:
        raise UsageError("options holds a comma: write one table for each dataset")
    return who, replace(parsed[0], path=path)


def _who(table: Mapping[str, Any], others: set[str]) -> Who:
    known = {"users", "accounts", "partitions"}
    unknown = set(table) - known - others
    if unknown:
        raise UsageError(f"'{min(unknown)}' is not known: see docs/SLURM.md")
    return Who(**{key: frozenset(_texts(table.get(key, []))) for key in known})


def _options(value: object) -> tuple[str, ...]:
    texts = tuple(_texts(value))
    wrong = _NOT_THE_SITES & set(from_mount_options(texts))
    if wrong:
        raise UsageError(f"{min(wrong)} is not set here: see docs/SLURM.md")
    return texts


def _paths(value: object) -> tuple[str, ...]:
    paths = tuple(parse_dataset_path(text) for text in _texts(value))
    if not paths:
        raise UsageError("no directory is named: name at least one")
    return paths


def _texts(value: object) -> Sequence[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError("this is neither text nor a list of texts: write it in quotation marks")
    return texts


def _tables(value: object) -> Sequence[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise UsageError("write it as a table in double brackets")
    return value


def is_below(path: str, roots: Sequence[str]) -> bool:
    """Whether a path without symbolic links is one of the directories or lies in one."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)
