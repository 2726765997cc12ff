"""An emulated parallel file system: a directory behind a client that is slow, shared with others,
and counts exactly what is asked of it. docs/BENCHMARKS.md says what is modelled and what is not.

The work is done by bench/pfs_emulator.c, which is compiled when it is first needed.
"""

from __future__ import annotations

import math
import mmap
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from bench.harness import REPOSITORY, Unusable, detach, end
from monarchfs.fuse.mountinfo import Mount, find_mount

PROGRAM = "pfs_emulator"
FORGETTING = REPOSITORY / "build" / "bench" / "forgetting"
READ_AHEAD_KIB = 4096
"""What a client has under way ahead of a sequential reader: enough for 1,000 MB/s at several
milliseconds, and no more than a fault in a map should bring."""

_MOST_IN_FLIGHT = 64
_MOST_TARGETS = 64
_SETTINGS = struct.Struct("=6d6Q")
_MASK = (1 << 64) - 1
_STEPS_OF_A_SPELL = 8


@dataclass(frozen=True, slots=True)
class Profile:
    """How busy the file system is, as one node sees it."""

    name: str
    bandwidth: float
    """Bytes a second of all readers together, while nobody else is there."""
    metadata_seconds: float
    """What a lookup, getattr, open, opendir, statfs, extended attribute and each answer of a
    readdir take."""
    read_seconds: float
    """The latency of a read RPC; those of several readers overlap."""
    noise: float = 0.0
    """The share of the bandwidth that others take at worst, at least 0 and below 1. While they
    take a share s, latencies are 1 / (1 - s) times as long."""
    noise_period: float = 0.5
    """Seconds after which that share changes."""
    metadata_in_flight: int = 8
    """Metadata RPCs at once, of all processes together: max_rpcs_in_flight of Lustre's mdc, whose
    default this is (Lustre manual, 39.4.1)."""

    def __post_init__(self) -> None:
        positive = self.bandwidth > 0 and self.noise_period > 0
        latencies = self.metadata_seconds >= 0 and self.read_seconds >= 0
        shared = 0 <= self.noise < 1 and 1 <= self.metadata_in_flight <= _MOST_IN_FLIGHT
        if not (positive and latencies and shared):
            raise ValueError(f"not a profile: {self}")

    def quiet(self) -> Profile:
        """The same without other people's load."""
        return replace(self, noise=0.0)

    def share(self, seed: int, seconds: float) -> float:
        """What others take of the bandwidth ``seconds`` after the noise began."""
        if seconds < 0:
            raise ValueError("the noise has no past")
        step = int(seconds / self.noise_period)
        gust = _random(seed, 2 * step)
        spell = _random(seed, 2 * (step // _STEPS_OF_A_SPELL) + 1)
        return self.noise * (gust + spell) / 2


MB = 1e6
PROFILES = {
    profile.name: profile
    for profile in (
        Profile("fast", 1000 * MB, 0.5e-3, 0.5e-3),
        Profile("busy", 400 * MB, 1e-3, 1e-3, noise=0.3),
        Profile("crowded", 200 * MB, 2e-3, 2e-3, noise=0.7),
    )
}
"""A node's share of a busy Lustre: 200 to 1,000 MB/s, operations of 0.5 to 2 ms."""

INSTANT = Profile("instant", math.inf, 0.0, 0.0)
"""Only what the emulator itself costs."""


class Counts(NamedTuple):
    """What the file system was asked: operations, and the bytes of all reads."""

    lookup: int = 0
    getattr: int = 0
    open: int = 0
    opendir: int = 0
    readdir: int = 0
    read: int = 0
    xattr: int = 0
    statfs: int = 0
    read_bytes: int = 0

    @property
    def operations(self) -> int:
        return sum(self) - self.read_bytes

    @property
    def metadata(self) -> int:
        """The operations that are no reads."""
        return self.operations - self.read

    def __sub__(self, earlier: Counts) -> Counts:
        """What was asked since ``earlier``."""
        return Counts(*(now - then for now, then in zip(self, earlier, strict=True)))


class Requests(NamedTuple):
    """What a client of Lustre would have asked for the same, beside its reads. ``enqueue``: of the
    metadata server; an open at the end of its look-up is one with it. ``glimpse``: of storage
    targets, for the size of a file, one for each stripe. ``seek``: calls of SEEK_DATA and
    SEEK_HOLE. ``recall``: files that reads brought back from the archive."""

    enqueue: int = 0
    glimpse: int = 0
    close: int = 0
    seek: int = 0
    recall: int = 0

    def __sub__(self, earlier: Requests) -> Requests:
        return Requests(*(now - then for now, then in zip(self, earlier, strict=True)))


LAYOUT_ATTRIBUTE = "user.pfs.layout"


def set_layout(
    path: Path,
    stripes: int = 1,
    *,
    stripe_bytes: int = 1 << 20,
    first: int = 0,
    released: bool = False,
) -> None:
    """Of a file of the backing, before it is mounted: stripe n lies on target ``first`` + n, modulo
    their number; ``released``: in the archive alone, until it is read."""
    text = f"{stripes} {stripe_bytes} {first}" + " released" * released
    os.setxattr(path, LAYOUT_ATTRIBUTE, text.encode())


class ParallelFileSystem:
    """``backing`` seen at ``path``, as a context manager; ``path`` is made where it is missing.

    It is read-only. ``backing`` must not change while mounted: a client believes what it knows, as
    one does that holds locks nobody revokes, until ``bench.harness.drop_caches`` drops that. For
    root everybody may use it as far as modes allow, for others only they themselves.

    Raises Unusable where it cannot be built or mounted. However its process ends, the mount goes.
    """

    def __init__(
        self,
        backing: Path,
        path: Path,
        profile: Profile,
        *,
        seed: int = 0,
        forgets: bool = False,
        targets: int = 0,
        recall_seconds: float = 0.0,
    ) -> None:
        """``forgets``: the client keeps no names, so that each look-up of each node counts, though
        all of them are on one machine. ``targets``: files have Lustre layouts (``set_layout``) on
        so many storage targets, and their sizes are asked of those; modes are not checked then.
        Bringing a file back from the archive takes ``recall_seconds``."""
        if not 0 <= targets <= _MOST_TARGETS:
            raise ValueError(f"{targets} storage targets: at most {_MOST_TARGETS}")
        self._targets = targets
        self._recall_seconds = recall_seconds
        self._hung = self._failing = 0
        self._forgets = forgets
        self.backing = backing
        self.path = path
        self.profile = profile
        self.seed = seed

    def __enter__(self) -> ParallelFileSystem:
        program = build(FORGETTING, ["-DVALID_SECONDS=0.0"]) if self._forgets else build()
        self.path.mkdir(exist_ok=True)
        shared = os.memfd_create("pfs")
        try:
            os.ftruncate(shared, mmap.PAGESIZE)
            self._shared = mmap.mmap(shared, mmap.PAGESIZE)
            self._counters = memoryview(self._shared).cast("Q")
            places = [str(program), str(self.backing.resolve()), str(self.path)]
            self._process = subprocess.Popen(
                [*places, _options(checks_modes=not self._targets), str(shared)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                pass_fds=[shared],
                # Ctrl-C is for the program that measures; this one ends when that closes its input.
                start_new_session=True,
            )
        finally:
            os.close(shared)
        try:
            self._send(restart_noise=True)
            # FUSE_INIT sets the read-ahead anew; after it statfs is answered.
            os.statvfs(self.path)
            self._read_ahead()
        except BaseException as error:
            self._end()
            if isinstance(error, OSError):
                raise Unusable(f"the emulated file system does not answer: {error}") from error
            raise
        self._unseen = self._counted()
        self._unseen_requests = self._counted_requests()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        end(self._process)
        # It unmounts by itself, unless somebody killed it.
        if self._mount() is not None:
            detach(self.path)

    def _mount(self) -> Mount | None:
        return find_mount(os.path.realpath(self.path))

    def _read_ahead(self) -> None:
        mount = self._mount()
        assert mount is not None
        setting = Path(f"/sys/class/bdi/{mount.major}:{mount.minor}/read_ahead_kb")
        if os.access(setting, os.W_OK):
            setting.write_text(str(READ_AHEAD_KIB))
        else:
            print("bench: only root can have the kernel read ahead further", file=sys.stderr)

    @property
    def pid(self) -> int:
        """The emulator, for instance to see what processor time it took."""
        return self._process.pid

    def _send(self, *, restart_noise: bool) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        profile = self.profile
        rates = (profile.bandwidth, profile.metadata_seconds, profile.read_seconds)
        noise = (profile.noise, profile.noise_period, self._recall_seconds)
        numbers = (profile.metadata_in_flight, self.seed & _MASK, int(restart_noise))
        targets = (self._targets, self._hung, self._failing)
        try:
            self._process.stdin.write(_SETTINGS.pack(*rates, *noise, *numbers, *targets))
            answered = self._process.stdout.read(1)
        except BrokenPipeError:
            answered = b""
        if not answered:
            raise Unusable("the emulated file system has ended: see the error above")

    def use(self, profile: Profile) -> None:
        """From now on; what is under way ends as it began, and the noise goes on."""
        self.profile = profile
        self._send(restart_noise=False)

    def set_faults(self, *, hung: Iterable[int] = (), failing: Iterable[int] = ()) -> None:
        """From now on reads of what lies on these storage targets, and of its size, hang, or fail
        with EIO. Those of all others do not; what hung goes on."""
        self._hung = sum(1 << target for target in set(hung))
        self._failing = sum(1 << target for target in set(failing))
        self._send(restart_noise=False)

    def restart_noise(self) -> None:
        """Begins the same noise anew."""
        self._send(restart_noise=True)

    def _counted(self) -> Counts:
        return Counts(*self._counters[: len(Counts._fields)])

    def counts(self) -> Counts:
        """Since mounted, also when unmounted meanwhile. An operation counts when it begins, with
        all its bytes; a system call's own are there when it returns, while the kernel may go on to
        read ahead. Costs a microsecond, and the file system nothing."""
        return self._counted() - self._unseen

    def _counted_requests(self) -> Requests:
        first = len(Counts._fields)
        return Requests(*self._counters[first : first + len(Requests._fields)])

    def requests(self) -> Requests:
        """As ``counts``. A close may come a little later than the system call."""
        return self._counted_requests() - self._unseen_requests

    def read_sizes(self) -> dict[int, int]:
        """How many reads there were of at most so many bytes, and more than the size before; the
        kernel cuts a larger one into reads of 1 MiB."""
        first = len(Counts._fields) + len(Requests._fields)
        return {4096 << n: count for n, count in enumerate(self._counters[first : first + 9])}


def _options(*, checks_modes: bool) -> str:
    """To check modes the kernel asks for the attributes before an open, and so for the size."""
    options = ["ro", "nosuid", "nodev", "fsname=pfs", "subtype=pfs"]
    if checks_modes:
        options.append("default_permissions")
    return ",".join([*options, "allow_other"] if os.geteuid() == 0 else options)


def _random(seed: int, number: int) -> float:
    """As in the C program."""
    x = ((seed & _MASK) + (number + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((x ^ (x >> 31)) >> 11) * 2.0**-53


def build(directory: Path = REPOSITORY / "build" / "bench", options: Sequence[str] = ()) -> Path:
    """The program, compiled (with these options besides) where it is missing or older than its
    source. Several may build at once. Raises Unusable without a compiler or libfuse3."""
    sources = sorted((REPOSITORY / "bench").glob(f"{PROGRAM}*.[ch]"))
    program = directory / PROGRAM
    newest = max(source.stat().st_mtime for source in sources)
    if program.exists() and program.stat().st_mtime > newest:
        return program
    missing = [tool for tool in ("gcc", "pkg-config") if shutil.which(tool) is None]
    if missing:
        raise Unusable(f"{' and '.join(missing)} not found: run make setup")
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=False
    )
    if flags.returncode != 0:
        raise Unusable("libfuse3 is not installed for building: run make setup")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        built = Path(place, PROGRAM)
        fixed = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-pthread", *options]
        units = [source for source in sources if source.suffix == ".c"]
        done = subprocess.run(
            ["gcc", *fixed, "-o", built, *units, *shlex.split(flags.stdout), "-lm"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise Unusable(f"{PROGRAM} does not compile: {done.stderr.strip()}")
        built.replace(program)
    return program
