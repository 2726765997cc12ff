"""The list of a job's nodes."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from monarchfs.types import UsageError

MAX_NODES = 65_535
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class PeerNode:
    """One node of the job.

    ``name`` decides what the node owns, so it must be the same in every node's list. ``weight``
    (the capacity of its tiers) is its share of the files, relative to the others'.
    """

    name: str
    address: str
    port: int
    weight: float = 1.0

    def url(self, address: str, *, tls: bool) -> str:
        """Where its web server is, by a name or an address of the node."""
        host = f"[{address}]" if ":" in address else address
        return f"{'https' if tls else 'http'}://{host}:{self.port}"


def parse_node(text: str, default_port: int) -> PeerNode:
    """A node from ``NAME``, ``NAME:PORT``, ``NAME=ADDRESS`` or ``NAME=ADDRESS:PORT``.

    An IPv6 address with a port stands in brackets. A weight may follow: ``NAME*1.5``.

    Raises UsageError for anything else.
    """
    body, star, weight = text.partition("*")
    name, equals, address = body.partition("=")
    host, port = _split_port(address if equals else name)
    if not equals:
        name = host
    try:
        node = PeerNode(
            name, host, int(port) if port else default_port, float(weight) if star else 1.0
        )
    except ValueError:
        raise UsageError(f"{text!r} is no peer: NAME[=ADDRESS][:PORT][*WEIGHT]") from None
    if not _NAME.fullmatch(name) or not (_NAME.fullmatch(host) or _is_address(host)):
        raise UsageError(f"{text!r} is no peer: NAME[=ADDRESS][:PORT][*WEIGHT]")
    if not 0 < node.port < 65536 or not 0 < node.weight < float("inf"):
        raise UsageError(f"{text!r} is no peer: a port is 1 to 65535, a weight above 0")
    return node


def parse_nodes(texts: Iterable[str], default_port: int) -> list[PeerNode]:
    """The nodes of a list, in the order of their names, so that all nodes have the same order.

    Raises UsageError if a name comes twice or there are too many.
    """
    return _in_order(parse_node(text, default_port) for text in texts)


@dataclass(frozen=True, slots=True)
class Peers:
    """The nodes in the order of their names, which of them this one is, and the mount's secret.
    ``pin``: the digest of the public key that peers must have; empty without TLS."""

    nodes: tuple[PeerNode, ...]
    own: int
    secret: str
    pin: str = ""

    def changed(self, add: Iterable[str], remove: Iterable[str], default_port: int) -> Peers:
        """The same with nodes added and removed; this node stays.

        Raises UsageError for a node to add that is there, or one to remove that is not.
        """
        here = self.nodes[self.own]
        gone = {parse_node(text, default_port).name for text in remove}
        if unknown := gone - {node.name for node in self.nodes}:
            raise UsageError(f"{min(unknown)!r} is not in the list of peers")
        if here.name in gone:
            raise UsageError(f"{here.name!r} is this node: unmount it instead")
        kept = [node for node in self.nodes if node.name not in gone]
        nodes = _in_order([*kept, *(parse_node(text, default_port) for text in add)])
        return replace(self, nodes=tuple(nodes), own=nodes.index(here))

    def to_message(self) -> dict[str, Any]:
        """The message for the worker."""
        return {**asdict(self), "nodes": list(map(astuple, self.nodes))}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Peers:
        """What ``to_message`` gave, from JSON."""
        nodes = tuple(PeerNode(*fields) for fields in message["nodes"])
        return cls(nodes, message["own"], message["secret"], message["pin"])


def _in_order(given: Iterable[PeerNode]) -> list[PeerNode]:
    nodes = sorted(given, key=lambda node: node.name)
    for before, after in itertools.pairwise(nodes):
        if before.name == after.name:
            raise UsageError(f"{after.name!r} is twice in the list of peers")
    if len(nodes) > MAX_NODES:
        raise UsageError(f"the list of peers has more than {MAX_NODES} nodes")
    return nodes


def _split_port(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":")
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        return host, port
    return text, ""


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
