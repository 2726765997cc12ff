"""The mounts of a job's nodes share what they have, where the site has a key for it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from importlib import import_module
from ipaddress import ip_address
from itertools import product
from math import prod

from monarchfs.config.settings import escape_option
from monarchfs.control.client import request
from monarchfs.control.registration import Registered
from monarchfs.peers.credentials import key_and_certificate, read_site_key
from monarchfs.peers.nodes import MAX_NODES, PeerNode
from monarchfs.peers.web_server import find_nginx
from monarchfs.slurm.job import NODE, Job
from monarchfs.slurm.site import Site
from monarchfs.supervisor.peering import address_of
from monarchfs.types import MonarchError, UsageError

_LISTED = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_RESOLVE_SECONDS = 1.0
_PEERS_SECONDS = 3.0

log = logging.getLogger(__name__)


def sharing_options(site: Site, job: Job, key: str) -> list[str]:
    """The mount options with which a share of this key is shared with the job's other nodes; none
    if the site or the job does not share, or if this node cannot, which is logged."""
    if site.peer_key is None or job.nodes < 2:
        return []
    try:
        nodes = expand_nodes(job.node_list)
        if job.node not in nodes:
            raise UsageError(f"{job.node} is none of the job's nodes, {job.node_list[:200]!r}")
        if find_nginx() is None:
            raise UsageError("nginx is not installed: apt-get install nginx-light")
        if site.peer_tls:
            key_and_certificate("tried")  # openssl may be missing, or refuse this kind of key
        import_module("monarchfs.peers._replicas")  # the mount's worker needs it, and libcurl
        read_site_key(site.peer_key)
        port = port_of(site, key)
        address = address_of(PeerNode(job.node, job.node, port), _RESOLVE_SECONDS)
        if ip_address(address).is_loopback:
            raise UsageError(f"{job.node} is {address} on this node: see /etc/hosts")
    except (MonarchError, OSError, ImportError) as error:
        log.warning("job %s of %s: mounts without peers: %s", job.id, job.user, error)
        return []
    values = {
        "peers": ",".join(nodes),
        "peer_name": job.node,
        "peer_port": port,
        "peer_key": site.peer_key,
    }
    options = [escape_option(f"{name}={value}") for name, value in values.items()]
    return [*options, "peer_tls"] if site.peer_tls else options


def follow_job(site: Site, job: Job, daemon: Registered, seconds: float, *, alone: bool) -> None:
    """Have a mount that an earlier job left share with this job's nodes, too, and only with them if
    this job is the only one that uses it (``alone``). Raises nothing: where that fails, it shares
    with whom it did, which is logged."""
    if site.peer_key is None:
        return
    try:
        nodes = {job.node} if job.nodes < 2 else set(expand_nodes(job.node_list))
        report = request(daemon, {"command": "peers"}, min(_PEERS_SECONDS, seconds))
        listed = {report["name"], *(peer["name"] for peer in report["peers"])}
        add = sorted(nodes - listed)
        remove = sorted(listed - nodes - {report["name"]}) if alone else []
        if add or remove:
            change = {"command": "change_peers", "add": add, "remove": remove}
            request(daemon, {**change, "timeout": seconds}, seconds)
    except MonarchError as error:
        log.warning("job %s of %s: the list of peers is as before: %s", job.id, job.user, error)


def port_of(site: Site, key: str) -> int:
    """Where the mounts of a share serve each other: the same port on all nodes and in all jobs, so
    that a job can share with a mount that an earlier job left. Pure."""
    first, last = site.peer_ports
    return first + int(key, 16) % (last + 1 - first)


def expand_nodes(text: str) -> list[str]:
    """The names in one of Slurm's lists, as ``gpu[01-03,7],login``, in its order. Pure.

    Raises UsageError for what is none.
    """
    names: list[str] = []
    items = _LISTED.findall(text)
    for item in items:
        # By turns what is written out and what stands in brackets.
        literal, *others = re.split(r"[\[\]]", item)
        choices = [[literal]]
        for number, part in enumerate(others):
            choices.append([part] if number % 2 else list(_numbers(part)))
        if len(names) + prod(map(len, choices)) > MAX_NODES:
            raise UsageError("the list of the job's nodes is too long")
        names += ["".join(chosen) for chosen in product(*choices)]
    if not names or ",".join(items) != text or not all(map(NODE.fullmatch, names)):
        raise UsageError(f"{text[:80]!r} is no list of nodes")
    return names


def _numbers(text: str) -> Iterator[str]:
    """The numbers in ``01-03,7``, as long as they are written there."""
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise UsageError(f"{text[:80]!r} is no range of nodes")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MAX_NODES:
            raise UsageError(f"{text[:80]!r} is no range of nodes")
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))
