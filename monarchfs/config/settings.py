"""Where settings come from: defaults, a TOML file, mount options, the command line.

Each layer is a mapping from key to parsed value; a later layer replaces what an earlier one said
(also the whole list of tiers).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from monarchfs.config import values
from monarchfs.config.model import (
    DEFAULT_FRESHNESS,
    EvictPolicy,
    Freshness,
    PrefetchMode,
    TierSpec,
)
from monarchfs.types import UsageError

Layer = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for. None where the default depends on who mounts what."""

    tier: tuple[TierSpec, ...] | None = None
    state_dir: str | None = None
    prefetch: tuple[PrefetchMode, str | None] = (PrefetchMode.ACCESS, None)
    freshness: Freshness = DEFAULT_FRESHNESS
    evict: EvictPolicy = EvictPolicy.KEEP
    user: str | None = None
    allow_other: bool = False
    foreground: bool = False
    log_file: str | None = None
    log_level: str = "info"
    copy_workers: int = 4
    source_threads: int = 64
    local_threads: int = 8
    source_deadline_seconds: float = 2.0
    start_timeout_seconds: float = 30.0
    reserve_percent: float = 10.0
    scrub: int = 0
    metrics_port: int | None = None
    touch_source: float = 0.0


PARSERS: Mapping[str, Callable[[object], object]] = {
    "tier": values.parse_tiers,
    "state_dir": values.parse_path,
    "prefetch": values.parse_prefetch,
    "freshness": values.parse_freshness,
    "evict": values.parse_evict,
    "user": values.parse_name,
    "allow_other": values.parse_flag,
    "foreground": values.parse_flag,
    "log_file": values.parse_path,
    "log_level": values.parse_log_level,
    "copy_workers": values.parse_count,
    "source_threads": values.parse_count,
    "local_threads": values.parse_count,
    "source_deadline_seconds": values.parse_seconds,
    "start_timeout_seconds": values.parse_timeout,
    "reserve_percent": values.parse_percent,
    "scrub": values.parse_rate,
    "metrics_port": values.parse_port,
    "touch_source": values.parse_interval,
}

# What mount(8), fstab and systemd put into a list of options without meaning the file system.
_IGNORED = frozenset(
    (
        *("ro", "defaults", "async", "nosuid", "nodev", "noexec", "exec", "silent", "loud"),
        *("atime", "noatime", "diratime", "nodiratime", "relatime", "norelatime"),
        *("strictatime", "nostrictatime", "lazytime", "nolazytime", "nomand", "noiversion"),
        *("auto", "noauto", "nofail", "_netdev", "user", "users", "nouser", "group", "owner"),
        "default_permissions",
    )
)
_REFUSED = {
    "rw": "the mount is always read-only: leave out rw",
    "suid": "set-user-id programs are never honoured here: leave out suid",
    "dev": "device files are never honoured here: leave out dev",
    "fsname": "the mount is always named after its source: leave out fsname",
    "subtype": "the file system type is always fuse.monarchfs: leave out subtype",
    "remount": "a mount cannot be changed while it lives: unmount it and mount it again",
}


def split_options(text: str) -> list[str]:
    """The words of ``-o a,b=c``; a backslash takes the meaning from a comma or a backslash."""
    words, word, characters = [], "", iter(text)
    for character in characters:
        if character == "\\":
            word += next(characters, "\\")
        elif character == ",":
            words.append(word)
            word = ""
        else:
            word += character
    return [*filter(None, (option.strip() for option in (*words, word)))]


def from_mount_options(texts: Iterable[str]) -> Layer:
    """The layer that ``-o`` options make. Raises UsageError for unknown or impossible ones."""
    layer: dict[str, object] = {}
    tiers: list[str] = []
    for option in (option for text in texts for option in split_options(text)):
        name, equals, value = option.partition("=")
        key = name.replace("-", "_")
        # fstab's "user" lets anyone mount; "user=NAME" is ours.
        if option in _IGNORED or name.startswith(("x-", "X-")) or name == "comment":
            continue
        if key in _REFUSED:
            raise UsageError(f"mount option '{option}': {_REFUSED[key]}")
        if key not in PARSERS:
            raise UsageError(f"mount option '{option}' is not known: see monarchfs mount --help")
        if key == "tier":
            tiers.append(value)
        elif not equals and PARSERS[key] is not values.parse_flag:
            raise UsageError(f"mount option '{name}' needs a value: write it as {name}=VALUE")
        else:
            layer[key] = _parse(key, value, f"mount option {name}")
    if tiers:
        layer["tier"] = _parse("tier", tiers, "mount option tier")
    return layer


def from_file(path: str) -> Layer:
    """The layer that a TOML file makes. Raises UsageError for what it cannot take."""
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        import tomli as toml  # type: ignore[import-not-found, unused-ignore]
    try:
        with open(path, "rb") as file:
            content: dict[str, Any] = toml.load(file)
    except OSError as error:
        raise UsageError(
            f"cannot read configuration {path}: {error.strerror}: give a file that you may read"
        ) from None
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"configuration {path} is not TOML: {reason}: correct it") from None
    return _from_mapping(content, f"configuration {path}: ")


def from_flags(flags: Mapping[str, object]) -> Layer:
    """The layer that command line flags make; None stands for a flag that was not given."""
    return {
        key: _parse(key, value, f"--{key.replace('_', '-')}")
        for key, value in flags.items()
        if value is not None
    }


def merge(*layers: Layer) -> Settings:
    """The settings of all layers, later ones first."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(layer)
    return Settings(**merged)


def _from_mapping(content: Mapping[str, Any], place: str) -> Layer:
    layer: dict[str, object] = {}
    for name, value in content.items():
        key = name.replace("-", "_")
        if key not in PARSERS:
            known = ", ".join(sorted(PARSERS))
            raise UsageError(f"{place}key '{name}' is not known: use one of {known}")
        layer[key] = _parse(key, value, f"{place}{name}")
    return layer


def _parse(key: str, value: object, place: str) -> object:
    try:
        return PARSERS[key](value)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None
