"""A cluster as an administrator would set it up: our prolog, epilog, plugin and configuration."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.slurm.cluster import Cluster
from tests.support.fake_mounts import interpreter_for
from tests.support.mounting import REPOSITORY

DEADLINE_SECONDS = 16
SITE = """\
roots = ["{base}/lustre", "{base}/frozen"]
tier = ["{base}/local/tier=64M"]
options = "reserve_percent=1"
deadline_seconds = {deadline}
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
    text = SITE.format(base=base, deadline=DEADLINE_SECONDS, more=more)
    (base / "site.toml").write_text(text)


@contextmanager
def site_cluster() -> Iterator[Cluster]:
    """Three nodes whose prolog and epilog are ours, and a directory ``lustre`` that they share.
    Only where `cluster.missing` finds nothing, and there is /dev/fuse."""
    interpreter_for("nobody")
    base = Path(tempfile.mkdtemp(prefix="monarchfs-cluster-"))
    running = Cluster(base)
    try:
        _prepare(base)
        running.start(
            {
                "Prolog": f"{base}/prolog",
                "Epilog": f"{base}/epilog",
                "TaskProlog": f"{base}/task_prolog",
            }
        )
        yield running
    finally:
        running.close()
        shutil.rmtree(base, ignore_errors=True)


def _prepare(base: Path) -> None:
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
    _plugin(base)


def _plugin(base: Path) -> None:
    """Builds the plugin, where Slurm's headers are, and has the cluster load it."""
    if not os.path.exists("/usr/include/slurm/spank.h") or shutil.which("cc") is None:
        return
    subprocess.run(
        ["make", "-s", "-C", str(REPOSITORY / "slurm"), f"BUILD={base}/plugin"], check=True
    )
    (base / "plugstack.conf").write_text(f"required {base}/plugin/monarchfs.so\n")
