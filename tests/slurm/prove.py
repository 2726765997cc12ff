"""Brings up a Slurm cluster of three nodes on this machine, and shows on it what is promised for
clusters, one line each: ``make cluster``, or ``python -m tests.slurm.prove [NAME...]``.

Takes one to two minutes, as root. Nothing is left of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.slurm.cluster import cannot_start

TESTS = str(Path(__file__).with_name("test_cluster.py"))


def main(names: Sequence[str]) -> int:
    """0 if all that was asked for could be shown."""
    if reason := cannot_start():
        print(f"no cluster can be started here: it {reason}", file=sys.stderr)
        return 1
    print("starting a cluster; what is shown takes two minutes", flush=True)
    chosen = " or ".join(names) or "test_what_is_to_be_shown"
    return int(pytest.main([TESTS, "-q", "-k", chosen]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
