"""One parser for each kind of value; each raises UsageError with one line that names the remedy.

A value comes as text from the command line or mount options, or as TOML's own type from a file.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from monarchfs.config.model import FreshnessSetting, PrefetchMode, TierSpec
from monarchfs.types import FreshnessMode, TierSize, UsageError

# Not more digits than int() and float() take.
_SIZE = re.compile(
    r"(?P<number>[0-9]{1,19}(?:\.[0-9]{1,19})?)(?P<unit>%|(?:[KMGTP](?:i?B)?)|B)?", re.I
)
_EXPONENT = {"": 0, "B": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_LARGEST_SIZE = 1 << 63
_LEAST_TIER_BYTES = 64 << 10
_LEAST_PLAIN_BYTES = 1 << 20
"""What a number without a unit has to be: less was meant to be so many gigabytes, say."""
_LEAST_RATE = 1 << 10
_INTERVAL = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>[smhdw]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_LONGEST_INTERVAL = 366 * 86400
_MOST_SECONDS = 100 * _LONGEST_INTERVAL
"""What clocks can count from now on, in nanoseconds."""
_TRUE = frozenset({"", "1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_LARGEST_LIST = 16 << 20
LOG_LEVELS = ("debug", "info", "warning", "error")
MOST_TIMEOUT_SECONDS = 1e6

E = TypeVar("E", bound=Enum)


def parse_size(value: object) -> TierSize:
    """``500M``, ``16GiB``, ``1.5T`` (powers of 1024), plain bytes, or ``80%``."""
    text = _text(value).strip()
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text}' is not a size: write it like 500M, 16G, 1.5T or 80%")
    number, unit = match["number"], (match["unit"] or "").upper()
    if unit == "%":
        percent = float(number)
        if not 0 < percent <= 100:
            raise UsageError(f"'{text}' is not a share: it must be above 0% and at most 100%")
        return TierSize(percent=percent)
    size = _bytes_of(match)
    if not 0 < size < _LARGEST_SIZE:
        raise UsageError(f"'{text}' is not a size that a tier can have: write it like 500M or 16G")
    return TierSize(bytes=size)


def parse_tier(value: object) -> TierSpec:
    """``PATH=SIZE``; the last ``=`` divides, because a path may hold one."""
    text = _text(value)
    path, equals, size = text.rpartition("=")
    if not equals or not path:
        raise UsageError(f"tier '{text}' has no size: write it as PATH=SIZE, as in /scratch=500G")
    try:
        return TierSpec(os.path.abspath(path), _tier_size(size))
    except UsageError as error:
        raise UsageError(f"tier {path}: {error}") from None


def _tier_size(text: str) -> TierSize:
    size = parse_size(text)
    if size.bytes is not None:
        plain = text.strip().isdecimal()
        if plain and size.bytes < _LEAST_PLAIN_BYTES:
            raise UsageError(f"{size.bytes} means bytes: write a unit, as in {size.bytes}G")
        if size.bytes < _LEAST_TIER_BYTES:
            raise UsageError(f"'{text}' holds next to nothing: write a size like 500M or 16G")
    return size


def parse_tiers(value: object) -> tuple[TierSpec, ...]:
    """A list of ``PATH=SIZE``, or one of them; fastest first."""
    texts = value if isinstance(value, (list, tuple)) else [value]
    tiers = tuple(parse_tier(text) for text in texts)
    if not tiers:
        raise UsageError("the list of tiers is empty: name at least one as PATH=SIZE")
    for path, count in Counter(tier.path for tier in tiers).items():
        if count > 1:
            raise UsageError(f"tier {path} is named twice: name each directory once")
    return tiers


def parse_freshness(value: object) -> FreshnessSetting:
    """``immutable``, ``open`` or ``ttl=TIME`` (seconds, or as in ``1h``)."""
    text = _text(value).strip()
    mode, equals, seconds = text.partition("=")
    if not equals and mode in (FreshnessMode.IMMUTABLE.value, FreshnessMode.OPEN.value):
        return FreshnessSetting(FreshnessMode(mode))
    if mode == FreshnessMode.TTL.value:
        return FreshnessSetting(FreshnessMode.TTL, parse_seconds(seconds) if equals else 60.0)
    raise UsageError(f"freshness '{text}' is not known: use immutable, ttl=SECONDS or open")


def parse_prefetch(value: object) -> tuple[PrefetchMode, str | None]:
    """``none``, ``access``, ``auto``, ``all``, or the path of a list, which is made absolute."""
    text = _text(value)
    if text in ("none", "access", "auto", "all"):
        return PrefetchMode(text), None
    if not text:
        raise UsageError("prefetch has no value: use none, access, auto, all or the path of a list")
    return PrefetchMode.FILE, os.path.abspath(text)


def member_of(kind: type[E], what: str) -> Callable[[object], E]:
    """The parser of an Enum's values; ``what`` they are is for messages."""

    def parse(value: object) -> E:
        text = _text(value)
        try:
            return kind(text)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise UsageError(f"{what} '{text}' is not known: use {known}") from None

    return parse


