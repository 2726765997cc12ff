"""Jobs of ordinary users on a real cluster."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mounting import wait_for
from tests.slurm.cluster import NODES, Cluster
from tests.slurm.conftest import configure

VERIFY = """
cd "$MONARCHFS_ROOT" && find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum
echo "root=$MONARCHFS_ROOT warning=$MONARCHFS_WARNING"
"""


def dataset(slurm: Cluster, name: str, files: int = 12) -> Path:
    """A dataset of its own for a test; readable by everybody."""
    path = slurm.base / "lustre" / name
    path.mkdir()
    for number in range(files):
        (path / f"file{number:02}").write_bytes(os.urandom(20_000 + number))
    return path


def digest(path: Path) -> str:
    """What VERIFY prints of a directory first."""
    lines = "".join(
        f"{hashlib.sha256(one.read_bytes()).hexdigest()}  ./{one.name}\n"
        for one in sorted(path.iterdir())
    )
    return hashlib.sha256(lines.encode()).hexdigest()


def nothing_left(slurm: Cluster) -> None:
    """No mount of ours, no job in a set, no daemon, on any node; and all nodes are fine."""

    def left() -> str:
        points = [f"{node}: {point}" for node in NODES for point in slurm.monarchfs_mounts(node)]
        kept = "find /run/monarchfs/slurm/shares /run/monarchfs/slurm/env /run/monarchfs/slurm/jobs"
        files = [slurm.run(node, *kept.split(), "-mindepth", "1").stdout for node in NODES]
        return "\n".join(points + files).strip()

    wait_for(lambda: not left(), "mounts and what belongs to them to go")
    slurm.wait_idle()


def reports(slurm: Cluster, job: int) -> dict[str, dict[str, Any]]:
    """A job's reports by node, as written there."""
    found = {}
    for node in NODES:
        path = slurm.local_of(node) / "reports" / f"{job}.{node}.json"
        if path.exists():
            found[node] = json.loads(path.read_text())
    return found


def log_of(slurm: Cluster, node: str) -> str:
    return (slurm.local_of(node) / "log" / "slurm.log").read_text()


def test_a_job_on_three_nodes_reads_its_dataset_through_mounts(slurm: Cluster) -> None:
    data = dataset(slurm, "threenodes")
    script = f"srun sh -c '{VERIFY}{VERIFY}'\n"
    job = slurm.sbatch(script, "-N3", f"--comment=monarchfs={data}:prefetch=all")
    slurm.wait(job)
    output = slurm.output(job)
    assert output.count(digest(data)) == 6, output + slurm.logs()
    assert output.count("root=/run/monarchfs/slurm/shares/") == 6
    assert output.count("/threenodes warning=\n") == 6
    found = reports(slurm, job)
    assert set(found) == set(NODES)
    for node, report in found.items():
        (one,) = report["datasets"]
        assert one["source"] == str(data)
        assert one["mounted"] is True
        assert one["shared_with"] == []
        # What is read again the kernel has, and it does not ask to open it.
        assert one["local_opens"] + one["source_opens"] >= 12
        assert one["copies_failed"] == one["worker_restarts"] == 0
        size = sum(path.stat().st_size for path in data.iterdir())
        assert one["source_read_bytes"] == size
        assert one["peak_used_bytes"] >= size
        assert one["resident_after_seconds"] is not None
        shown = slurm.run(
            node, f"{slurm.base}/monarchfs", "report", str(job), "--dir", f"{slurm.local}/reports",
            user="nobody",
        )  # fmt: skip
        assert shown.returncode == 0, shown.stderr
        assert f"job {job} of nobody on {node}" in shown.stdout
        assert "copies failed" in shown.stdout
    nothing_left(slurm)


def test_twenty_jobs_in_a_burst_share_two_datasets(slurm: Cluster) -> None:
    pair = [dataset(slurm, f"burst{number}") for number in range(2)]
    jobs = [
        slurm.sbatch(VERIFY, "-N1", "-w", "n1", f"--comment=monarchfs={pair[number % 2]}")
        for number in range(20)
    ]
    slurm.wait(*jobs, seconds=90)
    for number, job in enumerate(jobs):
        output = slurm.output(job)
        assert digest(pair[number % 2]) in output, output + slurm.logs()
        assert "root=/run/monarchfs/slurm/shares/" in output, output + log_of(slurm, "n1")
    nothing_left(slurm)
    found = [reports(slurm, job)["n1"]["datasets"][0] for job in jobs]
    assert {one["source"] for one in found} == {str(path) for path in pair}
    # The source was read once for all of them, or once again where all had left meanwhile.
    assert any(one["shared_with"] for one in found)
    assert sum(not one["shared_with"] for one in found) < 10


