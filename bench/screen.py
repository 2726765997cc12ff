"""Draws docs/images/status-watch.svg: what ``status --watch`` shows of a mount at work.

    python -m bench.screen [FILE]

A real mount of a slow source with `--prefetch all`, whose files two readers open in random order;
the picture is the screen when most of them are resident.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from bench.harness import (
    MIB,
    REPOSITORY,
    Mount,
    Source,
    check_fuse,
    memory_place,
    reader_processes,
    workplace,
    write_random,
)
from monarchfs.cli.watch import History, MountView, draw

FILES = 1200
INTERVAL_SECONDS = 0.5
RESIDENT_SHARE = 0.8
WIDTH = 100


def read_some(files: list[str]) -> int:
    """Reads the files whole; their bytes."""
    return sum(len(Path(name).read_bytes()) for name in files)


@contextmanager
def readers(mount: Path, rng: random.Random) -> Iterator[None]:
    """Two processes read the whole mount again and again."""
    stop = threading.Event()
    with reader_processes(2) as pool:

        def read() -> None:
            while not stop.is_set():
                names = [f"{mount}/{number:05}" for number in range(FILES)]
                rng.shuffle(names)
                groups = [names[start : start + 4] for start in range(0, FILES, 4)]
                for _ in pool.imap_unordered(read_some, groups):
                    if stop.wait(0.002):
                        return

        thread = threading.Thread(target=read)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def watch(mount: Mount, names: Mapping[str, str]) -> MountView:
    """What there is to see when RESIDENT_SHARE of the files are; temporary directories under other
    ``names``, for readers of the picture."""
    history = History()
    while True:
        text = json.dumps(mount.status())
        for directory, name in names.items():
            text = text.replace(directory, name)
        report = json.loads(text)
        view = history.add(time.monotonic(), report)
        if report["files"]["resident"] > RESIDENT_SHARE * FILES:
            return view
        time.sleep(INTERVAL_SECONDS)


def main(target: Path) -> None:
    check_fuse()
    rng = random.Random(1)
    with workplace("screen") as place, memory_place() as memory:
        data = place / "data"
        data.mkdir()
        for number in range(FILES):
            write_random(data / f"{number:05}", rng.randrange(64 << 10, 256 << 10), rng)
        with Source(data, place / "imagenet") as source:
            source.faults(rate=8 * MIB, delay=0.002)
            options = ["--prefetch", "all", "--tier", f"{place}/scratch=1G"]
            with (
                Mount(source.path, place / "job", *options, tier=memory, size="48M") as mount,
                readers(mount.path, rng),
            ):
                names = {
                    str(mount.path): "/mnt/imagenet",
                    str(memory): "/dev/shm",
                    f"{place}/scratch": "/scratch",
                    str(source.path): "/lustre/imagenet",
                }
                view = watch(mount, names)
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(draw(view, footer="q quits · every 0.5 s"))
        target.parent.mkdir(parents=True, exist_ok=True)
        picture = console.export_svg(title="monarchfs status --watch")
        # A document must not load fonts from elsewhere.
        target.write_text(re.sub(r"@font-face \{.*?\n    \}", "", picture, flags=re.DOTALL))
    print(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY / "docs/images/status-watch.svg")
