"""Where settings come from: defaults, a profile, a TOML file, mount options, the command line.

Each layer is a mapping from key to parsed value; a later layer replaces what an earlier one said
(also the whole list of tiers). Any layer but the first two may name the profile.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from monarchfs.config.model import PlainSettings, PrefetchMode, Profile, TierSpec
from monarchfs.config.options import OPTIONS, flag_of
from monarchfs.types import UsageError

Layer = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Settings(PlainSettings):
    """What the user asked for. None where the default depends on who mounts what."""

    tier: tuple[TierSpec, ...] | None = None
    state_dir: str | None = None
    prefetch: tuple[PrefetchMode, str | None] = (PrefetchMode.AUTO, None)
    user: str | None = None
    require_files: bool = False
    scrub: int = 0
    touch_source: float = 0.0
    prefetch_rate: int = 0
    prefetch_jitter: float = 0.0


PROFILES: Mapping[Profile, Mapping[str, str]] = {
    Profile.NONE: {},
    Profile.TRAINING: {"freshness": "immutable", "prefetch": "all"},
    Profile.SMALL_FILES: {"freshness": "immutable", "prefetch": "all", "copy_workers": "8"},
    Profile.SHARDS: {"freshness": "immutable", "window": "0"},
}
"""The options that each profile sets. docs/CONFIGURATION.md says why."""

# What mount(8), fstab and systemd put into a list of options without meaning the file system.
_IGNORED = frozenset(
    (
        *("ro", "defaults", "async", "sync", "dirsync", "nosuid", "nodev", "silent", "loud"),
        *("atime", "noatime", "diratime", "nodiratime", "relatime", "norelatime"),
        *("strictatime", "nostrictatime", "lazytime", "nolazytime", "mand", "nomand"),
        *("iversion", "noiversion", "sub", "nosub", "symfollow"),
        *("auto", "noauto", "nofail", "_netdev", "user", "nouser", "users", "nousers"),
        *("group", "nogroup", "owner", "noowner", "default_permissions"),
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
    """The words of ``-o a,b=c``. A backslash escapes a comma, a backslash or a quotation mark;
    between quotation marks a comma does not divide (as in mount(8)). Raises UsageError for a
    quotation mark that is not closed."""
    words, word, quoted, characters = [], "", False, iter(text)
    for character in characters:
        if character == "\\":
            word += next(characters, "\\")
        elif character == '"':
            quoted = not quoted
        elif character == "," and not quoted:
            words.append(word)
            word = ""
        else:
            word += character
    if quoted:
        raise UsageError(f"mount options '{text}': a quotation mark is not closed: close it")
    return [*filter(None, (option.strip() for option in (*words, word)))]


def escape_option(option: str) -> str:
    """The text of which `split_options` makes ``option``."""
    return "".join(f"\\{c}" if c in '\\,"' else c for c in option)


def is_known_option(option: str) -> bool:
    """Whether ``NAME`` or ``NAME=VALUE`` has a meaning in ``-o``, even if it is refused."""
    key = option.partition("=")[0].replace("-", "_")
    return _is_ignored(option) or key == "exec" or key in _REFUSED or key in OPTIONS


def from_mount_options(texts: Iterable[str]) -> Layer:
    """The layer that ``-o`` options make. Raises UsageError for unknown or impossible ones."""
    layer: dict[str, object] = {}
    tiers: list[str] = []
    for option in (option for text in texts for option in split_options(text)):
        name, equals, value = option.partition("=")
        key = name.replace("-", "_")
        if _is_ignored(option):
            continue
        if key in _REFUSED:
            raise UsageError(f"mount option '{option}': {_REFUSED[key]}")
        if option == "exec":
            layer["noexec"] = False
            continue
        if key not in OPTIONS:
            raise UsageError(f"mount option '{option}' is not known: {nearest(key)}")
        if key == "tier":
            tiers.append(value)
        elif not equals and not OPTIONS[key].is_switch:
            raise UsageError(f"mount option '{name}' needs a value: write it as {name}=VALUE")
        else:
            layer[key] = parse_value(key, value, f"mount option {name}")
    if tiers:
        layer["tier"] = parse_value("tier", tiers, "mount option tier")
    return layer


def from_flags(flags: Mapping[str, object]) -> Layer:
    """The layer that command line flags make; None stands for a flag that was not given."""
    return {
        key: parse_value(key, value, f"--{flag_of(key)}")
        for key, value in flags.items()
        if value is not None
    }


def merge(*layers: Layer) -> Settings:
    """The settings of all layers, later ones first; then those of the profile that they name."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(layer)
    profile = merged.get("profile", Profile.NONE)
    return Settings(**{**_layer_of(profile), **merged})


def set_by_profile(settings: Settings) -> list[str]:
    """The options, as ``NAME=VALUE``, that are as the profile sets them."""
    return [
        f"{key}={PROFILES[settings.profile][key]}"
        for key, value in _layer_of(settings.profile).items()
        if getattr(settings, key) == value
    ]


def _layer_of(profile: Profile) -> Layer:
    return {key: OPTIONS[key].parse(text) for key, text in PROFILES[profile].items()}


def nearest(key: str) -> str:
    """What to write instead of an unknown key."""
    close = difflib.get_close_matches(key, OPTIONS, n=1)
    return f"did you mean {close[0]}?" if close else "see monarchfs mount --help"


def _is_ignored(option: str) -> bool:
    # fstab's "user" lets anyone mount; "user=NAME" is ours.
    name = option.partition("=")[0]
    return option in _IGNORED or name.startswith(("x-", "X-")) or name == "comment"


def parse_value(key: str, value: object, place: str) -> object:
    """The value of a setting; UsageError begins with ``place``."""
    try:
        return OPTIONS[key].parse(value)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None
