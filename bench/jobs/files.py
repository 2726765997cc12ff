"""What the jobs that bring their own dataset have in common, beside `bench.jobs.training`.

Such a job is started as ``NAME generate ROOT BYTES``, which writes about so many bytes, or as
``NAME train ROOT``.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.jobs.training import MODULUS, Batch, train

READERS = 2
BATCH = 16
SEED = 1

Epochs = Callable[[int], Iterable[Batch]]


def seen(data: Any) -> tuple[int, int]:
    """Size and CRC-32 of anything with a buffer: what a loader hands on beside a sample."""
    view = memoryview(data).cast("B")
    return len(view), zlib.crc32(view)


def batch_of(lengths: Iterable[int], checksums: Iterable[int]) -> Batch:
    """Of what `seen` said of its samples."""
    sizes = list(lengths)
    return Batch(len(sizes), sum(sizes), sum(checksums) % MODULUS)


def collated(loader: Iterable[Any]) -> Iterator[Batch]:
    """Of a DataLoader whose samples are a tensor, its length and its checksum."""
    for _data, lengths, checksums in loader:
        yield batch_of(lengths.tolist(), checksums.tolist())


def main(generate: Callable[[Path, int], None], open_epochs: Callable[[Path], Epochs]) -> None:
    """The command line of such a job."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("generate")
    making.add_argument("root", type=Path)
    making.add_argument("bytes", type=int)
    commands.add_parser("train").add_argument("root", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "generate":
        arguments.root.mkdir(parents=True, exist_ok=True)
        generate(arguments.root, arguments.bytes)
    else:
        train(0.0, open_epochs(arguments.root))
