"""Running other programs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from os import PathLike
from typing import Any


def execute(
    words: Sequence[str | PathLike[str]], *, timeout: float = 100, check: bool = False, **more: Any
) -> subprocess.CompletedProcess[str]:
    """A program's exit code and what it says, as text."""
    return subprocess.run(
        words, capture_output=True, text=True, timeout=timeout, check=check, **more
    )
