"""PyTorch's DataLoader over torchvision's ImageFolder: a hundred thousand bytes a file.

The pictures are PPM: decoding them costs next to nothing. With JPEG two processors would be the
limit, whatever the storage; a training node has dozens.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from bench.jobs.files import BATCH, READERS, SEED, Epochs, collated, main, seen

SIDE = 192
CLASSES = 16
# torchvision describes these operators of its own at import; datasets never call them.
OPERATORS = ("nms", "qnms")


def generate(root: Path, size: int) -> None:
    rng = np.random.default_rng(SEED)
    for number in range(size // (SIDE * SIDE * 3)):
        folder = root / f"class{number % CLASSES:02d}"
        folder.mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:06d}.ppm")


def import_datasets() -> Any:
    """torchvision.datasets. Its wheels are compiled for CUDA's torch; beside another one their
    operators cannot be loaded, and without them it is not imported."""
    try:
        return importlib.import_module("torchvision.datasets")
    except RuntimeError:
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        for operator in OPERATORS:
            torch.library.define(f"torchvision::{operator}", "() -> ()")
        return importlib.import_module("torchvision.datasets")


def to_tensor(picture: Any) -> Any:
    pixels = np.array(picture)
    return torch.from_numpy(pixels), *seen(pixels)


def epochs(root: Path) -> Epochs:
    dataset = import_datasets().ImageFolder(str(root), transform=to_tensor)
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=True,
        num_workers=READERS,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(SEED),
    )
    return lambda _number: collated(sample for sample, _labels in loader)


if __name__ == "__main__":
    main(generate, epochs)
