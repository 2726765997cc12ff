"""A node that is lost costs the readers of the others at most a second, once: nodes in network
namespaces of their own, on a bridge."""

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from monarchfs.peers.web_server import find_nginx
from tests.peers.nodes import Nodes, files_of, processes_of, requires_peers, write_source
from tests.support import mounting, surroundings
from tests.support.mounting import Bench, Mount, kill_each, run, wait_for
from tests.support.programs import Running, execute, ip
from tests.support.timing import Stopwatch

pytestmark = [
    surroundings.requires_root,
    *requires_peers,
    pytest.mark.skipif(not shutil.which("ip"), reason="needs ip: apt-get install iproute2"),
]

FILES = 200
WAIT = 0.5
"""Seconds: what a reader waits for a peer takes longer, a read of the source much less."""
MOST = 1.0
MOST_WAITS = 2
"""One for the node, and one that is the machine's."""


class Network:
    """``addresses`` of nodes, each in the namespace of a process in ``holders``."""

    def __init__(self, stack: ExitStack, count: int) -> None:
        self._stack = stack
        self._hub = self._namespace()
        ip(self._hub, "link add br0 type bridge")
        ip(self._hub, "link set br0 up")
        self.holders = []
        self.addresses = []
        for number in range(count):
            holder, address = self._namespace(), f"10.77.0.{2 + number}"
            ip(self._hub, f"link add n{number} type veth peer name eth0 netns {holder}")
            ip(self._hub, f"link set n{number} master br0 up")
            ip(holder, f"addr add {address}/24 dev eth0")
            ip(holder, "link set eth0 up")
            self.holders.append(holder)
            self.addresses.append(address)

    def cut(self, number: int) -> None:
        ip(self._hub, f"link set n{number} down")

    def enter(self, number: int) -> list[str]:
        return ["nsenter", f"--net=/proc/{self.holders[number]}/ns/net"]

    def _namespace(self) -> int:
        ready = "ip link set lo up && echo && exec sleep infinity"
        alone = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sh", "-c", ready]
        process = Running(alone, stdin=None)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        with process.stdout:
            assert process.line() == "\n", "no network namespace"
        return process.pid


class Lost:
    def __init__(self, mount: Mount, network: Network, tier: Path) -> None:
        self.network = network
        self.tier = tier
        self.supervisor, _, self.nginx = processes_of(mount)
        self.all: list[int] = []

    def signal(self, number: int, *left: int) -> None:
        """The supervisor first, else it starts others."""
        kill_each((pid for pid in self._stopped() if pid not in left), number)

    def kill_who_answers(self) -> None:
        """The workers' socket is the supervisor's, too, so nginx waits for an answer."""
        kill_each(pid for pid in self._stopped()[1:] if pid != self.nginx)

    def _stopped(self) -> list[int]:
        os.kill(self.supervisor, signal.SIGSTOP)
        children = Path(f"/proc/{self.supervisor}/task/{self.supervisor}/children")
        self.all = [self.supervisor, *map(int, children.read_text().split())]
        return self.all

    def fill_disk(self) -> None:
        assert execute(["dd", "if=/dev/zero", f"of={self.tier}/full", "bs=1M"]).returncode == 1

    def end(self) -> None:
        kill_each(self.all or self._stopped())


LOSSES: dict[str, Callable[[Lost], None]] = {
    "all is killed": lambda lost: lost.signal(signal.SIGKILL),
    "nginx is left": lambda lost: lost.signal(signal.SIGKILL, lost.nginx),
    "nginx is left and asks": Lost.kill_who_answers,
    "all is stopped": lambda lost: lost.signal(signal.SIGSTOP),
    "the link is cut": lambda lost: lost.network.cut(2),
    "the disk is full": Lost.fill_disk,
}


@pytest.fixture
def source(work: Bench) -> Path:
    return write_source(work.path / "source", [110_000] * FILES + [66 << 20])


class Apart(Nodes):
    """Each in its network; the last one with a disk of its own."""

    def __init__(self, work: Bench, source: Path, network: Network) -> None:
        self.network = network
        # One that outlives its supervisor, as where the kernel is short of memory.
        self.programs = work.path / "programs"
        self.programs.mkdir()
        (self.programs / "nginx").write_text(
            f'#!/bin/sh\nexec setpriv --pdeathsig clear {find_nginx()} "$@"\n'
        )
        (self.programs / "nginx").chmod(0o755)
        places = [(address, 7000) for address in network.addresses]
        super().__init__(work, source, 3, tier="900M", places=places)

    def mount(self, name: str, *options: str) -> Mount:
        enter = [*self.network.enter("abc".index(name)), "env"]
        enter += [f"PATH={self.programs}:{os.environ['PATH']}"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mounting, "MONARCHFS", [*enter, *mounting.MONARCHFS])
            return super().mount(name, *options)


@contextmanager
def nodes(work: Bench, source: Path) -> Iterator[tuple[list[Mount], Lost]]:
    """Mounts a, b, c, which know each other; what is left of c ends."""
    with ExitStack() as stack:
        network = Network(stack, 3)
        tier = work.path / "c" / "tier"
        tier.mkdir(parents=True)
        stack.enter_context(surroundings.mounted_tmpfs(tier, "size=1G"))
        mounts = [*Apart(work, source, network).mounts.values()]
        lost = Lost(mounts[2], network, tier)
        try:
            yield mounts, lost
        finally:
            lost.end()
            work.mounts.remove(mounts[2])
            assert run("umount", str(mounts[2].path)).returncode == 0


def read_all(mount: Mount, source: Path, seed: int, took: list[float]) -> None:
    files = files_of(source)
    random.Random(seed).shuffle(files)
    for original in files:
        whole = original.read_bytes()
        watch = Stopwatch()
        with (mount.path / original.relative_to(source)).open("rb", buffering=0) as file:
            data = b""
            while piece := file.read(1 << 20):
                took.append(watch.seconds())
                data += piece
                watch = Stopwatch()
        assert data == whole, original


@pytest.mark.parametrize("loss", LOSSES)
def test_a_lost_node_costs_a_reader_at_most_a_second_once(
    work: Bench, source: Path, loss: str
) -> None:
    with nodes(work, source) as (mounts, lost):
        took: list[list[float]] = [[], []]
        with ThreadPoolExecutor(2) as pool:
            reads = [
                pool.submit(read_all, mounts[number], source, number, took[number])
                for number in range(2)
            ]
            wait_for(lambda: all(len(one) > FILES / 4 for one in took), "the readers")
            LOSSES[loss](lost)
            for read in reads:
                read.result()
        for mount in mounts[:2]:
            assert mount.wait_idle()["files"]["resident"] == FILES + 1
        for one in took:
            waits = [round(seconds, 2) for seconds in one if seconds > WAIT]
            print(f"{len(one)} reads, longest {max(one):.2f} s, waits {waits}")
            assert max(one) < MOST + WAIT
            assert len(waits) <= MOST_WAITS