def test_the_jobs_of_an_array_use_one_mount_that_lingers(slurm: Cluster) -> None:
    data = dataset(slurm, "array")
    configure(slurm.base, 'linger = "4s"')
    try:
        job = slurm.sbatch(
            VERIFY, "-N1", "-w", "n2", "--array=0-7%2", f"--comment=monarchfs={data}"
        )
        slurm.wait(job, seconds=90)
        output = slurm.output(job)
        assert output.count(digest(data)) == 8, output + slurm.logs()
        assert output.count("root=/run/monarchfs/slurm/shares/") == 8
        assert slurm.mount_of("n2", data) is not None, "it lingers"
        log = log_of(slurm, "n2")
        assert log.count(f"mounted {data} ") - log.count(f"unmounted {data} ") == 1, log
        assert log.count(f"shares {data} ") == 7, log
        nothing_left(slurm)
    finally:
        configure(slurm.base)


def test_a_source_that_hangs_delays_a_job_for_no_longer_than_the_deadline(slurm: Cluster) -> None:
    backing, point = slurm.base / "backing", slurm.base / "frozen"
    backing.mkdir()
    point.mkdir()
    done = slurm.run("n1", "bindfs", "-r", str(backing), str(point))
    assert done.returncode == 0, done.stderr
    pid = slurm.run("n1", "pgrep", "-f", f"^bindfs -r {backing}").stdout.split()[0]
    slurm.run("n1", "kill", "-STOP", pid)
    try:
        began = time.monotonic()
        job = slurm.sbatch(
            'echo "root=$MONARCHFS_ROOT warning=$MONARCHFS_WARNING"\n',
            *("-N1", "-w", "n1", f"--comment=monarchfs={point}"),
        )
        slurm.wait(job)
        # The deadline of 8 s, and what Slurm itself needs.
        assert time.monotonic() - began < 8 + 5
        assert slurm.output(job) == (f"root={point} warning={point} did not answer within 4 s\n"), (
            slurm.logs()
        )
        assert slurm.node_states()["n1"] == "idle"
        (one,) = reports(slurm, job)["n1"]["datasets"]
        assert one["mounted"] is False
        assert one["reason"] == f"{point} did not answer within 4 s"
    finally:
        slurm.run("n1", "kill", "-CONT", pid)
        slurm.run("n1", "umount", "-l", str(point))
    nothing_left(slurm)


def test_an_epilog_ends_though_a_process_sits_in_the_mount(slurm: Cluster) -> None:
    data = dataset(slurm, "sitting")
    # Out of the process group that Slurm kills.
    script = "cd $MONARCHFS_ROOT; setsid sleep 61 <file00 >/dev/null 2>&1 &\nsleep 0.5\n"
    job = slurm.sbatch(script, "-N1", "-w", "n3", f"--comment=monarchfs={data}")
    began = time.monotonic()
    slurm.wait(job)
    assert time.monotonic() - began < 8 + 5
    sitting = slurm.run("n3", "pgrep", "-f", "^sleep 61").stdout.split()
    assert len(sitting) == 1, "the process was to outlive its job"
    slurm.run("n3", "kill", *sitting)
    assert digest(data) in slurm.output(after(slurm, "n3", data))
    nothing_left(slurm)


def after(slurm: Cluster, node: str, data: Path) -> int:
    """The number of another job, which is over, that used the mount."""
    job = slurm.sbatch(VERIFY, "-N1", "-w", node, f"--comment=monarchfs={data}")
    slurm.wait(job)
    assert "root=/run/monarchfs/slurm/shares/" in slurm.output(job), slurm.logs()
    return job


def test_a_killed_worker_costs_its_job_nothing(slurm: Cluster) -> None:
    data = dataset(slurm, "worker")
    script = (
        "cd $MONARCHFS_ROOT\n"
        "round=0; while [ $round -lt 60 ]; do\n"
        "  find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum || echo failed\n"
        "  round=$((round + 1)); sleep 0.05\n"
        "done; echo done\n"
    )
    job = slurm.sbatch(script, "-N1", "-w", "n3", f"--comment=monarchfs={data}")
    wait_for(lambda: slurm.output(job).count("\n") > 3, "the job to read")
    point = slurm.mount_of("n3", data)
    assert point is not None
    status = slurm.run("n3", f"{slurm.base}/monarchfs", "status", point, "--json").stdout
    slurm.run("n3", "kill", "-KILL", str(json.loads(status)["worker"]["pid"]))
    slurm.wait(job)
    lines = slurm.output(job).splitlines()
    assert lines == [f"{digest(data)}  -"] * 60 + ["done"], slurm.logs()
    (one,) = reports(slurm, job)["n3"]["datasets"]
    assert one["worker_restarts"] == 1
    nothing_left(slurm)


