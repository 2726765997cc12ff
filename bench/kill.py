"""SIGKILL for all of a mount at any moment, and reboots: what is wrong, lost or miscounted then.

    python -m bench.kill PLACE MODE ROUNDS

makes the rounds of one mode (``kill`` or ``reboot``) in the directory PLACE and prints a JSON
object. ``reboot`` puts another boot id over the kernel's, so it wants root and a mount namespace of
its own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from bench.capacity import allocated
from bench.harness import (
    MONARCHFS,
    REPOSITORY,
    Mount,
    Unusable,
    reader_processes,
    repeated,
)
from bench.processes import kill, processes_of
from bench.report import Result
from bench.task import Task
from bench.versions import (
    FILES,
    LARGEST,
    SMALLEST,
    read_all,
    read_until_gone,
    write_version,
)
from monarchfs.cache.store._records import punch
from monarchfs.cache.store.segments import SegmentFiles, data_ranges
from monarchfs.types import TierFile

SEED = int(os.environ.get("KILL_SEED", "1"))
TIER_BYTES = 32 << 20
READERS = 3
SOONEST, LATEST = 0.05, 2.0
CHANGED = 12
BOOT_ID = "/proc/sys/kernel/random/boot_id"
OPTIONS = ("--freshness", "ttl=1", "--evict", "lru")


def kill_all(mountpoint: Path) -> float:
    """The time.monotonic() at which the first signal was sent; until all are gone."""
    pids = processes_of(mountpoint)
    if len(pids) < 2:
        raise ValueError(f"a mount has supervisor and worker, but there are {pids}")
    killed = time.monotonic()
    kill(pids)
    return killed


class Changes:
    """Puts new versions of some files into the source while a mount is being used."""

    def __init__(self, source: Path, versions: list[int], rng: random.Random) -> None:
        self._source = source
        self._versions = versions
        self._numbers = [rng.randrange(FILES) for _ in range(CHANGED)]

    def make_one(self) -> None:
        if self._numbers:
            number = self._numbers.pop()
            self._versions[number] += 1
            write_version(self._source, number, self._versions[number])


# What fsck says.


def fsck(state: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [*MONARCHFS, "fsck", str(state), *options, "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode not in (0, 1) or not done.stdout.startswith("{"):
        raise Unusable(f"monarchfs fsck failed: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def fsck_bytes(found: dict[str, Any]) -> int:
    return sum(
        tier["allocated_bytes"] + tier.get("overhead_bytes", 0) + tier.get("gap_bytes", 0)
        for tier in found["tiers"]
    )


# What a reboot does to what was not synced.


class Reboots:
    """Stands for the machine: its boot id, and what its disks lose."""

    def __init__(self, place: Path, tier: Path, rng: random.Random) -> None:
        self._id = place / "boot_id"
        self._tier = tier
        self._rng = rng
        self._kept: frozenset[str] = frozenset()
        self.damaged = 0
        self._new_id()
        subprocess.run(["mount", "--bind", str(self._id), BOOT_ID], check=True)
        if Path(BOOT_ID).read_bytes() != self._id.read_bytes():
            raise Unusable(f"{BOOT_ID} cannot be covered here")

    def _new_id(self) -> None:
        with self._id.open("wb", buffering=0) as file:
            file.write(f"{uuid.uuid4()}\n".encode())

    def before_mount(self) -> None:
        """What is in part now is from a mount that ended in order, and was synced."""
        self._kept = frozenset(os.fspath(path) for path in self._files() if self._is_part(path))

    def reboot(self) -> None:
        """Every file that nobody has synced loses its data, or some, or itself."""
        self._new_id()
        for segment, synced_rows in self._segments():
            self._damage_segment(segment, synced_rows)
        for path in self._files():
            if path.parent.name == "segments" and path.suffix != ".list":
                continue
            synced = path.stat().st_mode & 0o200 == 0
            if synced or os.fspath(path) in self._kept:
                continue
            size = path.stat().st_size
            match self._rng.randrange(4):
                case 0:
                    os.truncate(path, 0)
                    os.truncate(path, size)
                case 1:
                    os.truncate(path, size // 2)
                case 2:
                    with path.open("r+b") as file:
                        file.seek(size // 2)
                        file.write(bytes(size - size // 2))
                case 3:
                    path.unlink()
            self.damaged += 1

    def _segments(self) -> list[tuple[Path, list[TierFile]]]:
        """Each segment, and the replicas in it whose data were synced: its list has them."""
        found = []
        for directory in self._tier.glob("*/segments"):
            fd = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY)
            segments = SegmentFiles(fd, os.fspath(directory.parent), os.geteuid())
            os.close(fd)
            found += [
                (directory / f"{number:016x}", segments.noted(number))
                for number in segments.found()
            ]
            segments.close()
        return found

    def _damage_segment(self, path: Path, synced: list[TierFile]) -> None:
        """What lies between the replicas that were synced is lost, or reads as zeros."""
        size = path.stat().st_size
        ends = [0, *(row.offset + row.allocated_bytes for row in synced)]
        starts = [*(row.offset for row in synced), size]
        if not synced and self._rng.randrange(2):
            path.unlink()
            self.damaged += 1
            return
        with path.open("r+b") as file:
            for start, end in zip(ends, starts, strict=True):
                if start >= end:
                    continue
                match self._rng.randrange(3):
                    case 0:
                        for first, stop in data_ranges(file.fileno()):
                            first, stop = max(first, start), min(stop, end)
                            os.pwrite(file.fileno(), bytes(max(0, stop - first)), first)
                    case 1 if end == size:
                        os.truncate(path, start)
                    case _:
                        punch(file.fileno(), [(start, end - start)])
                self.damaged += 1

    def _files(self) -> list[Path]:
        return [path for path in self._tier.rglob("*") if path.is_file()]

    @staticmethod
    def _is_part(path: Path) -> bool:
        return path.parent.name == "parts"


# The rounds.


class Rounds:
    """``counts`` are sums over the rounds so far, ``examples`` the first words about each kind."""

    def __init__(self, place: Path, rng: random.Random, pool: Pool) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []
        self.versions = [1] * FILES
        self.place = place
        self.source, self.tier, self.state = place / "data", place / "tier", place / "state"
        self._rng = rng
        self._pool = pool
        self._mounts = 0
        self.tier.mkdir()
        for number in range(8):
            (self.source / str(number)).mkdir(parents=True)
        for number in range(FILES):
            write_version(self.source, number, 1)

    def mount(self) -> Mount:
        self._mounts += 1
        place = self.place / f"mount{self._mounts}"
        prefetch = self._rng.choice(("all", "access"))
        options = ("--state-dir", str(self.state), *OPTIONS, "--prefetch", prefetch)
        return Mount(self.source, place, *options, tier=self.tier, size=f"{TIER_BYTES >> 10}K")

    def note(self, kind: str, wrong: list[str]) -> None:
        self.counts[kind] += len(wrong)
        self.examples += [f"{kind}, mount {self._mounts}: {text}" for text in wrong[:3]]

    def until_killed(self) -> None:
        """A mount that is read and copied into, its source changing, until it is killed."""
        seconds = self._rng.uniform(SOONEST, LATEST)
        changes = Changes(self.source, self.versions, self._rng)
        with self.mount() as mount:
            tasks = [(str(mount.path), self._rng.random()) for _ in range(READERS)]
            answers = self._pool.map_async(read_until_gone, tasks, chunksize=1)
            with repeated(changes.make_one, 0.1):
                time.sleep(seconds)
                killed = kill_all(mount.path)
            for count, wrong, failures in answers.get(60):
                self.counts["reads before the kill"] += count
                self.note("wrong reads before the kill", wrong)
                early = [text for failed, text in failures if failed < killed]
                self.note("errors before the kill", early)
            self.over("killed")

    def over(self, when: str) -> None:
        """Whether the tier holds more than it may."""
        excess = allocated(self.tier).files - TIER_BYTES
        self.note("tier over its capacity", [f"{when}: by {excess} bytes"] if excess > 0 else [])

    def check(self, kind: str, *options: str) -> dict[str, Any]:
        """An fsck; its findings are counted as ``kind: ...``."""
        code, found = fsck(self.state, *options)
        for finding, count in found["findings"].items():
            self.counts[f"{kind}: {finding}"] += count
        if code:
            self.examples.append(f"{kind}, mount {self._mounts}: {json.dumps(found)}")
        return found

    def mend(self) -> None:
        self.check("fsck after the kill", "--repair")
        found = self.check("fsck after the repair", "--checksum")
        self.compare(found, "repaired")

    def again(self) -> None:
        """A mount that has to be as if nothing had happened, and ends in order."""
        with self.mount() as mount:
            self.note("wrong files afterwards", read_all(mount.path, self.versions))
            status = mount.wait_idle()
            self.counts["files opened locally"] += status["served"]["local_opens"]
            self.over("mounted again")
        found = self.check("fsck at the end", "--checksum")
        self.compare(found, "unmounted")
        gaps = sum(tier.get("gap_bytes", 0) for tier in found["tiers"])
        self.note("bytes without a record at the end", [f"{gaps} bytes"] if gaps else [])

    def compare(self, found: dict[str, Any], when: str) -> None:
        """The accounts against the disk."""
        difference = fsck_bytes(found) - allocated(self.tier).files
        self.note("accounting errors", [f"{when}: {difference} bytes"] if difference else [])


def rounds(place: Path, mode: str, count: int) -> dict[str, Any]:
    """Makes ``count`` rounds; the sums and some examples."""
    rng = random.Random(f"{SEED} {mode}")
    with reader_processes(READERS) as pool:
        work = Rounds(place, rng, pool)
        reboots = Reboots(place, work.tier, rng) if mode == "reboot" else None
        for number in range(count):
            if reboots is not None:
                reboots.before_mount()
            work.until_killed()
            if reboots is not None:
                reboots.reboot()
            if number % 2:  # every other time the next mount has to cope by itself
                work.mend()
            work.again()
        if reboots is not None:
            work.counts["files damaged by reboots"] = reboots.damaged
    return {"counts": work.counts, "examples": work.examples[:20]}


def apart(place: Path, mode: str, count: int) -> dict[str, Any]:
    """`rounds` in a process of its own, in a mount namespace of its own."""
    process = subprocess.Popen(
        [
            *("unshare", "--mount", sys.executable, "-m", "bench.kill"),
            *(str(place), mode, str(count)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    try:
        output, _ = process.communicate()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.returncode != 0:
        raise Unusable(f"the rounds of {mode} failed: see the error above")
    found: dict[str, Any] = json.loads(output)
    return found


BAD = (
    "wrong",
    "errors",
    "over its capacity",
    "fsck after the repair",
    "fsck at the end",
    "orphan",
    "without a record",
)


def show(result: Result, mode: str, found: dict[str, Any]) -> None:
    counts = found["counts"]
    for what in sorted(counts):
        # A reboot ends the records of parts that it did not: those are removed, as foreseen.
        foreseen = mode == "reboot" and "orphan_part" in what
        bad = any(word in what for word in BAD) and not foreseen
        result.figure(f"{mode}: {what}", counts[what], "", at_most=0 if bad else None)
    for example in found["examples"]:
        print(f"kill: {mode}: {example}", file=sys.stderr)


def run(task: Task) -> Result:
    place, count = task.place, task.rounds_or(5, 50)
    result = Result(
        "kill",
        f"{count} rounds of SIGKILL {SOONEST:g} to {LATEST:g} s after the mount, lru,"
        f" {READERS} readers, a tier of {TIER_BYTES >> 20} MiB",
    )
    modes = ["kill"]
    if os.geteuid() == 0 and shutil.which("unshare") is not None:
        modes.append("reboot")
    for mode in modes:
        here = place / mode
        here.mkdir()
        found = rounds(here, mode, count) if mode == "kill" else apart(here, mode, count)
        show(result, mode, found)
    result.notes = [
        f"{FILES} files of {SMALLEST >> 10} KiB to {LARGEST >> 20} MiB, {CHANGED} of them replaced"
        " meanwhile; each tells by itself whether it is whole, and of which version",
        "after each kill, every other time after fsck --repair and --checksum: mounted again, all"
        " read and compared, unmounted, fsck --checksum; the accounts are compared with st_blocks",
        "reboot (as root): besides, another boot id, and every replica that was not synced loses"
        " its data, half of them, or itself; in segments that is all between the synced replicas",
    ]
    return result


def main(arguments: list[str]) -> int:
    place, mode, count = arguments
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(json.dumps(rounds(Path(place), mode, int(count))))
    except (Unusable, KeyboardInterrupt) as error:
        print(f"kill: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
