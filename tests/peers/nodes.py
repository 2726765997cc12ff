"""Nodes that share: mounts of one source on addresses of their own, each with its own tier."""

import os
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from monarchfs.peers.nodes import parse_nodes
from monarchfs.peers.ownership import Ownership
from monarchfs.peers.web_server import find_nginx
from monarchfs.prefetch.spans import SPAN_BYTES
from monarchfs.types import SourceStat
from tests.support import surroundings
from tests.support.mounting import Bench, Mount, free_port, kill_each, run, wait_for
from tests.support.processes import parent_of

FILES = 300
"""Small ones, in the source of most tests."""

requires_peers = [
    surroundings.requires_fuse,
    pytest.mark.skipif(find_nginx() is None, reason="needs nginx: apt-get install nginx-light"),
]


def write_source(path: Path, sizes: Iterable[int], directories: int = 7) -> Path:
    rng = random.Random(3)
    for number, size in enumerate(sizes):
        file = path / f"class {number % directories}" / "x" / f"{number:04d}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(rng.randbytes(size))
    for entry in path.rglob("*"):
        os.utime(entry, (1.6e9, 1.6e9))
    return path


def files_of(source: Path) -> list[Path]:
    return sorted(file for file in source.rglob("*") if file.is_file())


def total_bytes(source: Path) -> int:
    return sum(file.stat().st_size for file in files_of(source))


def owned(source: Path, names: str) -> dict[str, list[int]]:
    """The sizes of the small files, and of the spans of large ones, that each node owns."""
    ownership = Ownership(parse_nodes(list(names), 1))
    found: dict[str, list[int]] = {name: [] for name in names}
    for file in files_of(source):
        stat = SourceStat.of(file.stat(), source.stat().st_dev)
        for start in range(0, stat.size, SPAN_BYTES):
            owner = ownership.number(stat.version.replica_name, start // SPAN_BYTES)
            found[ownership.nodes[owner].name].append(min(SPAN_BYTES, stat.size - start))
    return found


class Nodes:
    """Mounts that share, called a, b, c; they know each other."""

    def __init__(
        self,
        work: Bench,
        source: Path,
        count: int,
        *options: str,
        tier: str = "1G",
        places: Sequence[tuple[str, int]] = (),
    ) -> None:
        """``places``: addresses and ports, else of this machine."""
        self.work = work
        self.tier = tier
        self.source = source
        self.options = options
        self.names = "abcdefgh"[:count]
        if not places:
            addresses = [f"127.0.0.{2 + number}" for number in range(count)]
            places = [(address, free_port(address)) for address in addresses]
        self.ports = [port for _, port in places]
        self.list = ",".join(
            f"{name}={address}:{port}"
            for name, (address, port) in zip(self.names, places, strict=True)
        )
        self.key = work.path / "key"
        self.new_key()
        self.mounts = {name: self.mount(name) for name in self.names}
        self.until_they_know_each_other()

    def new_key(self) -> None:
        self.key.unlink(missing_ok=True)
        self.key.write_bytes(os.urandom(64))
        self.key.chmod(0o400)

    def mount(self, name: str, *options: str) -> Mount:
        at = self.work.path / name
        at.mkdir(exist_ok=True)
        return self.work.mount(
            *(self.source, "--state-dir", f"{at}/state", "--freshness", "immutable"),
            *("--peers", self.list, "--peer-name", name, "--peer-key", str(self.key)),
            *(*self.options, *options),
            tiers=[f"{at}/tier={self.tier}"],
            point=at / "mnt",
        )

    def lose(self, name: str) -> None:
        mount = self.mounts.pop(name)
        # One may have ended with another.
        kill_each(processes_of(mount))
        self.work.mounts.remove(mount)
        run("umount", str(mount.path))

    def until_they_know_each_other(self) -> None:
        mounts = self.mounts.values()
        wait_for(lambda: all(answers(one) for mount in mounts for one in peers(mount)), "the peers")

    def read_bytes(self) -> int:
        return sum(mount.status()["source_io"]["read_bytes"] for mount in self.mounts.values())

    def served(self, key: str) -> int:
        return sum(mount.status()["served"][key] for mount in self.mounts.values())

    def kept_files(self) -> dict[str, int]:
        """How many files each has, when all is copied."""
        return {name: m.wait_idle()["files"]["resident"] for name, m in self.mounts.items()}

    def wrong(self) -> int:
        return sum(peer["wrong"] for mount in self.mounts.values() for peer in peers(mount))

    def read_at_once(self, source: Path) -> None:
        with ThreadPoolExecutor(3) as pool:
            mounts = enumerate(self.mounts.values())
            for read in [pool.submit(read_all, mount, source, seed) for seed, mount in mounts]:
                read.result()


def peers(mount: Mount) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = mount.status()["peers"]
    return listed


def answers(peer: dict[str, Any]) -> bool:
    return bool(peer["error"] is None and not peer["avoided"] and peer["answered"])


def used_bytes(mounts: Iterable[Mount]) -> int:
    return sum(mount.status()["tiers"][0]["used_bytes"] for mount in mounts)


def processes_of(mount: Mount) -> list[int]:
    """Supervisor, which would start others, worker and web server."""
    status = mount.status()
    worker = int(status["worker"]["pid"])
    return [parent_of(worker), worker, int(status["peer_server"]["pid"])]


def warm(mount: Mount) -> None:
    done = run("warm", str(mount.path), "--wait", timeout=60)
    assert done.returncode == 0, done.stderr


def read_all(mount: Mount, source: Path, seed: int = 0) -> None:
    """Every file, in random order, without leaving it in the kernel's page cache; each has the
    source's bytes."""
    files = files_of(source)
    random.Random(seed).shuffle(files)
    for file in files:
        with (mount.path / file.relative_to(source)).open("rb") as mirrored:
            assert mirrored.read() == file.read_bytes(), file
            os.posix_fadvise(mirrored.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