def test_a_killed_supervisor_costs_its_job_and_no_other(slurm: Cluster) -> None:
    data = dataset(slurm, "killed")
    script = (
        "cd $MONARCHFS_ROOT; echo reading\n"
        "while cat file* >/dev/null 2>/tmp/null; do sleep 0.1; done; echo failed\n"
    ).replace("/tmp/null", "/dev/null")
    job = slurm.sbatch(script, "-N1", "-w", "n1", f"--comment=monarchfs={data}")
    wait_for(lambda: "reading" in slurm.output(job), "the job to read")
    point = slurm.mount_of("n1", data)
    registered = slurm.run("n1", "sh", "-c", "cat /run/monarchfs/*.json").stdout
    (entry,) = (json.loads(line) for line in registered.replace("}{", "}\n{").splitlines())
    assert entry["mountpoint"] == point
    slurm.run("n1", "kill", "-KILL", str(entry["supervisor_pid"]))
    slurm.wait(job)
    assert slurm.output(job).endswith("failed\n"), slurm.logs()
    (one,) = reports(slurm, job)["n1"]["datasets"]
    assert one["answered"] is False
    assert digest(data) in slurm.output(after(slurm, "n1", data))
    nothing_left(slurm)


def test_a_node_that_was_switched_off_serves_the_next_job(slurm: Cluster) -> None:
    data = dataset(slurm, "switchedoff")
    first = after(slurm, "n2", data)
    assert digest(data) in slurm.output(first)
    job = slurm.sbatch(
        "echo begun; sleep 60\n",
        *("-N1", "-w", "n2", "--no-requeue", f"--comment=monarchfs={data}"),
    )
    wait_for(lambda: "begun" in slurm.output(job), "the job to run")
    slurm.machines["n2"].power_cut()
    slurm.boot("n2")
    slurm.run("ctl", "scancel", str(job))
    slurm.wait(job)
    slurm.wait_idle()
    last = after(slurm, "n2", data)
    assert digest(data) in slurm.output(last)
    # What was copied before is still there.
    assert reports(slurm, last)["n2"]["datasets"][0]["source_read_bytes"] == 0
    nothing_left(slurm)


def test_nobody_else_gets_anything_of_a_mount_or_its_cache(slurm: Cluster) -> None:
    data = dataset(slurm, "private")
    data.chmod(0o750)
    os.chown(data, -1, 65534)
    job = slurm.sbatch(
        "cat $MONARCHFS_ROOT/* >/dev/null && echo $MONARCHFS_ROOT; sleep 60\n",
        *("-N1", "-w", "n1", f"--comment=monarchfs={data}:prefetch=all"),
    )
    wait_for(lambda: "/run/" in slurm.output(job), "the job to have read")
    point = slurm.output(job).strip()
    for user in ("daemon", None):
        # Not even root: the mount is its user's alone.
        assert slurm.run("n1", "ls", point, user=user).returncode != 0, user
    (key,) = os.listdir(slurm.local_of("n1") / "cache" / "slurm")[-1:]
    kept = [f"{slurm.local}/tier", f"{slurm.local}/cache/slurm", "/run/monarchfs/slurm"]
    seen = slurm.run("n1", "find", *kept, "-readable", "-type", "f", user="daemon").stdout
    assert seen == ""
    inner = slurm.run("n1", "find", f"{slurm.local}/tier", "-mindepth", "2", user=None).stdout
    for path in inner.split():
        assert slurm.run("n1", "ls", path, user="daemon").returncode != 0, path
    assert slurm.run("n1", "ls", "/run/monarchfs/slurm/env", user="daemon").returncode != 0
    # The second user's own request gets what that user may read: nothing.
    other = slurm.sbatch(
        'echo "root=$MONARCHFS_ROOT"; ls $MONARCHFS_ROOT\n',
        *("-N1", "-w", "n1", f"--comment=monarchfs={data}"),
        user="daemon",
    )
    slurm.wait(other)
    assert f"root={data}\n" in slurm.output(other, "daemon")
    assert "Permission denied" in slurm.output(other, "daemon")
    slurm.run("ctl", "scancel", str(job))
    slurm.wait(job)
    shown = slurm.run(
        "n1", f"{slurm.base}/monarchfs", "report", str(job), "--dir", f"{slurm.local}/reports",
        user="daemon",
    )  # fmt: skip
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr == f"monarchfs: the report of job {job} is another user's: ask root\n"
    assert key
    nothing_left(slurm)


def test_the_plugin_hands_a_request_to_the_prolog(slurm: Cluster) -> None:
    if not (slurm.base / "plugstack.conf").read_text():
        pytest.skip("needs Slurm's headers and a compiler")
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


