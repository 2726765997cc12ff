"""The demo's data set: a library tree, JPEG images and array shards, and how a sample is read."""

from __future__ import annotations

import io
import os
import shutil
import sysconfig
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bench.harness import forget_pages

CLASSES = 8
IMAGES = 480
IMAGE_SIDE = 224
SHARDS = 8
SHARD_ROWS = 4096
ROW_FEATURES = 256
PIXELS = 16
"""An image is shrunk to so many pixels a side for the model."""

Features = NDArray[np.float32]
Labels = NDArray[np.int64]


class Sample(NamedTuple):
    """A file to train on; ``path`` is relative to the data set, ``checksum`` its CRC-32."""

    path: str
    checksum: int
    label: int = -1


class Loaded(NamedTuple):
    """What a reader process made of a file. No features: a file that is only read."""

    correct: bool
    size_bytes: int
    features: Features | None
    labels: Labels | None


def generate(root: Path) -> tuple[list[Sample], list[Sample]]:
    """Writes the data set; what there is to train on, and the files of the library tree."""
    samples = [*_write_images(root / "images"), *_write_shards(root / "arrays")]
    samples = [s._replace(path=str(Path(s.path).relative_to(root))) for s in samples]
    return samples, _copy_library(root, "library")


def _write_images(folder: Path) -> list[Sample]:
    """Noisy pictures with a bright spot; where it lies is the class."""
    rng = np.random.default_rng(1)
    rows, columns = np.mgrid[0:IMAGE_SIDE, 0:IMAGE_SIDE].astype(np.float32) / IMAGE_SIDE
    samples = []
    for number in range(IMAGES):
        label = number % CLASSES
        angle = 2 * np.pi * label / CLASSES + rng.normal(0, 0.2)
        x, y = 0.5 + 0.3 * np.cos(angle), 0.5 + 0.3 * np.sin(angle)
        spot = np.exp(-((columns - x) ** 2 + (rows - y) ** 2) / 0.02)
        colour = rng.uniform(20, 70, 3)
        picture = 60 + spot[..., None] * colour + rng.normal(0, 25, (IMAGE_SIDE, IMAGE_SIDE, 3))
        path = folder / f"class{label}" / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(path, quality=92)
        samples.append(Sample(str(path), zlib.crc32(path.read_bytes()), label))
    return samples


def _write_shards(folder: Path) -> list[Sample]:
    """Rows around one centre a class; the first column is the label."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(2)
    centres = rng.normal(0, 0.15, (CLASSES, ROW_FEATURES))
    samples = []
    for number in range(SHARDS):
        labels = rng.integers(0, CLASSES, SHARD_ROWS)
        rows = centres[labels] + rng.normal(0, 1, (SHARD_ROWS, ROW_FEATURES))
        path = folder / f"shard{number:02d}.npy"
        np.save(path, np.column_stack([labels, rows]).astype(np.float32))
        samples.append(Sample(str(path), zlib.crc32(path.read_bytes())))
    return samples


def _copy_library(root: Path, name: str) -> list[Sample]:
    """Python's own standard library, as small real files."""
    skipped = shutil.ignore_patterns(
        *("__pycache__", "site-packages", "dist-packages", "test", "config-*")
    )
    shutil.copytree(sysconfig.get_path("stdlib"), root / name, symlinks=True, ignore=skipped)
    samples = []
    for folder, _folders, files in os.walk(root / name):
        for file in sorted(files):
            path = Path(folder, file)
            if not path.is_symlink():
                samples.append(Sample(str(path.relative_to(root)), zlib.crc32(path.read_bytes())))
    return samples


def load(task: tuple[str, Sample]) -> Loaded:
    """Reads and decodes one file below a directory; runs in a reader process."""
    root, sample = task
    with open(os.path.join(root, sample.path), "rb") as file:
        # A real data set does not fit into memory: nothing may come from an earlier epoch's pages.
        forget_pages(file.fileno())
        data = file.read()
    correct = zlib.crc32(data) == sample.checksum
    features: Features | None = None
    labels: Labels | None = None
    if sample.path.endswith(".jpg"):
        features = _pixels(data)
        labels = np.array([sample.label])
    elif sample.path.endswith(".npy"):
        table: NDArray[Any] = np.load(io.BytesIO(data))
        features = table[:, 1:]
        labels = table[:, 0].astype(np.int64)
    return Loaded(correct, len(data), features, labels)


def _pixels(data: bytes) -> Features:
    image = Image.open(io.BytesIO(data))
    small = image.convert("RGB").resize((PIXELS, PIXELS), Image.Resampling.BOX)
    pixels = np.frombuffer(small.tobytes(), dtype=np.uint8).reshape(1, -1)
    return ((pixels - 70.0) / 40).astype(np.float32)