def parse_log_level(value: object) -> str:
    text = _text(value).lower()
    if text not in LOG_LEVELS:
        raise UsageError(f"log level '{text}' is not known: use {', '.join(LOG_LEVELS)}")
    return text


def parse_path(value: object) -> str:
    text = _text(value)
    if not text:
        raise UsageError("a path is empty: give the path of a file or directory")
    return os.path.abspath(text)


def parse_peers(value: object) -> tuple[str, ...]:
    """``a,b,c``, a list of them, or the path of a file with one a line (``#`` begins a comment);
    none for ``off``."""
    if isinstance(value, list):
        return tuple(_text(one) for one in value)
    text = _text(value)
    if text.strip().lower() in ("off", "none"):
        return ()
    if "/" not in text:
        return tuple(filter(None, (part.strip() for part in text.split(","))))
    try:
        with open(text, encoding="ascii") as file:
            lines = [
                line.partition("#")[0].strip() for line in file.read(_LARGEST_LIST).split("\n")
            ]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise UsageError(f"the list of peers {text} cannot be read: {reason}") from None
    return tuple(filter(None, lines))


def parse_name(value: object) -> str:
    text = _text(value).strip()
    if not text:
        raise UsageError("the user's name is empty: give a name or a number")
    return text


def parse_count(value: object) -> int:
    text = _text(value).strip()
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= 4096:
        raise UsageError(f"'{text}' is not a count: use a whole number from 1 to 4096")
    return int(text)


def parse_nice(value: object) -> int:
    """A whole number from 0 to 19, as nice(1) takes it."""
    text = _text(value).strip()
    if not text.isdecimal() or len(text) > 9 or int(text) > 19:
        raise UsageError(f"'{text}' is no priority: use a number from 0 to 19, as nice(1) takes it")
    return int(text)


def parse_seconds(value: object, most: float = _MOST_SECONDS) -> float:
    """A number of seconds, 0 or more, or a time with a unit, as ``90s``, ``10m`` or ``1h``."""
    seconds = _number(value)
    if seconds is None:
        match = _INTERVAL.fullmatch(_text(value).strip().lower())
        seconds = None if match is None else float(match["number"]) * _SECONDS[match["unit"]]
    if seconds is None or not 0 <= seconds < math.inf:
        raise UsageError(
            f"'{_text(value)}' is not a time: use a number of seconds, as in 60, or 10m or 1h"
        )
    if seconds > most:
        raise UsageError(f"{seconds:g} seconds are too long: use 100 years at most")
    return seconds


def parse_timeout(value: object) -> float:
    """A number of seconds above 0 that clocks and sockets can count."""
    seconds = parse_seconds(value, math.inf)
    if seconds == 0:
        raise UsageError("a time limit of 0 seconds cannot be kept: use 1 or more")
    if seconds > MOST_TIMEOUT_SECONDS:
        raise UsageError(f"{seconds:g} seconds are no limit: use {MOST_TIMEOUT_SECONDS:g} at most")
    return seconds