def test_gc_takes_out_jobs_that_slurm_does_not_know(slurm: Cluster) -> None:
    data = dataset(slurm, "gc")
    job = slurm.sbatch("echo begun; sleep 60\n", "-N1", "-w", "n3", f"--comment=monarchfs={data}")
    wait_for(lambda: "begun" in slurm.output(job), "the job to run")
    point = slurm.mount_of("n3", data)
    assert point is not None
    jobs = Path(point).parent / "jobs"
    stale = json.dumps({"entered_unix_seconds": 1.0, "met": []})
    slurm.run("n3", "sh", "-c", f"cat > {jobs}/999999", stdin=stale)
    words = (f"{slurm.base}/monarchfs", "gc", "--json", "--config", f"{slurm.base}/site.toml")
    here = {"SLURMD_NODENAME": "n3"}
    done = slurm.run("n3", *words, "--dry-run", environment=here)
    found = json.loads(done.stdout)["found"]
    assert [(one["kind"], one["path"], one["removed"]) for one in found] == [
        ("job", f"{jobs}/999999", False)
    ]
    done = slurm.run("n3", *words, environment=here)
    assert [one["removed"] for one in json.loads(done.stdout)["found"]] == [True], done.stdout
    assert slurm.run("n3", "ls", str(jobs)).stdout.split() == [str(job)]
    assert slurm.mount_of("n3", data) == point, "what is in use stays"
    slurm.run("ctl", "scancel", str(job))
    slurm.wait(job)
    nothing_left(slurm)


def test_gc_clears_what_killed_daemons_leave(slurm: Cluster) -> None:
    data = dataset(slurm, "gcdead")
    script = "echo begun; sleep 60\n"
    job = slurm.sbatch(script, "-N1", "-w", "n3", f"--comment=monarchfs={data}")
    wait_for(lambda: "begun" in slurm.output(job), "the job to run")
    point = slurm.mount_of("n3", data)
    # Every daemon of ours on this node, as if memory had run out.
    slurm.run("n3", "pkill", "-KILL", "-f", "monarchfs[.]")
    socket = "import socket; socket.socket(socket.AF_UNIX).bind('/run/monarchfs/dead.sock')"
    slurm.run("n3", "python3", "-c", socket)
    words = (f"{slurm.base}/monarchfs", "gc", "--json", "--config", f"{slurm.base}/site.toml")
    done = slurm.run("n3", *words, environment={"SLURMD_NODENAME": "n3"})
    assert done.returncode == 0, done.stderr
    found = {one["kind"]: one for one in json.loads(done.stdout)["found"]}
    assert found["mount"]["path"] == point
    assert found["mount"]["removed"] is True
    assert found["socket"]["path"] == "/run/monarchfs/dead.sock"
    assert slurm.mount_of("n3", data) is None
    assert slurm.run("n3", "sh", "-c", "ls /run/monarchfs/*.*").stdout == ""
    slurm.run("ctl", "scancel", str(job))
    slurm.wait(job)
    done = slurm.run("n3", *words, environment={"SLURMD_NODENAME": "n3"})
    assert json.loads(done.stdout) == {"dry_run": False, "found": [], "notes": []}
    nothing_left(slurm)


def test_another_set_of_groups_gets_another_mount_and_cache(slurm: Cluster) -> None:
    data = dataset(slurm, "grouped")
    os.chown(data, 0, 60)
    data.chmod(0o750)
    groups = slurm.base / "groups"
    lines = Path("/etc/group").read_text().splitlines()
    assert any(line.startswith("games:x:60:") for line in lines), "Debian's groups"
    groups.write_text("\n".join(f"{x}nobody" if x.startswith("games:") else x for x in lines))
    job = slurm.sbatch(VERIFY, "-N1", "-w", "n2", f"--comment=monarchfs={data}")
    slurm.wait(job)
    assert "Permission denied (for nobody)" in slurm.output(job)
    slurm.run("n2", "mount", "--bind", str(groups), "/etc/group")
    slurm.run("ctl", "scontrol", "reconfigure")
    try:
        script = "ls $MONARCHFS_ROOT | wc -l; echo $MONARCHFS_ROOT; sleep 60\n"
        job = slurm.sbatch(script, "-N1", "-w", "n2", f"--comment=monarchfs={data}:prefetch=all")
        wait_for(lambda: "/run/" in slurm.output(job), "the job with the group to be served")
        assert slurm.output(job).startswith("12\n"), "read with the group, by the mount's daemon"
    finally:
        slurm.run("n2", "umount", "/etc/group")
    # The group is taken away again: what was copied with it is out of reach, though it is mounted.
    other = slurm.sbatch(VERIFY, "-N1", "-w", "n2", f"--comment=monarchfs={data}")
    slurm.wait(other)
    assert "Permission denied (for nobody)" in slurm.output(other)
    assert f"root={data} " in slurm.output(other)
    slurm.run("ctl", "scancel", str(job))
    slurm.wait(job)
    nothing_left(slurm)
