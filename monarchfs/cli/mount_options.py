"""The options of mount, for each command that takes them."""

from __future__ import annotations

import argparse


def add_mount_options(parser: argparse.ArgumentParser) -> None:
    """All of mount's, which run takes as well."""
    option = parser.add_argument
    option("--tier", metavar="PATH=SIZE", action="append", help="local storage, fastest first")
    option("--state-dir", metavar="DIR", help="where the index is kept (on a local disk)")
    option(
        "--prefetch",
        metavar="WHAT",
        help="what is copied: none, access (opened files), auto (these, and by what was opened"
        " small ones beside them; the default), all, or a FILE with paths in the order of reading",
    )
    option(
        "--prefetch-rate",
        metavar="RATE",
        help="copy what nobody has open at no more than RATE bytes per second, as 200M (default:"
        " off)",
    )
    option(
        "--prefetch-jitter",
        metavar="TIME",
        help="begin to scan after a random part of TIME, as 30s, and take files in another order on"
        " each node (default: off)",
    )
    option(
        "--index",
        metavar="FILE",
        help="names and attributes that monarchfs index export has written, so that the source need"
        " not be asked for them",
    )
    option(
        "--freshness",
        metavar="MODE",
        help="when the source is asked again: immutable (never), ttl=SECONDS (default 60) or open"
        " (at every open)",
    )
    option(
        "--evict",
        metavar="POLICY",
        help="what happens when a tier is full: keep what is there (the default), or make room for"
        " opened files by lru or sieve",
    )
    option(
        "--data-path",
        metavar="PATH",
        help="how local files are read: relay (by the daemon), passthrough (by the kernel itself;"
        " root's mounts, Linux 6.9 or later), or auto (the default): what is better",
    )
    option(
        "--scrub",
        metavar="RATE",
        help="read all copies again and again to find damaged ones, at RATE bytes per second, as"
        " 20M (default: off)",
    )
    option(
        "--metrics-port",
        metavar="PORT",
        help="serve metrics for Prometheus at http://127.0.0.1:PORT/metrics (default: off)",
    )
    option(
        "--touch-source",
        metavar="INTERVAL",
        help="read a byte of each used file from the source every INTERVAL, as 6h or 1d, where old"
        " access times get files purged (default: off)",
    )
    option(
        "--require-files",
        action="store_const",
        const=True,
        help="mount no source that is empty, as one is that was not mounted on this node",
    )
    option("--user", metavar="USER", help="whose mount it is (root only; default: who ran sudo)")
    option(
        "-o", dest="options", metavar="OPT,...", action="append", help="mount options, as in fstab"
    )
    option("--config", metavar="FILE", help="a TOML file with these options")
    option("--log-file", metavar="FILE", help="where a daemon logs (default: syslog)")
    option("--log-level", metavar="LEVEL", help="debug, info (the default), warning or error")


def add_mounts_options(parser: argparse.ArgumentParser) -> None:
    """Those of mount that say what would be mounted, for whom and with which tiers."""
    option = parser.add_argument
    option("--tier", metavar="PATH=SIZE", action="append", help="local storage, fastest first")
    option("--state-dir", metavar="DIR", help="where the index would be kept")
    option("--user", metavar="USER", help="whose mount it would be (root only)")
    option("-o", dest="options", metavar="OPT,...", action="append", help="as for mount")
    option("--config", metavar="FILE", help="a TOML file as for mount")
