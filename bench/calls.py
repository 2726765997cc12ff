"""What a Lustre client would ask its servers for each small file, by kind: for a plain reader, for
first and later epochs, and for copying ahead. On the emulated client, which counts exactly."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.harness import Mount, Unusable, drop_caches, memory_place, monarchfs
from bench.pfs import INSTANT, ParallelFileSystem
from bench.report import Result
from bench.task import Task

SIZES = {"4 KB": 4000, "110 KB": 110_000}
FILES, QUICK_FILES = 6000, 1000
PER_DIRECTORY = 500
READERS = 4
KINDS = ("enqueue", "glimpse", "close")
PLAIN = "plain reader"


def read_all(root: Path) -> None:
    """Each file once, in random order."""
    names = [str(path) for path in sorted(root.glob("*/*"))]
    random.Random(3).shuffle(names)

    def read(name: str) -> None:
        fd = os.open(name, os.O_RDONLY)
        while os.read(fd, 1 << 17):
            pass
        os.close(fd)

    with ThreadPoolExecutor(READERS) as readers:
        for _ in readers.map(read, names):
            pass


def list_all(root: Path) -> None:
    subprocess.run(["ls", "-lR", root], stdout=subprocess.DEVNULL, check=True)


def warm(root: Path) -> None:
    monarchfs("warm", str(root), "--wait", seconds=600)


@dataclass(frozen=True, slots=True)
class Case:
    """``options`` of the mount (None: there is none); what is done ``before`` counting begins."""

    name: str
    work: Callable[[Path], None]
    options: tuple[str, ...] | None = ("--freshness", "immutable")
    before: Callable[[Path], None] | None = None


CASES = (
    Case(PLAIN, read_all, None),
    Case("first epoch", read_all),
    Case(
        "first epoch, --prefetch none", read_all, ("--freshness", "immutable", "--prefetch", "none")
    ),
    Case("first epoch, --freshness open", read_all, ("--freshness", "open")),
    Case("warm", warm),
    Case("epoch after warm", read_all, before=warm),
    Case("plain ls -lR", list_all, None),
    Case("ls -lR, names not known", list_all),
    Case("ls -lR after warm", list_all, before=warm),
)


def count(case: Case, backing: Path, place: Path) -> dict[str, int]:
    """How often each was asked, with what was still to be asked when the work had ended."""
    with ParallelFileSystem(backing, place / "pfs", INSTANT, targets=4) as pfs:
        drop_caches()
        before, reads = pfs.requests(), pfs.counts().read
        if case.options is None:
            case.work(pfs.path)
        else:
            with Mount(pfs.path, place / "m", *case.options) as mount:
                if case.before is not None:
                    case.before(mount.path)
                mount.wait_idle()
                before, reads = pfs.requests(), pfs.counts().read
                case.work(mount.path)
                mount.wait_idle()
        asked = pfs.requests() - before
        counted = {kind: getattr(asked, kind) for kind in KINDS}
        return {**counted, "read": pfs.counts().read - reads}


def run(task: Task) -> Result:
    result = Result("calls", "what a Lustre client would ask for each small file, by kind")
    if os.geteuid() != 0:
        raise Unusable("only root can drop the kernel's caches: run it as root")
    files = QUICK_FILES if task.quick else FILES
    for size, size_bytes in SIZES.items():
        with memory_place() as memory:
            backing = memory / "backing"
            for number in range(files):
                path = backing / f"{number // PER_DIRECTORY:03d}" / f"{number:06d}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(os.urandom(size_bytes))
            for case in CASES:
                task.say(f"{size}: {case.name}")
                place = task.place / size.replace(" ", "") / case.name.replace(" ", "-")
                place.mkdir(parents=True)
                asked = count(case, backing, place)
                for kind, times in asked.items():
                    result.figure(f"{size}, {case.name}: {kind}", times / files, "a file")
    result.notes += [
        f"{files} files in directories of {PER_DIRECTORY}, in random order, {READERS} readers; all"
        " that was asked until nothing was left to copy",
        "the emulator counts an enqueue for each extended attribute; a Lustre client does not for"
        " those that ls asks for",
    ]
    return result
