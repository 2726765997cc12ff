"""Nodes with a network of their own on one machine: network namespaces whose links, of a set rate,
end in one switch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bench.harness import Unusable

RATE = "1gbit"
SLOW_RATE = "8mbit"
SLOW_DELAY = "10ms"
_NETWORK = "10.88.0"
_QUEUE = ("burst", "256kb", "latency", "50ms")


@dataclass(frozen=True)
class Network:
    """``switch`` is the name of the namespace in which all links end."""

    switch: str
    count: int

    def address(self, node: int) -> str:
        return f"{_NETWORK}.{node + 1}"

    def enter(self, node: int) -> tuple[str, ...]:
        """What comes before a command that is to run there. It sees the same files as all."""
        return ("nsenter", f"--net=/run/netns/{self.name(node)}")

    def name(self, node: int) -> str:
        return f"{self.switch}n{node}"

    def cut(self, node: int) -> None:
        """Its link is down from now on."""
        _ip("-n", self.switch, "link", "set", f"p{node}", "down")

    def slow(self, node: int) -> bool:
        """Its link is slow from now on; whether it also has a delay."""
        ends = ((self.switch, f"p{node}"), (self.name(node), "e0"))
        try:
            for space, device in ends:
                netem = ("netem", "delay", SLOW_DELAY, "rate", SLOW_RATE)
                _run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *netem)
        except Unusable:
            for space, device in ends:
                _limit(space, device, SLOW_RATE)
            return False
        return True


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unusable(f"{' '.join(words)}: {done.stderr.strip()}")


def _ip(*words: str) -> None:
    _run("ip", *words)


def _limit(space: str, device: str, rate: str) -> None:
    words = ("root", "tbf", "rate", rate, *_QUEUE)
    _run("tc", "-n", space, "qdisc", "replace", "dev", device, *words)


@contextmanager
def network(count: int) -> Iterator[Network]:
    """So many nodes. Raises Unusable where there can be none."""
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        raise Unusable("network namespaces take root, and ip and tc: apt-get install iproute2")
    made = Network(f"mfs{os.getpid()}", count)
    spaces = [made.switch, *(made.name(node) for node in range(count))]
    try:
        for space in spaces:
            _ip("netns", "add", space)
        _ip("-n", made.switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", made.switch, "link", "set", "br0", "up")
        for node in range(count):
            _connect(made, node)
        yield made
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _connect(made: Network, node: int) -> None:
    space, port = made.name(node), f"p{node}"
    veth = ("type", "veth", "peer", "name", port, "netns", made.switch)
    _ip("link", "add", "e0", "netns", space, *veth)
    _ip("-n", made.switch, "link", "set", port, "master", "br0", "up")
    _ip("-n", space, "addr", "add", f"{made.address(node)}/24", "dev", "e0")
    for device in ("lo", "e0"):
        _ip("-n", space, "link", "set", device, "up")
    _limit(space, "e0", RATE)
    _limit(made.switch, port, RATE)
