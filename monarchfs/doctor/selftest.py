"""``monarchfs selftest``: its checks, one after the other, on real mounts of what was made below
the directory. ``selftest_dataset`` makes that, and compares."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import monarchfs
from monarchfs.doctor import selftest_dataset as dataset
from monarchfs.doctor.checks import Check, Step, Value, ok, problem, warning
from monarchfs.fuse.mountinfo import find_mount, mount_of
from monarchfs.supervisor.launch import module_command
from monarchfs.system.bounded import bounded_value
from monarchfs.system.sizes import format_bytes
from monarchfs.types import OperationError, UsageError

PREFIX = "monarchfs-selftest."
MODES = ("immutable", "ttl=1", "open")
KILLS = 3
_TTL_SECONDS = 1.0
_COMMAND_SECONDS = 120.0
_UMOUNT_SECONDS = 30.0
_SEEN_SECONDS = 90.0
"""How long another client's change may take to show in the source itself (NFS caches attributes for
a minute)."""
_STEP_SECONDS = 1800.0
_MOST_SHOWN = 5
_COUNTERS = ("/proc/fs/lustre/llite/*/stats", "/sys/kernel/debug/lustre/llite/*/stats")
"""Only root can read them on most nodes."""
_SHOWN_COUNTERS = ("open", "close", "getattr", "getxattr", "readdir", "read", "read_bytes")


def about(directory: str) -> dict[str, Value]:
    """Where this runs, for who reads the page elsewhere."""
    mount = mount_of(directory)
    found: dict[str, Value] = {
        "monarchfs": monarchfs.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "page_bytes": resource.getpagesize(),
        "file_system": mount.fstype if mount else None,
        "mount_options": f"{mount.options} {mount.super_options}" if mount else None,
    }
    for path in ("/sys/fs/lustre/version", "/proc/fs/lustre/version"):
        with suppress(OSError):
            found["lustre"] = Path(path).read_text(encoding="ascii").strip()
            break
    return found


class SelfTest(AbstractContextManager["SelfTest"]):
    """All that it made is gone when the block ends. ``root`` is its directory below the one to be
    tested, ``_work`` the one on this node."""

    def __init__(
        self, directory: Path, second: Path | None, tier: Path, temporary: Path, files: int
    ) -> None:
        """A directory of the file system, ``second`` the same one by another mount of it; ``tier``
        and ``temporary`` are on this node; how many small ``files`` an epoch has. All paths are
        absolute. Raises UsageError."""
        self._by_another_client = second is not None
        self._files = files
        self._mounts = 0
        made: list[Path] = []
        for place in (directory, temporary, tier):
            try:
                made.append(Path(tempfile.mkdtemp(prefix=PREFIX, dir=place)))
            except OSError as error:
                for path in made:
                    path.rmdir()
                raise UsageError(
                    f"cannot write to {place}: {error.strerror}: name a directory of yours"
                ) from None
        self.root, self._work, self._tier = made
        self._second = self.root if second is None else second / self.root.name

    def __exit__(self, *_raised: object) -> None:
        """Raises OperationError if something stays."""
        for number in range(self._mounts):
            point = self._work / f"mnt{number}"
            if find_mount(str(point)) is not None:
                with suppress(subprocess.SubprocessError):
                    self._run("umount", str(point), "--timeout", "10")
                if find_mount(str(point)) is not None:
                    subprocess.run(["umount", "-l", str(point)], capture_output=True, check=False)
        for path in (self._tier, self._work, self.root):
            self._within("removing", partial(_remove, path))

    def checks(self) -> Iterator[Step]:
        """All of them. What cannot be tested here is a warning."""
        yield "making files"
        yield self._make()
        for mode in MODES:
            yield from self._step("mirror", f"mirror, {mode}", partial(self._mirror, mode))
        yield from self._step("epochs", "epochs", self._epochs)
        if self._second_shows():
            for mode in MODES[1:]:
                call = partial(self._fresh, mode)
                yield from self._step("freshness", f"freshness, {mode}", call)
        else:
            detail = f"{self._second} does not appear there"
            yield problem("freshness", detail, "--second must be the same directory")
        yield from self._step("kill", "kill", self._kill)

    # -- steps

    def _step(self, name: str, what: str, call: Callable[[], Check]) -> Iterator[Step]:
        yield what
        try:
            check = call()
        except (OSError, OperationError, subprocess.SubprocessError) as error:
            check = problem(name, f"{what}: {error}")
        yield check

    def _within(self, what: str, call: Callable[[], Any]) -> Any:
        """What a child returns: a file system that hangs does not hang this."""
        overdue = f"{what} took longer than {_STEP_SECONDS:g} s"
        return bounded_value(call, timeout=_STEP_SECONDS, overdue=overdue)

    def _make(self) -> Check:
        (self.root / "all").mkdir()

        def make() -> tuple[list[str], dict[str, str]]:
            made = dataset.make(self.root / "all")
            for name in ("plain", "mounted"):
                dataset.make_small(self.root / name, self._files)
            return made

        layouts, refused = self._within("making the files", make)
        detail = f"layouts: {', '.join(layouts)}" if layouts else "with the directory's own layout"
        if refused:
            detail += f"; refused: {', '.join(f'{name} ({why})' for name, why in refused.items())}"
        return ok("dataset", detail, layouts=list(layouts), refused=list(refused))

    def _mirror(self, mode: str) -> Check:
        """Cold, then when all is copied."""
        point = self._mount("all", mode)
        found: dict[str, list[str]] = {}
        for state in ("cold", "warm"):
            found[state] = self._within(
                f"comparing ({state})", lambda: dataset.differences(self.root / "all", point)
            )
            if state == "cold":
                self._command("warm", str(point), "--wait")
        resident = self._status(point)["files"]["resident"]
        self._umount(point)
        different = [f"{state}: {line}" for state, lines in found.items() for line in lines]
        if different:
            shown = "; ".join(different[:_MOST_SHOWN])
            detail = f"{mode}: {len(different)} differences, such as {shown}"
            return problem("mirror", detail, differences=different[:100])
        detail = f"{mode}: no difference, cold and warm ({resident} files resident)"
        return ok("mirror", detail, files=resident)

    def _epochs(self) -> Check:
        """Small files: what the client counts for a plain reader, and for a first and a second
        epoch through a mount."""
        point = self._mount("mounted", "immutable")
        names = sorted(os.listdir(self.root / "plain"))
        rows: dict[str, dict[str, float]] = {}
        for what, root in (("plain", self.root / "plain"), ("first", point), ("second", point)):
            before, asked = client_counts(), self._source_io(point)
            seconds = self._within(f"the epoch ({what})", partial(_read_all, root, names))
            if what == "first":
                self._command("warm", str(point), "--wait")
            after, asked_after = client_counts(), self._source_io(point)
            row = {"seconds": round(seconds, 3)}
            if what != "plain":
                row |= {name: asked_after[name] - asked[name] for name in asked}
            if before is not None and after is not None:
                counted = after - before
                row |= {f"client_{name}": counted[name] for name in _SHOWN_COUNTERS}
            rows[what] = row
        self._umount(point)
        detail = f"{len(names)} files of {format_bytes(dataset.SMALL_BYTES)}: " + ", ".join(
            f"{what} {row['seconds']:.2f} s" for what, row in rows.items()
        )
        again = rows["second"]["operations"]
        numbers: dict[str, Value] = {
            f"{what}_{name}": value for what, row in rows.items() for name, value in row.items()
        }
        if again:
            return problem("epochs", f"{detail}; the second asked the source {again:g} times")
        if "client_open" not in rows["plain"]:
            remedy = "run as root to see llite.*.stats of Lustre"
            return ok(
                "epochs", f"{detail}; the client's counters cannot be read", remedy, **numbers
            )
        opens = [rows[what]["client_open"] for what in rows]
        return ok("epochs", f"{detail}; opens {', '.join(f'{n:g}' for n in opens)}", **numbers)

    def _second_shows(self) -> bool:
        """Whether what is made here is seen by the second mount."""

        def seen() -> bool:
            return self._second.is_dir() and os.path.samestat(self._second.stat(), self.root.stat())

        return bool(
            self._within("looking by the second mount", partial(_until, seen, _SEEN_SECONDS))
        )

    def _fresh(self, mode: str) -> Check:
        """Each change is made by the second mount. When a plain reader sees it here, the mount has
        to: at the next open, or after the time to live."""
        where = self.root / f"changing {mode}"
        where.mkdir()
        changes = ("renamed over", "rewritten", "appended to", "truncated", "removed", "new")
        for name in changes[:-1]:
            (where / name).write_bytes(b"first" * 20_000)
        os.sync()
        point = self._mount(where.name, mode)
        second = self._second / where.name
        patience = _TTL_SECONDS + 1.0 if mode.startswith("ttl") else 0.0

        def seen_late(name: str) -> str | None:
            """None where it is seen in time."""
            _content(point / name)
            _change(second / name, name)
            if not _until(lambda: _content(where / name) == _content(second / name), _SEEN_SECONDS):
                return f"{name}: not seen in the source"
            expected = _content(where / name)
            in_time = _until(lambda: _content(point / name) == expected, patience)
            return None if in_time else name

        def change() -> list[str]:
            return [late for name in changes if (late := seen_late(name)) is not None]

        late = self._within(f"changes ({mode})", change)
        self._umount(point)
        if late:
            return problem("freshness", f"{mode}: late or never: {', '.join(late)}", late=late)
        if self._by_another_client:
            detail = f"{mode}: {len(changes)} changes through --second were seen in time"
            return ok("freshness", detail)
        detail = f"{mode}: {len(changes)} changes by the same client were seen in time"
        return warning("freshness", detail, "give another mount of it by --second")

    def _kill(self) -> Check:
        """The worker is killed under a reader, then the mount is taken away."""
        point = self._mount("mounted", "immutable")
        pids = [self._status(point)["worker"]["pid"]]

        def kill() -> dict[str, Any]:
            ended = threading.Event()
            # Not in a with block: who reads what hangs is not waited for where a step fails.
            reader = ThreadPoolExecutor(1)
            found = reader.submit(_compare, self.root / "mounted", point, ended)
            for restarts in range(1, KILLS + 1):
                os.kill(pids[-1], signal.SIGKILL)
                pids.append(self._wait_replaced(point, restarts))
            ended.set()
            return found.result()

        found = self._within("reading under kills", kill)
        watch = time.monotonic()
        self._umount(point)
        seconds = time.monotonic() - watch
        if found["errors"]:
            return problem("kill", f"a reader got {'; '.join(found['errors'])}")
        detail = (
            f"{KILLS} kills, {found['reads']} reads with the right bytes, the longest"
            f" {found['longest']:.2f} s; unmounted in {seconds:.2f} s"
        )
        return ok("kill", detail, reads=found["reads"], longest_seconds=found["longest"])

    # -- mounts

    def _mount(self, name: str, mode: str) -> Path:
        number, self._mounts = self._mounts, self._mounts + 1
        point = self._work / f"mnt{number}"
        point.mkdir()
        state, tier = self._work / f"state{number}", self._tier / str(number)
        tier.mkdir()
        words = ["mount", str(self.root / name), str(point), "--freshness", mode]
        words += ["--state-dir", str(state), "--tier", f"{tier}=4G", "--prefetch", "access"]
        words += ["-o", "reserve_percent=0"]  # how much room there is, another check says
        self._command(*words, "--log-file", str(self._work / "log"))
        return point

    def _umount(self, point: Path) -> None:
        """Raises OperationError where something is left."""
        self._command("umount", str(point), "--timeout", f"{_UMOUNT_SECONDS:g}")
        if find_mount(str(point)) is not None:
            raise OperationError(f"{point} is still mounted")
        self._command("fsck", str(self._work / point.name.replace("mnt", "state")), "--checksum")

    def _command(self, *words: str) -> str:
        """What a command of ours prints; OperationError with its own words if it fails."""
        done = self._run(*words)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise OperationError(f"{words[0]} failed: {said[-1] if said else done.returncode}")
        return done.stdout

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*module_command("monarchfs"), *words],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_COMMAND_SECONDS,
            check=False,
        )

    def _status(self, point: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._command("status", str(point), "--json"))
        return found

    def _source_io(self, point: Path) -> Counter[str]:
        asked = self._status(point)["source_io"]
        return Counter({name: int(asked[name]) for name in ("operations", "read_bytes")})

    def _wait_replaced(self, point: Path, restarts: int) -> int:
        """The number of the worker that serves after so many were killed."""
        end = time.monotonic() + _COMMAND_SECONDS
        while time.monotonic() < end:
            done = self._run("status", str(point), "--json")
            now: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
            if now.get("state") == "serving" and now["worker"]["restarts"] >= restarts:
                return int(now["worker"]["pid"])
            time.sleep(0.05)
        raise OperationError(f"no worker took over within {_COMMAND_SECONDS:g} s")


def _compare(source: Path, point: Path, ended: threading.Event) -> dict[str, Any]:
    """Compares files of a mount with those of its source, one after the other: some errors, how
    many reads there were, and how long the longest took."""
    names = sorted(os.listdir(source))
    errors: list[str] = []
    reads, longest = 0, 0.0
    while not ended.is_set():
        name = names[reads % len(names)]
        expected, watch = (source / name).read_bytes(), time.monotonic()
        try:
            if (point / name).read_bytes() != expected:
                errors.append(f"{name}: wrong bytes")
        except OSError as error:
            errors.append(f"{name}: {error.strerror}")
        longest = max(longest, time.monotonic() - watch)
        reads += 1
    return {"errors": errors[:_MOST_SHOWN], "reads": reads, "longest": longest}


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise OperationError(f"{path} cannot be removed: {error.strerror}: remove it") from None


def _read_all(root: Path, names: list[str]) -> float:
    """How many seconds it takes to read them once."""
    watch = time.monotonic()
    for name in names:
        (root / name).read_bytes()
    return time.monotonic() - watch


def _content(path: Path) -> bytes | None:
    """None for what is not there, as also the mount has to say."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _change(path: Path, how: str) -> None:
    match how:
        case "renamed over":
            other = path.with_name("replacement")
            other.write_bytes(b"second" * 15_000)
            other.rename(path)
        case "rewritten":
            with open(path, "r+b") as file:
                file.write(b"other" * 20_000)
        case "appended to":
            with open(path, "ab") as file:
                file.write(b"more")
        case "truncated":
            os.truncate(path, 1000)
        case "removed":
            path.unlink()
        case "new":
            path.write_bytes(b"new")


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it holds within so many seconds, or at once where that is 0."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


# What a Lustre client counts of the calls that it got


def client_counts() -> Counter[str] | None:
    """Of all mounts of Lustre on this node, by the counter's name: how often, and of ``read_bytes``
    how many. None where they cannot be read."""
    total: Counter[str] = Counter()
    found = False
    for path in (path for pattern in _COUNTERS for path in glob(pattern)):
        with suppress(OSError), open(path, encoding="ascii") as file:
            total += parse_counts(file.read())
            found = True
    return total if found else None


def parse_counts(text: str) -> Counter[str]:
    """Of lines as lprocfs_stats_seq_show has them (lustre/obdclass/lprocfs_status.c): ``name count
    samples [unit]``, and for bytes ``minimum maximum sum``. Raises ValueError for what is no number
    where there must be one."""
    counts: Counter[str] = Counter()
    for line in text.splitlines():
        words = line.split()
        if len(words) < 4 or words[2] != "samples":
            continue
        counts[words[0]] += int(words[6] if words[0].endswith("_bytes") else words[1])
    return counts
