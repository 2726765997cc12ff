"""``make demo``: a training loop on real files, read from a slow source and through the mount.

Two epochs each, and two passes over a tree of small files. Ends with nothing left behind.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path

try:
    import numpy as np

    from bench.demo_data import PIXELS, ROW_FEATURES, Sample, generate, load
    from bench.demo_model import Classifier
except ImportError as missing:
    sys.exit(f"demo: {missing.name} is not installed: run make setup")
from bench.harness import MIB, Mount, Source, Unusable, check_fuse, reader_processes, workplace

READERS = 4
DELAY_SECONDS = 0.003
RATE_BYTES_PER_SECOND = 100_000_000
COLOURS = sys.stdout.isatty() and "NO_COLOR" not in os.environ


@dataclass(slots=True)
class Pass:
    """One pass over files; ``local_share`` of its opens, for a pass through the mount."""

    name: str
    seconds: float = 0.0
    files: int = 0
    data_bytes: int = 0
    wrong: int = 0
    losses: tuple[float, ...] = ()
    source_bytes: int = 0
    source_operations: int = 0
    counted_by_mount: int = 0
    local_share: float = 0.0


class Models:
    """One classifier for the images, one for the arrays."""

    def __init__(self) -> None:
        self.images = Classifier(PIXELS * PIXELS * 3, batch=16)
        self.arrays = Classifier(ROW_FEATURES, batch=64)

    def take_losses(self) -> tuple[float, ...]:
        return self.images.take_loss(), self.arrays.take_loss()


def bold(text: str) -> str:
    return f"\033[1m{text}\033[0m" if COLOURS else text


def say(text: str) -> None:
    print(text, flush=True)


def read_files(pool: Pool, root: Path, samples: Iterable[Sample], models: Models | None) -> Pass:
    """One pass in the order given; the readers work ahead, as those of a data loader do."""
    result = Pass("")
    started = time.perf_counter()
    for loaded in pool.imap(load, [(str(root), sample) for sample in samples]):
        result.files += 1
        result.data_bytes += loaded.size_bytes
        result.wrong += not loaded.correct
        if models is not None and loaded.features is not None and loaded.labels is not None:
            model = models.images if len(loaded.labels) == 1 else models.arrays
            model.add(loaded.features, loaded.labels)
    result.seconds = time.perf_counter() - started
    if models is not None:
        result.losses = models.take_losses()
    return result


def run_passes(
    pool: Pool, source: Source, mount: Mount | None, data: tuple[list[Sample], list[Sample]]
) -> list[Pass]:
    """Two epochs and two passes over the library, from the source or through the mount."""
    samples, library = data
    root = source.path if mount is None else mount.path
    models = Models()
    passes: list[Pass] = []
    for name in ("epoch 1", "epoch 2", "library", *(("library again",) if mount else ())):
        files, trained = (library, None) if name.startswith("library") else (samples, models)
        order = np.random.default_rng(len(passes)).permutation(len(files))
        source.take_counts()
        before = mount.wait_idle() if mount is not None else None
        result = read_files(pool, root, [files[number] for number in order], trained)
        result.name = name
        if mount is not None and before is not None:
            after = mount.wait_idle()
            local = after["served"]["local_opens"] - before["served"]["local_opens"]
            remote = after["served"]["source_opens"] - before["served"]["source_opens"]
            # None at all where the kernel had all pages: with immutable it opens without asking.
            result.local_share = local / (local + remote) if local + remote else 1.0
            result.counted_by_mount = (
                after["source_io"]["read_bytes"] - before["source_io"]["read_bytes"]
            )
        result.source_bytes, result.source_operations = source.take_counts()
        passes.append(result)
        losses = ", ".join(f"{loss:.3f}" for loss in result.losses)
        trained_to = f", loss of images and arrays {losses}" if losses else ""
        say(f"  {name}: {result.seconds:.1f} s for {result.files} files{trained_to}")
    return passes


def pairs(direct: list[Pass], mounted: list[Pass]) -> list[tuple[Pass, Pass]]:
    """Each pass through the mount with what it is compared with."""
    return [(direct[min(n, len(direct) - 1)], through) for n, through in enumerate(mounted)]


def print_table(direct: list[Pass], mounted: list[Pass]) -> None:
    columns = "{:<16}{:>10}{:>12}{:>11}{:>17}{:>26}"
    heads = ("direct", "monarchfs", "speed-up", "served locally", "read from the source")
    say("\n" + bold(columns.format("", *heads)))
    for plain, through in pairs(direct, mounted):
        share = through.source_bytes / through.data_bytes
        say(
            columns.format(
                through.name,
                f"{plain.seconds:.1f} s",
                f"{through.seconds:.1f} s",
                f"{plain.seconds / through.seconds:.1f} x",
                f"{through.local_share:.0%}",
                f"{through.source_bytes / MIB:.1f} MiB ({share:.2f} x data)",
            )
        )


def check(direct: list[Pass], mounted: list[Pass]) -> list[str]:
    """What is not as it should be."""
    complaints = []
    wrong = sum(one.wrong for one in (*direct, *mounted))
    if wrong:
        complaints.append(f"{wrong} files were not what had been written")
    for plain, through in pairs(direct, mounted):
        if plain.losses != through.losses:
            complaints.append(f"{plain.name}: the losses differ: other data or another order")
        if through.source_bytes != through.counted_by_mount:
            complaints.append(
                f"{through.name}: the source counted {through.source_bytes} bytes,"
                f" monarchfs status {through.counted_by_mount}"
            )
    if not all(last < first for first, last in zip(*(p.losses for p in direct[:2]), strict=True)):
        complaints.append("the model did not learn")
    return complaints


def demo(place: Path) -> list[str]:
    say("writing images, arrays and a copy of Python's library")
    backing = place / "data"
    backing.mkdir()
    data = generate(backing)
    say(
        f"  {len(data[0])} files to train on, {len(data[1])} files of the library;"
        f" the source takes {DELAY_SECONDS * 1000:g} ms an operation"
        f" and gives {RATE_BYTES_PER_SECOND / 1e6:g} MB/s"
    )
    with Source(backing, place / "slow") as source, reader_processes(READERS) as pool:
        source.faults(delay=DELAY_SECONDS, rate=RATE_BYTES_PER_SECOND)
        say(f"training from the source, {READERS} reader processes, random order")
        direct = run_passes(pool, source, None, data)
        say("the same through monarchfs mount --freshness immutable")
        with Mount(source.path, place / "monarchfs", "--freshness", "immutable") as mount:
            mounted = run_passes(pool, source, mount, data)
    print_table(direct, mounted)
    complaints = check(direct, mounted)
    if not complaints:
        files = sum(one.files for one in (*direct, *mounted))
        say(f"\n{files} reads compared with their checksums: all the same; losses are the same too")
    return complaints


def main() -> int:
    started = time.perf_counter()
    try:
        check_fuse()
        say("this takes about a minute: the same training twice, and what differs")
        with workplace("demo") as place:
            complaints = demo(place)
    except Unusable as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; everything is unmounted and removed", file=sys.stderr)
        return 130
    for complaint in complaints:
        print(f"demo: {complaint}", file=sys.stderr)
    say(f"unmounted and removed; {time.perf_counter() - started:.0f} s in all")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
