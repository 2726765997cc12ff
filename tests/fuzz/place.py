"""Where the fuzzer works: a directory of its own in a mount namespace in which all else is
read-only, the tree, the mount in each data path, and what is done to it between two calls."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from monarchfs.control.client import request
from monarchfs.control.registration import find_mounts
from tests.fuzz.calls import LONG, ODD, Call
from tests.support.programs import execute

AT_RECURSIVE, RDONLY, MOUNT_SETATTR = 0x8000, 1, 442
MIB = 1 << 20
CHANGING = 3


class DataPath(NamedTuple):
    """A data path: the mount's options, and whether the source changes, or safe mode is entered."""

    options: tuple[str, ...]
    changes: bool = False
    safe: bool = False


RELAY = ("--data-path", "relay")
PATHS = {
    "passthrough": DataPath(("--freshness", "immutable")),
    "relay": DataPath((*RELAY, "--freshness", "ttl=60", "--prefetch", "all")),
    "free opens": DataPath((*RELAY, "--freshness", "immutable")),
    "open": DataPath(("--freshness", "open", "--evict", "lru"), changes=True),
    "nothing kept": DataPath((*RELAY, "--freshness", "open", "--prefetch", "none"), changes=True),
    "safe mode": DataPath(("--freshness", "ttl=5"), safe=True),
}


def enclose(directory: Path) -> None:
    """Make everything but ``directory`` and a new /run read-only, in this mount namespace of ours.
    Raises OSError where that cannot be had, or was not had."""
    libc = ctypes.CDLL(None, use_errno=True)

    def set_attributes(path: bytes, flags: int, *words: int) -> None:
        attributes = struct.pack("QQQQ", *words, 0, 0)
        if libc.syscall(MOUNT_SETATTR, -100, path, flags, attributes, len(attributes)) != 0:
            raise OSError(ctypes.get_errno(), f"mount_setattr {path!r}")

    subprocess.run(["mount", "--bind", directory, directory], check=True)
    set_attributes(b"/", AT_RECURSIVE, RDONLY, 0)
    set_attributes(bytes(directory), 0, 0, RDONLY)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"], check=True)
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        point, options = line.split()[4:6]
        if "ro" not in options.split(",") and point not in ("/run", str(directory)):
            raise OSError(f"{point} can be written")


