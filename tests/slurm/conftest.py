"""One cluster for all tests here, as an administrator would set it up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faking import interpreter_for
from tests.mounting import REPOSITORY
from tests.slurm.cluster import Cluster, cluster, missing

SITE = """\
roots = ["{base}/lustre", "{base}/frozen"]
tier = ["{base}/local/tier=64M"]
options = "reserve_percent=1"
deadline_seconds = 8
cache_dir = "{base}/local/cache"
report_dir = "{base}/local/reports"
log = "{base}/local/log/slurm.log"
{more}

[[dataset]]
path = "{base}/lustre/given"
partitions = ["gpu"]
options = "name=GIVEN"
"""


def configure(base: Path, more: str = "") -> None:
    """Writes the site's configuration, for all nodes."""
    (base / "site.toml").write_text(SITE.format(base=base, more=more))


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Three nodes whose prolog and epilog are ours, and a directory ``lustre`` that they share."""
    if reason := missing():
        pytest.skip(f"a Slurm cluster {reason}")
    if not os.path.exists("/dev/fuse"):
        pytest.skip("needs /dev/fuse")
    interpreter_for("nobody")
    base = Path(tempfile.mkdtemp(prefix="monarchfs-cluster-"))
    (base / "lustre").mkdir()
    (base / "monarchfs").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m monarchfs.cli.main "$@"\n'
    )
    (base / "monarchfs").chmod(0o755)
    for name in ("prolog", "epilog", "task_prolog"):
        script = (
            f"#!/bin/sh\nMONARCHFS={base}/monarchfs exec {REPOSITORY}/slurm/{name}"
            + ("" if name == "task_prolog" else f" --config {base}/site.toml")
            + "\n"
        )
        (base / name).write_text(script)
        (base / name).chmod(0o755)
    configure(base)
    plugin(base)
    scripts = {
        "Prolog": f"{base}/prolog",
        "Epilog": f"{base}/epilog",
        "TaskProlog": f"{base}/task_prolog",
    }
    with cluster(scripts, base) as running:
        yield running


def plugin(base: Path) -> bool:
    """Builds the plugin, where Slurm's headers are, and has the cluster load it."""
    if not os.path.exists("/usr/include/slurm/spank.h") or shutil.which("cc") is None:
        return False
    subprocess.run(
        ["make", "-s", "-C", str(REPOSITORY / "slurm"), f"BUILD={base}/plugin"], check=True
    )
    (base / "plugstack.conf").write_text(f"required {base}/plugin/monarchfs.so\n")
    return True
