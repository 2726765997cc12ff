"""One cluster for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.site import site_cluster
from tests.support.surroundings import no_fuse, no_namespaces


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    if reason := missing() or no_fuse() or no_namespaces():
        pytest.skip(reason)
    with site_cluster() as running:
        yield running
