"""The options of a mount, each described once.

This table makes the flags of the command line, keys of files, mount options, environment variables,
shell completion and the first lines of each section of docs/CONFIGURATION.md. Defaults are those of
``Settings``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from monarchfs.config import values
from monarchfs.config.model import DataPath, PrefetchMode, Profile, ShareMode
from monarchfs.types import EvictionPolicy


@dataclass(frozen=True, slots=True)
class Option:
    """``parse`` turns text, or a value of TOML, into the setting; it raises UsageError. ``value``
    is its placeholder in documents, "" for a switch. ``help`` is the flag's; "" if there is no
    flag. Shells complete ``choices``, and ``paths``: "file" or "directory". ``toml`` is the value
    in a file, unless that is text or true."""

    parse: Callable[[object], object]
    value: str = ""
    help: str = ""
    choices: tuple[str, ...] = ()
    paths: str = ""
    toml: str = ""

    @property
    def is_switch(self) -> bool:
        return self.parse is values.parse_flag

    def forms(self, key: str) -> str:
        """All ways to give it, in Markdown."""
        flag = f"--{flag_of(key)} {self.value}".rstrip()
        toml = self.toml or ("true" if self.is_switch else f'"{self.value}"')
        option = f"-o {key}={self.value}" if self.value else f"-o {key}"
        forms = [flag] if self.help else []
        return " · ".join(f"`{form}`" for form in (*forms, option, f"{key} = {toml}"))


def flag_of(key: str) -> str:
    return key.replace("_", "-")


OPTIONS: Mapping[str, Option] = {
    "profile": Option(
        values.member_of(Profile, "profile"),
        "NAME",
        "options for a dataset that does not change: training, small-files or shards (default:"
        " none); an option that is given counts instead",
        choices=tuple(profile.value for profile in Profile),
    ),
    "tier": Option(
        values.parse_tiers,
        "PATH=SIZE",
        "a directory on local storage for copies; repeat it, fastest first",
        paths="directory",
        toml='["PATH=SIZE"]',
    ),
    "state_dir": Option(
        values.parse_path, "DIR", "where the index is kept (local storage)", paths="directory"
    ),
    "prefetch": Option(
        values.parse_prefetch,
        "WHAT",
        "what is copied: none, access (opened files), auto (the default: opened files, and small"
        " ones beside them), all, or a FILE with paths in the order of reading",
        choices=tuple(mode.value for mode in PrefetchMode if mode is not PrefetchMode.FILE),
        paths="file",
    ),
    "prefetch_rate": Option(
        values.parse_rate,
        "RATE",
        "copy files that nobody has open at no more than RATE bytes per second, as 200M (default:"
        " off)",
    ),
    "prefetch_floor": Option(
        values.parse_floor,
        "PERCENT",
        "while the source is slower than usual, copy files that nobody has open with this share of"
        " copy_workers at least (default: 25), or off: never copy less",
    ),
    "prefetch_jitter": Option(
        values.parse_interval,
        "TIME",
        "wait for a random part of TIME, as 30s, before scanning, and take files in a different"
        " order on each node (default: off)",
    ),
    "freshness": Option(
        values.parse_freshness,
        "MODE",
        "when the source is asked again: immutable (never), ttl=SECONDS (when the last answer is"
        " older; default 60) or open (at every open)",
        choices=("immutable", "ttl=", "open"),
    ),
    "evict": Option(
        values.member_of(EvictionPolicy, "eviction policy"),
        "POLICY",
        "when the tiers are full: keep the present copies (the default), or make room for opened"
        " files by lru, sieve or weighted (what is read more often stays)",
        choices=tuple(policy.value for policy in EvictionPolicy),
    ),
    "data_path": Option(
        values.member_of(DataPath, "data path"),
        "PATH",
        "who reads local copies: relay (the daemon), passthrough (the kernel itself; needs a mount"
        " by root and Linux 6.9 or later), auto (the default: the better of both), or direct (the"
        " daemon, without the page cache: a recording then has every read)",
        choices=tuple(path.value for path in DataPath),
    ),
    "scrub": Option(
        values.parse_rate,
        "RATE",
        "read all copies again and again to find damaged ones, at RATE bytes per second, as 20M"
        " (default: off)",
    ),
    "peers": Option(
        values.parse_peers,
        "LIST",
        "the job's nodes that share what they have cached: NAME[=ADDRESS][:PORT][*WEIGHT],... or a"
        " FILE with one a line (default: off)",
        paths="file",
        toml='["NAME"]',
    ),
    "peer_name": Option(
        values.parse_name, "NAME", "which of the peers this node is (default: its host name)"
    ),
    "peer_port": Option(
        values.parse_peer_port, "PORT", "where peers serve each other (default: 9466)", toml="PORT"
    ),
    "peer_key": Option(
        values.parse_path,
        "FILE",
        "the key of the site, the same on all nodes, that only its owner can read",
        paths="file",
    ),
    "peer_tls": Option(
        values.parse_flag, help="encrypt what peers send each other; all of them must have this"
    ),
    "share": Option(
        values.member_of(ShareMode, "way to share"),
        "MODE",
        "what is kept of files that peers own: replicate (what fits), partition (nothing), or auto"
        " (the default: what the files that this node owns leave room for)",
        choices=tuple(mode.value for mode in ShareMode),
    ),
    "window": Option(
        values.parse_memory,
        "SIZE",
        "memory for files that are fetched in an announced order (monarchfs order) and do not fit"
        " into the tiers (default: 512M, and at most a quarter of what is left; 0: none)",
    ),
    "metrics_port": Option(
        values.parse_port,
        "PORT",
        "serve metrics for Prometheus at http://127.0.0.1:PORT/metrics (default: off)",
        toml="PORT",
    ),
    "touch_source": Option(
        values.parse_interval,
        "INTERVAL",
        "read a byte of each used file from the source every INTERVAL, as 6h or 1d, for sites that"
        " purge files by access time (default: off)",
    ),
    "require_files": Option(
        values.parse_flag,
        help="refuse an empty source, such as one that was not mounted on this node",
    ),
    "user": Option(
        values.parse_name, "USER", "whose mount it is (root only; default: the user who ran sudo)"
    ),
    "log_file": Option(
        values.parse_path, "FILE", "where the daemon logs (default: syslog)", paths="file"
    ),
    "log_level": Option(
        values.parse_log_level,
        "LEVEL",
        "debug, info (the default), warning or error",
        choices=values.LOG_LEVELS,
    ),
    "foreground": Option(
        values.parse_flag, help="stay in the foreground, and log to standard error"
    ),
    "allow_other": Option(values.parse_flag),
    "noexec": Option(values.parse_flag),
    "kernel_resend": Option(values.parse_flag, "false", toml="false"),
    "standby": Option(values.parse_flag, "false", toml="false"),
    "copy_workers": Option(values.parse_count, "N", toml="N"),
    "copy_nice": Option(values.parse_nice, "N", toml="N"),
    "source_threads": Option(values.parse_count, "N", toml="N"),
    "local_threads": Option(values.parse_count, "N", toml="N"),
    "source_deadline_seconds": Option(values.parse_seconds, "S", toml="S"),
    "start_timeout_seconds": Option(values.parse_timeout, "S", toml="S"),
    "reserve_percent": Option(values.parse_percent, "N", toml="N"),
}
