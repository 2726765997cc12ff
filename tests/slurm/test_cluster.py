"""Jobs of ordinary users on a real cluster."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.slurm import proofs
from tests.slurm.cluster import Cluster, cannot_start, site_cluster
from tests.slurm.proofs import VERIFY, dataset, digest, nothing_left, on
from tests.support.fake_mounts import device_mode

PROOFS: tuple[Callable[[Cluster], str], ...] = (
    proofs.a_job_on_three_nodes_reads_its_dataset_through_mounts,
    proofs.the_nodes_of_a_job_share_what_each_has_read,
    proofs.twenty_jobs_in_a_burst_share_two_datasets,
    proofs.the_jobs_of_an_array_use_one_mount_that_lingers,
    proofs.a_source_that_hangs_delays_a_job_for_no_longer_than_the_deadline,
    proofs.an_epilog_ends_though_a_process_sits_in_the_mount,
    proofs.a_node_that_was_switched_off_serves_the_next_job,
    proofs.nobody_else_gets_anything_of_a_mount_or_its_cache,
    proofs.without_an_administrator_a_step_runs_its_own_mount,
)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    if reason := cannot_start():
        pytest.skip(reason)
    with site_cluster() as running:
        yield running


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.__name__)
def test_what_is_to_be_shown(
    slurm: Cluster, proof: Callable[[Cluster], str], capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    # An ordinary user's mounts want the device open to everybody, as it is on most machines.
    with device_mode(0o666) if proof is PROOFS[-1] else nullcontext():
        measured = proof(slurm)
    with capsys.disabled():
        name, seconds = proof.__name__.replace("_", " "), time.monotonic() - began
        print(f"\nok  {name} ({seconds:.0f} s): {measured}", flush=True)


def test_the_plugin_hands_a_request_to_the_prolog(slurm: Cluster) -> None:
    if not (slurm.base / "plugstack.conf").read_text():
        pytest.skip("needs Slurm's headers: apt-get install libslurm-dev gcc")
    data = dataset(slurm, "with plugin")
    job = slurm.sbatch(VERIFY, "-N1", f'--monarchfs="{data}":prefetch=all')
    slurm.wait(job)
    assert digest(data) in slurm.output(job), slurm.logs()
    assert "root=/run/monarchfs/slurm/shares/" in slurm.output(job)
    done = slurm.run(
        "ctl", "sbatch", "--wrap=true", "--chdir=/tmp", "--monarchfs=data", user="nobody"
    )
    assert done.returncode != 0
    assert "name a directory by its whole path" in done.stderr
    done = slurm.run("ctl", "srun", "--help")
    assert "--monarchfs=PATH" in done.stdout
    nothing_left(slurm)


def test_what_the_site_gives_and_what_it_refuses(slurm: Cluster) -> None:
    given, own = dataset(slurm, "given"), dataset(slurm, "own")
    script = "env | grep MONARCHFS_ | sort\n"
    job = slurm.sbatch(script, "-N1", "-p", "gpu", f"--comment=x monarchfs={own}:name=mine y")
    refused = slurm.sbatch(script, "-N1", "--comment=monarchfs=/etc")
    wrong = slurm.sbatch(script, "-N1", f"--comment=monarchfs={own}:user=root")
    plain = slurm.sbatch(script, "-N1", "--comment=don't")
    slurm.wait(job, refused, wrong, plain)
    lines = dict(line.split("=", 1) for line in slurm.output(job).splitlines())
    assert set(lines) == {"MONARCHFS_ROOT", "MONARCHFS_DATA_MINE", "MONARCHFS_DATA_GIVEN"}
    assert lines["MONARCHFS_ROOT"] == lines["MONARCHFS_DATA_MINE"]
    assert lines["MONARCHFS_DATA_MINE"].endswith("/own")
    assert lines["MONARCHFS_DATA_GIVEN"].endswith("/given")
    assert lines["MONARCHFS_DATA_GIVEN"].startswith("/run/monarchfs/slurm/shares/")
    assert "MONARCHFS_DATA_ETC=/etc\n" in slurm.output(refused)
    assert "this job may ask for what lies below" in slurm.output(refused)
    assert slurm.output(wrong).startswith("MONARCHFS_WARNING=")
    assert "'user=root' is no option that a job may give" in slurm.output(wrong)
    assert slurm.output(plain) == ""
    assert given.exists()
    nothing_left(slurm)


def gc(slurm: Cluster, *more: str) -> dict[str, Any]:
    words = (f"{slurm.base}/monarchfs", "gc", "--json", "--config", f"{slurm.base}/site.toml")
    done = slurm.run("n3", *words, *more, environment={"SLURMD_NODENAME": "n3"})
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_gc_takes_out_unknown_jobs_and_what_killed_daemons_leave(slurm: Cluster) -> None:
    data = dataset(slurm, "gc")
    job = slurm.sbatch("echo begun; sleep 60\n", *on("n3", data))
    slurm.wait_for(lambda: "begun" in slurm.output(job), "the job to run")
    point = slurm.mount_of("n3", data)
    assert point is not None
    jobs = Path(point).parent / "jobs"
    stale = json.dumps({"entered_unix_seconds": 1.0, "met": []})
    slurm.run("n3", "sh", "-c", f"cat > {jobs}/999999", stdin=stale)
    (one,) = gc(slurm, "--dry-run")["found"]
    assert (one["kind"], one["path"], one["removed"]) == ("job", f"{jobs}/999999", False)
    assert [one["removed"] for one in gc(slurm)["found"]] == [True]
    assert slurm.run("n3", "ls", str(jobs)).stdout.split() == [str(job)]
    assert slurm.mount_of("n3", data) == point, "what is in use stays"
    # Every daemon of ours on this node, as if memory had run out.
    slurm.run("n3", "pkill", "-KILL", "-f", "monarchfs[.]")
    socket = "import socket; socket.socket(socket.AF_UNIX).bind('/run/monarchfs/dead.sock')"
    slurm.run("n3", "python3", "-c", socket)
    found = {one["kind"]: one for one in gc(slurm)["found"]}
    assert (found["mount"]["path"], found["mount"]["removed"]) == (point, True)
    assert found["socket"]["path"] == "/run/monarchfs/dead.sock"
    assert slurm.mount_of("n3", data) is None
    assert slurm.run("n3", "sh", "-c", "ls /run/monarchfs/*.*").stdout == ""
    slurm.run("ctl", "scancel", str(job))
    slurm.wait(job)
    assert gc(slurm) == {"dry_run": False, "found": [], "notes": []}
    nothing_left(slurm)


def test_another_set_of_groups_gets_another_mount_and_cache(slurm: Cluster) -> None:
    data = dataset(slurm, "grouped")
    os.chown(data, 0, 60)
    data.chmod(0o750)
    groups = slurm.base / "groups"
    lines = Path("/etc/group").read_text().splitlines()
    assert any(line.startswith("games:x:60:") for line in lines), "Debian's groups"
    groups.write_text("\n".join(f"{x}nobody" if x.startswith("games:") else x for x in lines))
    job = slurm.sbatch(VERIFY, *on("n2", data))
    slurm.wait(job)
    assert "Permission denied (for nobody)" in slurm.output(job)
    slurm.run("n2", "mount", "--bind", str(groups), "/etc/group")
    slurm.run("ctl", "scontrol", "reconfigure")
    try:
        script = "ls $MONARCHFS_ROOT | wc -l; echo $MONARCHFS_ROOT; sleep 60\n"
        job = slurm.sbatch(script, "-N1", "-w", "n2", f"--comment=monarchfs={data}:prefetch=all")
        slurm.wait_for(lambda: "/run/" in slurm.output(job), "the job with the group to be served")
        assert slurm.output(job).startswith("12\n"), "read with the group, by the mount's daemon"
    finally:
        slurm.run("n2", "umount", "/etc/group")
    # The group is taken away again: what was copied with it is out of reach, though it is mounted.
    other = slurm.sbatch(VERIFY, *on("n2", data))
    slurm.wait(other)
    assert "Permission denied (for nobody)" in slurm.output(other)
    assert f"root={data} " in slurm.output(other)
    slurm.run("ctl", "scancel", str(job))
    slurm.wait(job)
    nothing_left(slurm)
