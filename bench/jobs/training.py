"""What the training jobs share: how they are paced and asked, and how shards of records are read.

A job prints ``{"ready": true}`` once everything is loaded. Then it waits for the number of an
epoch, a line each, and at its end prints ``epoch``, ``seconds`` (in all), ``waited_seconds`` (what
of it the accelerator had nothing to do), ``samples``, ``bytes`` and ``checksum``. End of input ends
the job.

The accelerator is a sleep: it takes a set time for each batch and no processor, as a GPU does while
the loader reads ahead. The checksum is the sum of the records' CRC-32, so it is the same in any
order.

Only the standard library here: it runs with the frameworks' own Python.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

# What tf.data reads at once of a file of records.
READ_BYTES = 256 << 10
MODULUS = 1 << 64

Item = TypeVar("Item")


class Batch(NamedTuple):
    samples: int
    bytes: int
    checksum: int


def parser() -> argparse.ArgumentParser:
    """The arguments of every job."""
    result = argparse.ArgumentParser()
    result.add_argument("data", type=Path, help="a directory of *.tfrecord")
    result.add_argument("--batch", type=int, default=64, help="records")
    result.add_argument("--compute", type=float, default=0.0, help="seconds a batch")
    result.add_argument("--readers", type=int, default=4, help="threads or processes that read")
    result.add_argument("--open-shards", type=int, default=8, help="read side by side, all readers")
    result.add_argument("--shuffle", type=int, default=256, help="records to choose the next from")
    result.add_argument("--ahead", type=int, default=4, help="batches read ahead")
    result.add_argument("--cache", type=Path, help="where the framework keeps its own copy")
    return result


def shards(root: Path) -> list[str]:
    """The files, listed as a job does it at its start."""
    return sorted(str(path) for path in root.glob("*.tfrecord"))


def records(path: str) -> Iterator[bytes]:
    """Those of one TFRecord file: length, its CRC, data, their CRC, all in one pass."""
    with open(path, "rb", buffering=READ_BYTES) as file:
        while header := file.read(12):
            (length,) = struct.unpack_from("<Q", header)
            data = file.read(length + 4)
            if len(data) != length + 4:
                raise ValueError(f"{path} ends within a record")
            yield data[:length]


def interleaved(paths: Sequence[str], width: int) -> Iterator[bytes]:
    """A record of each of ``width`` files in turn; who ends makes room for the next file."""
    waiting = iter(paths)
    running = deque(records(path) for path in islice(waiting, width))
    while running:
        file = running.popleft()
        record = next(file, None)
        if record is not None:
            yield record
            running.append(file)
        else:
            running.extend(records(path) for path in islice(waiting, 1))


def shuffled(items: Iterable[Item], room: int, rng: random.Random) -> Iterator[Item]:
    """Each next one is chosen from ``room`` of them, as tf.data's shuffle does it."""
    held: list[Item] = []
    for item in items:
        if len(held) < room:
            held.append(item)
            continue
        place = rng.randrange(room)
        held[place], item = item, held[place]
        yield item
    rng.shuffle(held)
    yield from held


def batch_of(samples: Sequence[bytes]) -> Batch:
    return Batch(
        len(samples),
        sum(len(sample) for sample in samples),
        sum(zlib.crc32(sample) for sample in samples) % MODULUS,
    )


def train(compute_seconds: float, epoch: Callable[[int], Iterable[Batch]]) -> None:
    """Runs the epochs that are asked for; ``epoch`` gives the batches of one."""
    _say({"ready": True})
    for line in sys.stdin:
        number = int(line)
        samples = size = checksum = 0
        waited = 0.0
        started = asked = time.perf_counter()
        for batch in epoch(number):
            waited += time.perf_counter() - asked
            time.sleep(compute_seconds)
            samples += batch.samples
            size += batch.bytes
            checksum = (checksum + batch.checksum) % MODULUS
            asked = time.perf_counter()
        waited += time.perf_counter() - asked
        _say(
            {
                "epoch": number,
                "seconds": time.perf_counter() - started,
                "waited_seconds": waited,
                "samples": samples,
                "bytes": size,
                "checksum": checksum,
            }
        )


def _say(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)
