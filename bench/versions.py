"""Files that tell by themselves whether they are whole: number, version, bytes, checksum."""

from __future__ import annotations

import random
import time
import zlib
from pathlib import Path

FILES, SMALLEST, LARGEST = 240, 1 << 10, 4 << 20


def write_version(root: Path, number: int, version: int) -> None:
    """Another version of a file, put in the place of the one before."""
    rng = random.Random(f"{number} {version}")
    size = int(SMALLEST * (LARGEST / SMALLEST) ** random.Random(number).random())
    data = b"%08d%08d" % (number, version) + rng.randbytes(size + version % 7 * 100)
    # Not below the root, where it would be a file too.
    new = root.parent / f"new-{number}"
    new.write_bytes(data + zlib.crc32(data).to_bytes(4, "big"))
    new.rename(root / name_of(number))


def name_of(number: int) -> str:
    return f"{number % 8}/{number:05d}.bin"


def version_of(number: int, data: bytes) -> int | None:
    """None if these are not all the bytes of one version of the file."""
    whole = zlib.crc32(data[:-4]).to_bytes(4, "big") == data[-4:] and len(data) > 20
    return int(data[8:16]) if whole and data[:8] == b"%08d" % number else None


def read_until_gone(task: tuple[str, float]) -> tuple[int, list[str], list[tuple[float, str]]]:
    """Reads files picked at random until one fails, as all do once the mount is dead: how many,
    what was wrong, and the failure with its time.monotonic(). Runs in a reader process."""
    root, seed = task
    rng = random.Random(seed)
    count = 0
    wrong: list[str] = []
    while True:
        number = rng.randrange(FILES)
        try:
            with open(f"{root}/{name_of(number)}", "rb") as file:
                data = file.read()
        except OSError as error:
            return count, wrong, [(time.monotonic(), f"{name_of(number)}: {error}")]
        count += 1
        if version_of(number, data) is None:
            wrong.append(f"{name_of(number)}: {len(data)} bytes, not those of one version")


def read_all(root: Path, versions: list[int]) -> list[str]:
    """What is wrong with the files as they are now."""
    wrong = []
    for number in random.sample(range(FILES), FILES):
        try:
            data = (root / name_of(number)).read_bytes()
        except OSError as error:
            wrong.append(f"{name_of(number)}: {error}")
            continue
        if (version := version_of(number, data)) != versions[number]:
            wrong.append(f"{name_of(number)}: version {version} instead of {versions[number]}")
    return wrong
