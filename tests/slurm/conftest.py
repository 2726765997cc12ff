"""One cluster for all tests here."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.site import site_cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(f"a Slurm cluster {reason}")
    if not os.path.exists("/dev/fuse"):
        pytest.skip("needs /dev/fuse")
    with site_cluster() as running:
        yield running
