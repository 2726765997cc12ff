"""Brings up a Slurm cluster of three nodes on this machine, and shows on it what is promised for
clusters, one line each: ``make cluster``, or ``python -m tests.slurm.prove [NAME...]``.

Takes one to two minutes, as root. Nothing is left of it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.slurm import proofs
from tests.slurm.cluster import NODES, Cluster, missing
from tests.slurm.site import site_cluster
from tests.support.mounting import fuse_mounts, processes_about
from tests.support.surroundings import no_fuse, no_namespaces

PROOFS: tuple[Callable[[Cluster], str], ...] = (
    proofs.a_job_on_three_nodes_reads_its_dataset_through_mounts,
    proofs.the_nodes_of_a_job_share_what_each_has_read,
    proofs.twenty_jobs_in_a_burst_share_two_datasets,
    proofs.the_jobs_of_an_array_use_one_mount_that_lingers,
    proofs.a_source_that_hangs_delays_a_job_for_no_longer_than_the_deadline,
    proofs.an_epilog_ends_though_a_process_sits_in_the_mount,
    proofs.a_killed_worker_costs_its_job_nothing,
    proofs.a_killed_supervisor_costs_its_job_and_no_other,
    proofs.a_node_that_was_switched_off_serves_the_next_job,
    proofs.nobody_else_gets_anything_of_a_mount_or_its_cache,
    proofs.prometheus_tells_a_jobs_local_share,
    proofs.without_an_administrator_a_step_runs_its_own_mount,
    proofs.a_mount_of_run_outlives_the_job_that_made_it,
)

FOR_USERS = PROOFS[-2:]
"""In which an ordinary user opens the device."""
DEVICE = "/dev/fuse"


def main(names: Sequence[str]) -> int:
    """0 if all that was asked for could be shown, else 1; 2 for a name that is not known."""
    chosen = [proof for proof in PROOFS if not names or proof.__name__ in names]
    if unknown := set(names) - {proof.__name__ for proof in PROOFS}:
        print(f"no such proof: {min(unknown)}; there are:", file=sys.stderr)
        print("\n".join(f"  {proof.__name__}" for proof in PROOFS), file=sys.stderr)
        return 2
    if reason := missing() or no_fuse() or no_namespaces():
        print(f"no cluster can be started here: it {reason}", file=sys.stderr)
        return 1
    # So that what was begun is taken back.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    began = time.monotonic()
    shown: list[str] = []
    print("starting a cluster; what is shown takes two minutes", flush=True)
    try:
        with site_cluster() as slurm:
            base = slurm.base
            print(
                f"cluster of {len(NODES)} nodes up in {time.monotonic() - began:.1f} s", flush=True
            )
            shown = [_show(proof, slurm) for proof in chosen]
    except (AssertionError, OSError, pytest.skip.Exception, pytest.fail.Exception) as error:
        why = str(error).strip() or repr(error)
        print(f"the cluster could not be started or ended: {why}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    left = _left(base)
    print(f"{'FAILED' if left else 'ok'}  nothing left: {left or '0 processes, mounts and files'}")
    skipped = shown.count("skipped")
    print(
        f"{shown.count('ok')} of {len(chosen)} shown in {time.monotonic() - began:.0f} s"
        + (f"; {skipped} skipped" if skipped else "")
    )
    return int("FAILED" in shown or bool(left))


def _show(proof: Callable[[Cluster], str], slurm: Cluster) -> str:
    """Prints a line that begins with what became of it, and returns that."""
    began = time.monotonic()
    name = proof.__name__.replace("_", " ")
    if proof in FOR_USERS and not _open_to_all():
        reason = f"needs {DEVICE} open to everybody: chmod 666 {DEVICE}"
        print(f"skipped  {name}: {reason}", flush=True)
        return "skipped"
    try:
        measured = proof(slurm)
    except (AssertionError, OSError, KeyError, ValueError, pytest.fail.Exception) as error:
        lines = str(error).strip().splitlines() or [repr(error)]
        print(f"FAILED  {name}: {lines[0]}", flush=True)
        # Where in the proof, for one that gives no words of its own.
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(f"  {where.line} ({where.filename}:{where.lineno})", file=sys.stderr)
        print("\n".join(lines[1:]), file=sys.stderr, flush=True)
        return "FAILED"
    print(f"ok  {name} ({time.monotonic() - began:.0f} s): {measured}", flush=True)
    return "ok"


def _open_to_all() -> bool:
    return os.stat(DEVICE).st_mode & 0o006 == 0o006


def _left(base: Path) -> str:
    found = [f"process {pid}" for pid in processes_about(str(base))]
    found += [f"mount {point}" for point in fuse_mounts(str(base))]
    return ", ".join(found + ([str(base)] if base.exists() else []))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