def parse_interval(value: object) -> float:
    """Seconds between two times, as in ``6h`` or ``1d``; 0 for ``0`` or ``off``."""
    text = _text(value).strip().lower()
    if text in ("off", "none"):
        return 0.0
    match = _INTERVAL.fullmatch(text)
    seconds = -1.0 if match is None else float(match["number"]) * _SECONDS[match["unit"]]
    if seconds != 0 and not 1 <= seconds <= _LONGEST_INTERVAL:
        raise UsageError(
            f"'{_text(value)}' is not an interval: write it like 30m, 6h or 1d (a second to a"
            " year), or off"
        )
    return seconds


def parse_percent(value: object) -> float:
    """A share from 0 to below 100, with or without ``%``."""
    share = _number(_text(value).strip().removesuffix("%"))
    if share is None or not 0 <= share < 100:
        raise UsageError(f"'{_text(value)}' is not a share: use a number from 0 to 99, as in 10")
    return share


def parse_floor(value: object) -> float:
    """A share from 1 to 100, with or without ``%``; 100 for ``off``: nothing is held back."""
    text = _text(value).strip().lower()
    share = 100.0 if text == "off" else _number(text.removesuffix("%"))
    if share is None or not 1 <= share <= 100:
        raise UsageError(
            f"'{_text(value)}' is not a share: use a number from 1 to 100, as in 25, or off"
        )
    return share


def parse_memory(value: object) -> int:
    """Bytes, as ``512M`` (powers of 1024); 0 for ``0`` or ``off``."""
    size = _amount(_text(value).strip().lower())
    if size is None:
        raise UsageError(f"'{_text(value)}' is not a size: write it like 512M, or 0")
    return size


def parse_rate(value: object) -> int:
    """Bytes per second, as ``20M`` (powers of 1024); 0 for ``0`` or ``off``."""
    text = _text(value).strip().lower().removesuffix("/s")
    rate = _amount(text)
    if rate is None:
        raise UsageError(
            f"'{_text(value)}' is not a rate: write it like 20M (bytes per second), or off"
        )
    if 0 < rate < _LEAST_RATE and text.isdecimal():
        raise UsageError(f"{rate} means bytes per second: write a unit, as in {rate}M")
    return rate


def parse_port(value: object) -> int | None:
    """A TCP port from 1 to 65535; None for ``off``."""
    text = _text(value).strip().lower()
    if text in ("off", "none"):
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise UsageError(
            f"'{text}' is not a port: use a number from 1 to 65535, as in 9464, or off"
        )
    return int(text)


def parse_peer_port(value: object) -> int:
    """A TCP port from 1 to 65535."""
    port = parse_port(value)
    if port is None:
        raise UsageError("peers need a port: use a number from 1 to 65535, as in 9466")
    return port


def parse_flag(value: object) -> bool:
    """A switch; named without a value it is on."""
    if isinstance(value, bool):
        return value
    text = _text(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise UsageError(f"'{text}' is neither yes nor no: use true or false")


def _amount(text: str) -> int | None:
    """A number of bytes; 0 for ``0`` or ``off``, None for what is none."""
    if text in ("0", "off", "none"):
        return 0
    match = _SIZE.fullmatch(text)
    size = 0 if match is None or match["unit"] == "%" else _bytes_of(match)
    return size if 0 < size < _LARGEST_SIZE else None


def _bytes_of(match: re.Match[str]) -> int:
    number, unit = match["number"], (match["unit"] or "").upper()
    scale = 1 << 10 * _EXPONENT[unit[:1]]
    return int(number) * scale if number.isdigit() else int(float(number) * scale)


def _number(value: object) -> float | None:
    try:
        number = float(_text(value).strip())
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _text(value: object) -> str:
    # A TOML boolean is an int to Python; as a number or a path it is a mistake.
    if isinstance(value, str):
        if "\0" in value:
            raise UsageError("a NUL byte is in the text: leave it out")
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return repr(value)
    raise UsageError(f"{value!r} is not a value that fits here: use text or a number")
