"""``monarchfs exporter``: the metrics of all mounts of a node on one port."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from monarchfs.config import User
from monarchfs.config.places import ROOT_RUNTIME_DIR, resolve_user, runtime_dir_of
from monarchfs.exporter.broker import run_apart
from monarchfs.exporter.discovery import Roots
from monarchfs.supervisor.notify_systemd import ServiceManager
from monarchfs.supervisor.port import listen_on, stop_listening
from monarchfs.types import OperationError, UsageError

DEFAULT_USER = "nobody"
_LISTEN = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<four>[0-9.]+)):(?P<port>[0-9]{1,5})")


def exporter_command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Serves until it is ended; with ``--once`` prints the page. The exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    address, port = parse_listen(arguments.listen)
    as_root = runtime_dir_of(os.geteuid(), environ) == ROOT_RUNTIME_DIR
    user = _reader(arguments.user, environ, as_root=as_root)
    own = None if as_root else runtime_dir_of(os.geteuid(), environ)
    listener = None if arguments.once else listen_on(address, port, "--listen")
    from monarchfs.exporter.node import serve_node

    if listener is not None:
        ServiceManager(environ).ready(f"serving metrics on {arguments.listen}")
    serve = partial(serve_node, listener=listener, own_uid=None if as_root else os.geteuid())
    try:
        code = run_apart(Roots(own=own), user, serve)
    finally:
        if listener is not None:
            stop_listening(listener)
    if code > 1 and arguments.once:
        raise OperationError(f"cannot write the output: {os.strerror(code)}")
    if code:
        raise OperationError("the exporter ended unexpectedly: its log says more")
    return 0


def parse_listen(text: str) -> tuple[str, int]:
    """An IP address and a port, as ``127.0.0.1:9465`` or ``[::]:9465``. Raises UsageError."""
    match = _LISTEN.fullmatch(text)
    try:
        if match is not None and 1 <= int(match["port"]) <= 65535:
            kind = ipaddress.IPv4Address if match["four"] else ipaddress.IPv6Address
            return str(kind(match["four"] or match["six"])), int(match["port"])
    except ValueError:
        pass
    raise UsageError(
        f"'{text}' is not an IP address and a port: write it like 127.0.0.1:9465, or [::]:9465"
    )


def _reader(name: str | None, environ: Mapping[str, str], *, as_root: bool) -> User | None:
    """Whom the part runs as that reads what mounts say; None for who runs this already."""
    if not as_root:
        if name is not None:
            raise UsageError("only root can run it as another user: leave out --user")
        return None
    user = resolve_user(name or DEFAULT_USER, environ)
    if user.uid == 0:
        raise UsageError("what users' mounts say is not for root to read: name another --user")
    return replace(user, groups=())