def make_tree(root: Path) -> None:
    """The same in each run, but for its times of change."""
    chance = random.Random(1)
    for name in ("d/deep/er", "void", "many", "changing", "closed"):
        (root / name).mkdir(parents=True)
    sizes = {"empty": 0, "tiny": 1, "small": 5000, "page": 4096, "middle": 131089, "d/file": 20_000,
             "large": 3 * MIB + 5, "d/deep/er/file": 70_000, "secret": 10, "setuid": 100,
             "new\nline": 11, ODD: 12, LONG: 13}  # fmt: skip
    for name, size in sizes.items():
        (root / name).write_bytes(chance.randbytes(size))
    with (root / "huge").open("wb") as huge:  # larger than the tier: kept in part
        for number in range(70):
            huge.write(struct.pack("Q", number) + chance.randbytes(8) * (MIB // 8 - 1))
    with (root / "sparse").open("wb") as sparse:
        for at in (0, 2 * MIB, 5 * MIB + 100):
            sparse.seek(at)
            sparse.write(chance.randbytes(5000))
        sparse.truncate(8 * MIB)
    for number in range(300):
        (root / f"many/{number}").write_bytes(b"%d" % number * (number % 50))
    links = {
        "link": "small", "dangling": "nothing", "loop": "loop", "dirlink": "d", "chain": "link",
        "d/up": "../small", "absolute": "/nothing/there", "long link": "x" * 2000,
    }  # fmt: skip
    for name, target in links.items():
        (root / name).symlink_to(target)
    os.link(root / "small", root / "d/hard")
    os.mkfifo(root / "fifo")
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(root / "socket", stat.S_IFSOCK | 0o755)
    for name, mode in {"secret": 0, "setuid": 0o4755, "closed": 0, "void": 0o1777}.items():
        (root / name).chmod(mode)
    os.chown(root / "d/file", 1234, 5678)
    for path in ("small", "d", "page"):
        for name, value in {"user.a": b"abc", "user.empty": b"", "security.x": b"\0\1"}.items():
            os.setxattr(root / path, name, value)
    os.setxattr(root / "small", "user.large", chance.randbytes(2500))
    os.utime(root / "tiny", ns=(-(10**18), -(10**18) + 123456789))
    os.utime(root / "page", ns=(10**18, 10**19 + 7))
    reset_changing(root)
    subprocess.run(["sync", "-f", root], check=True)  # until then st_blocks may change


def reset_changing(root: Path) -> None:
    for path in (root / "changing").iterdir():
        path.unlink()
    for number in range(CHANGING):
        (root / f"changing/{number}").write_bytes(b"%d" % number * 3000)


def change(root: Path, number: int, what: int, seed: int) -> None:
    path, chance = root / f"changing/{number}", random.Random(seed)
    if not path.exists():
        path.write_bytes(b"new" * 100)
    match what:
        case 0:
            with path.open("ab") as file:
                file.write(chance.randbytes(chance.randrange(1, 9000)))
        case 1:
            (root / "changing/9").write_bytes(chance.randbytes(chance.randrange(200_000)))
            (root / "changing/9").rename(path)
        case 2:
            os.truncate(path, chance.randrange(10_000))
        case 3:
            path.unlink()
        case 4:
            path.chmod(chance.choice((0o600, 0o644, 0o755)))
        case 5:
            os.setxattr(path, "user.a", chance.randbytes(10))
        case _:
            with path.open("r+b") as file:
                file.write(chance.randbytes(2000))


class Place:
    """One mount. ``mirror`` and ``plain`` are compared: the mount, and a read-only bind mount of
    its source, so that what the kernel itself says to a write is the same."""

    def __init__(self, directory: Path, path: DataPath) -> None:
        self.source, self.mirror = directory / "source", directory / "mirror"
        self.plain, self.scratch = directory / "plain", directory / "scratch"
        self.path = path
        self._killers: list[threading.Timer] = []

    def __enter__(self) -> Place:
        reset_changing(self.source)
        self.scratch.mkdir()
        for point in (self.mirror, self.plain):
            point.mkdir(exist_ok=True)
        subprocess.run(
            ["mount", "--bind", "-o", "ro,nosuid,nodev", self.source, self.plain], check=True
        )
        tiers = [f"{self.scratch}/fast=2M", f"{self.scratch}/tier=48M"]
        places = [word for tier in tiers for word in ("--tier", tier)]
        places += ["--state-dir", f"{self.scratch}/state", "--log-file", f"{self.scratch}/log"]
        self.ask("mount", str(self.source), str(self.mirror), *places, *self.path.options)
        if self.path.safe:
            self._enter_safe_mode()
        return self

    def _enter_safe_mode(self) -> None:
        """By workers that die early, each once."""
        deadline, dead = time.monotonic() + 60, 0
        while (now := self.status())["state"] != "safe mode":
            assert time.monotonic() < deadline, "there is no safe mode"
            if now["state"] == "serving" and now["worker"]["pid"] != dead:
                os.kill(dead := now["worker"]["pid"], signal.SIGSEGV)

    def __exit__(self, *_: object) -> None:
        for killer in self._killers:
            killer.join()
        self.ask("umount", str(self.mirror))
        subprocess.run(["umount", "-l", self.plain], check=True)
        subprocess.run(["rm", "-rf", self.scratch], check=True)

    def ask(self, *words: str, must: bool = True) -> None:
        done = execute([sys.executable, "-m", "monarchfs", *words])
        assert not must or done.returncode == 0, (words, done.stderr, self.log())

    def log(self) -> str:
        logs = (self.scratch / "log", self.scratch / "state" / "worker.log")
        return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs if log.exists())

    def status(self) -> dict[str, Any]:
        (daemon,) = find_mounts(["/run/monarchfs"])
        return request(daemon, {"command": "status"}, 20)

    def kill(self) -> None:
        if pid := self.status()["worker"]["pid"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def do(self, event: Call) -> None:
        match event:
            case ("kill", delay):
                killer = threading.Timer(delay, self.kill)
                self._killers.append(killer)
                killer.start()
            case ("change", *how):
                change(self.source, *how)
            case (word, name):  # warm, evict, pin, unpin, refresh, restart
                self.ask(word, str(self.mirror), *([name] if name else []), must=False)
