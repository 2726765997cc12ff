"""The worker killed, stopped, or stuck in a frozen source, under readers that verify every byte."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench import verify
from bench.capacity import unaccounted
from bench.harness import MIB, Mount, Source, Unusable, memory_place, monarchfs, wait_for
from bench.kill import fsck
from bench.processes import Daemon
from bench.report import Result
from bench.task import Task
from monarchfs.types import OperationError

SEED = int(os.environ.get("RESTART_SEED", "1"))
TIMES = 3
READERS = 4
TIER_BYTES = 64 * MIB
SOONEST, LATEST = 0.05, 1.5
EARLY = 0.1
MOST_STALL_SECONDS = 1.0
REPLACED_SECONDS = 60.0
MOST_KINDS = 20
WORDS = re.compile(r"ERROR|CRITICAL|Traceback|Error\b|Exception")
MODES = {
    "relay": ("--freshness", "ttl=1", "--data-path", "relay"),
    "immutable": ("--freshness", "immutable", "--data-path", "relay"),
    "passthrough": ("--freshness", "ttl=1", "--data-path", "passthrough"),
}
LOCAL = ("pinned",)


def wanted() -> list[str]:
    return os.environ.get("RESTART_MODES", " ".join(MODES)).split()


def modes() -> list[str]:
    """Those wanted that there are."""
    return [mode for mode in wanted() if os.geteuid() == 0 or "passthrough" not in MODES[mode]]


class Watched:
    """A mount whose worker is replaced now and then.

    Constant: its daemon. Changing: what was seen of the workers so far.
    """

    def __init__(self, mount: Mount, rng: random.Random) -> None:
        self.daemon = Daemon(mount.path)
        self.gaps: list[float] = []
        self.safe_modes = 0
        self.counts: Counter[str] = Counter()
        self._mount = mount
        self._rng = rng

    def send(self, number: signal.Signals) -> int:
        """A signal to the worker there is, which has to be one that serves; its pid."""
        pid = self.count()
        os.kill(pid, number)
        self.counts["kills"] += 1
        return pid

    def count(self) -> int:
        """Takes note of what the worker has done, as far as is known; its pid."""
        status = self.daemon.status()
        self.counts["copies"] += status["prefetch"]["completed"]
        self.counts["evictions"] += status["evictions"]["policy"]
        pid: int = status["worker"]["pid"]
        return pid

    def replaced(self, old: int) -> float:
        """Seconds until another worker serves. TimeoutError if none does."""
        started = time.monotonic()
        wait_for(lambda: self._serves(old), "another worker to serve", REPLACED_SECONDS, 0.02)
        return time.monotonic() - started

    def _serves(self, old: int) -> bool:
        try:
            status = self.daemon.status()
        except OperationError as error:
            raise ValueError(f"no status after the worker's death: {error}") from None
        pid, state = status["worker"]["pid"], status["state"]
        if pid in (None, old):
            return False
        if state == "safe mode":
            self.safe_modes += 1
            monarchfs("restart", str(self._mount.path))
            return False
        return state in ("serving", "source not responding")

    def kill(self) -> None:
        """SIGKILL; now and then the successor dies before it serves."""
        old = self.send(signal.SIGKILL)
        started = time.monotonic()
        if self._rng.random() < EARLY and (young := self._young(old)) is not None:
            time.sleep(self._rng.uniform(0, 0.3))
            os.kill(young, signal.SIGKILL)
            self.counts["kills"] += 1
            self.counts["kills before it served"] += 1
        self.replaced(old)
        self.gaps.append(time.monotonic() - started)

    def _young(self, old: int) -> int | None:
        """The worker that is starting in the place of another; None where it serves already."""
        while True:
            status = self.daemon.status()
            if status["state"] == "serving" and status["worker"]["pid"] not in (None, old):
                return None
            if status["worker"]["pid"] not in (None, old):
                pid: int = status["worker"]["pid"]
                return pid
            time.sleep(0.02)


@contextmanager
def mounted(place: Path, source: Path, tier: Path, *options: str) -> Iterator[Mount]:
    """A mount with a tier that is too small, and some of what it holds pinned there."""
    size = f"{TIER_BYTES >> 10}K"
    with Mount(source, place, "--evict", "lru", *options, tier=tier, size=size) as mount:
        monarchfs("pin", str(mount.path), "pinned")
        for path in sorted(mount.path.glob("pinned/*/*")):
            path.read_bytes()
        mount.wait_idle()
        yield mount


@contextmanager
def under_load(mount: Mount, data: Path, kinds: Sequence[Sequence[str]]) -> Iterator[verify.Found]:
    """What the readers found is there after the block."""
    load = verify.Load(mount.path, data)
    load.start(*kinds)
    found = verify.Found()
    try:
        yield found
        load.stop(found)
    finally:
        load.end()


def show_load(result: Result, what: str, found: verify.Found, most: float | None) -> None:
    """``most``: what the longest call may take."""
    result.figure(f"{what}: reads and look-ups", sum(found.counts.values()), "")
    result.figure(f"{what}: read and compared", found.bytes / 1e9, "GB")
    result.figure(f"{what}: errors", found.errors, "", at_most=0)
    result.figure(f"{what}: wrong", found.wrong, "", at_most=0)
    for kind, stall in sorted(found.stalls.items()):
        result.figure(f"{what}: longest call, {kind}", stall.seconds, "s", at_most=most)
    for example in found.examples:
        print(f"restarts: {what}: {example}", file=sys.stderr)


def show_log(what: str, mount: Mount) -> None:
    """What supervisor and worker complained of: each kind once, and how often."""
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for line in mount.log().splitlines():
        if WORDS.search(line):
            kind = re.sub(r"\d+", "0", line)
            kinds[kind] += 1
            examples.setdefault(kind, line)
    for kind, count in kinds.most_common(MOST_KINDS):
        print(f"restarts: {what}: log, {count} like this: {examples[kind]}", file=sys.stderr)


def kills(result: Result, place: Path, data: Path, mode: str, count: int) -> None:
    """``count`` SIGKILLs, and what is left behind."""
    rng = random.Random(f"{SEED} {mode}")
    tier = place / "tier"
    with mounted(place / "m", data, tier, *MODES[mode]) as mount:
        watched = Watched(mount, rng)
        with under_load(mount, data, [()] * READERS) as found:
            for number in range(count):
                time.sleep(rng.uniform(SOONEST, LATEST))
                try:
                    watched.kill()
                except (TimeoutError, ValueError, OSError, KeyError) as error:
                    found.errors += 1
                    found.examples.append(f"kill {number + 1}: {type(error).__name__}: {error}")
                    break
            if not count:
                time.sleep(10)
        watched.count()
        show_load(result, mode, found, MOST_STALL_SECONDS)
        show_log(mode, mount)
        killed = watched.counts["kills"]
        died: int = watched.daemon.status()["worker"]["restarts"] - killed
        result.figure(f"{mode}: deaths that were not ours", died, "", at_most=0)
        for what, value in sorted(watched.counts.items()):
            result.figure(f"{mode}: {what}", value, "")
        if watched.gaps:
            result.figure(f"{mode}: until another serves", statistics.median(watched.gaps), "s")
            result.figure(f"{mode}: the longest of them", max(watched.gaps), "s")
        result.figure(f"{mode}: safe modes", watched.safe_modes, "", at_most=0)
        show_end(result, mode, mount, watched.daemon)
    code, report = fsck(place / "m" / "state", "--checksum")
    findings = {name: number for name, number in report["findings"].items() if number}
    result.figure(f"{mode}: fsck findings", sum(findings.values()) + code, "", at_most=0)
    if findings:
        print(f"restarts: {mode}: fsck: {findings}", file=sys.stderr)


def show_end(result: Result, what: str, mount: Mount, daemon: Daemon) -> None:
    """Handles that nobody closes any more, and the accounts against the disk."""
    # The kernel sends RELEASE some time after close(2).
    deadline = time.monotonic() + 5
    while (handles := daemon.open_handles()) and time.monotonic() < deadline:
        time.sleep(0.05)
    result.figure(f"{what}: handles left open", handles, "", at_most=0)
    mount.wait_idle()
    difference = unaccounted(mount, mount.tier)
    result.figure(f"{what}: allocated, but by status", difference, "B", at_most=0)


def stop(mount: Mount, watched: Watched) -> float:
    """SIGSTOP: a worker that hangs."""
    return watched.replaced(watched.send(signal.SIGSTOP))


def replace(mount: Mount, watched: Watched) -> float:
    """``monarchfs restart``: on purpose."""
    started = time.monotonic()
    monarchfs("restart", str(mount.path))
    return time.monotonic() - started


def under_way(
    result: Result,
    place: Path,
    data: Path,
    what: str,
    act: Callable[[Mount, Watched], float],
    most: float | None,
) -> None:
    """``act`` now and then, which takes the seconds it returns."""
    tier = place / "tier"
    with mounted(place / "m", data, tier, *MODES["relay"]) as mount:
        watched = Watched(mount, random.Random(SEED))
        seconds: list[float] = []
        with under_load(mount, data, [()] * READERS) as found:
            for _ in range(TIMES):
                time.sleep(2)
                seconds.append(act(mount, watched))
            time.sleep(1)
        result.figure(f"{what}: until another serves, longest", max(seconds), "s")
        show_load(result, what, found, most)
        show_log(what, mount)
        show_end(result, what, mount, watched.daemon)


def stops(result: Result, place: Path, data: Path) -> None:
    under_way(result, place, data, "stopped", stop, None)


def replacements(result: Result, place: Path, data: Path) -> None:
    under_way(result, place, data, "replaced", replace, MOST_STALL_SECONDS)


def freezes(result: Result, place: Path, data: Path) -> None:
    """The source hangs with a thread of the worker in it, which is then killed."""
    rng = random.Random(SEED)
    tier = place / "tier"
    local: list[Sequence[str]] = [LOCAL] * 2
    with (
        Source(data, place / "source") as source,
        mounted(place / "m", source.path, tier, *MODES["immutable"]) as mount,
    ):
        watched = Watched(mount, rng)
        seconds: list[float] = []
        with (
            under_load(mount, data, local) as found_local,
            under_load(mount, data, [()] * (READERS - len(local))) as found,
        ):
            for _ in range(TIMES):
                time.sleep(2)
                source.faults(hang=["* *"])
                try:
                    wait_for(lambda: watched.daemon.status()["requests"]["waiting"], "a reader")
                    seconds.append(watched.replaced(watched.send(signal.SIGKILL)))
                    time.sleep(1)
                finally:
                    source.faults()
            time.sleep(1)
        result.figure("frozen: until another serves, longest", max(seconds), "s")
        show_load(result, "frozen, local files", found_local, MOST_STALL_SECONDS)
        show_load(result, "frozen, all files", found, None)
        show_log("frozen", mount)
        show_end(result, "frozen", mount, watched.daemon)


def run(task: Task) -> Result:
    count = task.rounds_or(50, 1000)
    result = Result(
        "restarts",
        f"{count} SIGKILLs of the worker {SOONEST:g} to {LATEST:g} s after it serves, lru,"
        f" {READERS} readers, a tier of {TIER_BYTES // MIB} MiB",
    )
    chosen = modes()
    share, more = divmod(count, max(1, len(chosen)))
    parts: dict[str, Callable[[Result, Path, Path], None]] = {
        mode: partial(kills, mode=mode, count=share + (number < more))
        for number, mode in enumerate(chosen)
    }
    parts |= {"stopped": stops, "replaced": replacements, "frozen": freezes}
    with memory_place() as memory:
        data = memory / "data"
        verify.generate(data)
        for name, part in parts.items():
            here = memory / name
            here.mkdir()
            try:
                part(result, here, data)
            except (TimeoutError, ValueError, OSError, Unusable, OperationError) as error:
                # What the other parts found counts all the same.
                print(f"restarts: {name}: {type(error).__name__}: {error}", file=sys.stderr)
                result.figure(f"{name}: not finished", 1, "", at_most=0)
            shutil.rmtree(here)
    cached = verify.FILES["cached"]
    result.notes = [
        f"{verify.FILES['pinned']} pinned files, {cached} of up to {verify.LARGEST // MIB} MiB that"
        f" come and go, {verify.FILES['uncached']} of {verify.UNCACHED_BYTES // MIB} MiB for which"
        " there is no room; every byte is compared with the source's",
        f"held: descriptors that stay open ({verify.HELD} a reader); mapped: through memory maps;"
        " pages are dropped before most reads, so that the daemon is asked",
        f"one kill in {1 / EARLY:g} is followed by one of its successor while that starts; 'until"
        " another serves' is from the first of them to the status that says so",
        f"stopped: SIGSTOP, {TIMES} times; replaced: monarchfs restart, as often; frozen: SIGKILL"
        " while the source hangs with threads of the worker in it, as often, half of the readers"
        " wanting only local files",
        "allocated, but by status; fsck --checksum: nothing was lost or counted twice",
        *(
            f"{mode}: not in this version, or not for this user"
            for mode in wanted()
            if mode not in chosen
        ),
        "fewer kills, some modes: --rounds 100 and, in the environment, RESTART_MODES='relay'",
    ]
    return result
