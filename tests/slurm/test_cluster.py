"""Jobs of ordinary users on a real cluster: ``make cluster``, or ``python -m
tests.slurm.test_cluster [NAME...]``. Takes one to two minutes, as root; nothing is left of it."""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import (
    DEADLINE_SECONDS,
    NODES,
    USERS,
    Cluster,
    cannot_start,
    configure,
    site_cluster,
)
from tests.support import on_disk
from tests.support.fake_mounts import device_mode

Tell = Callable[[str], None]

VERIFY = """
cd "$MONARCHFS_ROOT" && find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum
echo "root=$MONARCHFS_ROOT warning=$MONARCHFS_WARNING"
"""
ON_A_MOUNT = "root=/run/monarchfs/slurm/shares/"


def dataset(slurm: Cluster, name: str, files: int = 12) -> Path:
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

    slurm.wait_for(lambda: not left(), "mounts and what belongs to them to go")
    slurm.wait_idle()


def report_of(slurm: Cluster, job: int, node: str) -> dict[str, Any]:
    path = slurm.local_of(node) / "reports" / f"{job}.{node}.json"
    found: dict[str, Any]
    (found,) = json.loads(path.read_text())["datasets"]
    return found


def log_of(slurm: Cluster, node: str) -> str:
    return (slurm.local_of(node) / "log" / "slurm.log").read_text()


def size_of(data: Path) -> int:
    return sum(path.stat().st_size for path in data.iterdir())


def on(node: str, data: Path | str) -> tuple[str, ...]:
    return ("-N1", "-w", node, f"--comment=monarchfs={data}")


def after(slurm: Cluster, node: str, data: Path) -> int:
    job = slurm.sbatch(VERIFY, *on(node, data))
    slurm.wait(job)
    assert ON_A_MOUNT in slurm.output(job), slurm.logs()
    return job


@contextmanager
def running(slurm: Cluster, script: str, word: str, *options: str) -> Iterator[int]:
    """A job that goes on until it is cancelled, as soon as it has printed ``word``."""
    job = slurm.sbatch(f"{script}; sleep 60\n", *options)
    slurm.wait_for(lambda: word in slurm.output(job), "the job to run")
    yield job
    slurm.run("ctl", "scancel", str(job))
    slurm.wait(job)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    if reason := cannot_start():
        pytest.skip(reason)
    with site_cluster() as running:
        yield running


@pytest.fixture
def tell(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Tell:
    """Shows what was measured, in one line."""
    began, name = time.monotonic(), request.node.name.removeprefix("test_").replace("_", " ")

    def tell(measured: str) -> None:
        with capsys.disabled():
            print(f"\nok  {name} ({time.monotonic() - began:.0f} s): {measured}", flush=True)

    return tell


def test_a_job_on_three_nodes_reads_its_dataset_through_mounts(slurm: Cluster, tell: Tell) -> None:
    data = dataset(slurm, "threenodes")
    script = f"srun sh -c '{VERIFY}{VERIFY}'\n"
    job = slurm.sbatch(script, "-N3", f"--comment=monarchfs={data}:prefetch=all")
    slurm.wait(job)
    output = slurm.output(job)
    assert output.count(digest(data)) == 6, output + slurm.logs()
    assert output.count(ON_A_MOUNT) == 6, output
    assert output.count("/threenodes warning=\n") == 6
    size = size_of(data)
    for node in NODES:
        one = report_of(slurm, job, node)
        assert one["source"] == str(data)
        assert one["mounted"] is True
        assert one["shared_with"] == []
        # What is read again the kernel has, and it does not ask to open it.
        assert one["local_opens"] + one["source_opens"] >= 12
        assert one["copies_failed"] == one["worker_restarts"] == 0
        assert one["source_read_bytes"] == size
        assert one["peak_used_bytes"] >= size
        assert one["resident_after_seconds"] is not None
    nothing_left(slurm)
    tell(f"{size} bytes read from the source once a node")


def test_the_nodes_of_a_job_share_what_each_has_read(slurm: Cluster, tell: Tell) -> None:
    data = dataset(slurm, "shared", files=150)
    key = slurm.base / "peers.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o400)
    configure(slurm.base, f'peer_key = "{key}"')
    # Each node has heard of what the other two have.
    know = (
        f"until test $({slurm.base}/monarchfs status --json $MONARCHFS_ROOT |"
        " grep -o 'answered.: *true' | wc -l) = 2; do sleep 0.1; done\n"
    )
    # Readers would soon go to the source, which is faster here than the other nodes.
    copy = f"{slurm.base}/monarchfs warm $MONARCHFS_ROOT --wait >/dev/null\n"
    try:
        job = slurm.sbatch(
            f"cat >job.sh <<'END'\n{know}{copy}{VERIFY}END\nsrun sh job.sh\n",
            *("-N3", f"--comment=monarchfs={data}:prefetch=access"),
        )
        slurm.wait(job)
        assert slurm.output(job).count(digest(data)) == 3, slurm.output(job) + slurm.logs()
        # One that runs on one node has nobody to share with.
        alone = after(slurm, "n1", data)
    finally:
        configure(slurm.base)
    size = size_of(data)
    told = [report_of(slurm, job, node) for node in NODES]
    read = [one["source_read_bytes"] for one in told]
    # A busy machine misses a deadline now and then, and goes to the source.
    assert all(one["peer_read_bytes"] for one in told)
    assert size <= sum(read) < 1.5 * size, slurm.logs()
    assert report_of(slurm, alone, "n1")["source_read_bytes"] == 0
    assert "without peers" not in log_of(slurm, "n1"), log_of(slurm, "n1")
    nothing_left(slurm)
    tell(f"3 nodes read {sum(read) / size:.2f} x the dataset of the source, bytes right on each")


def test_twenty_jobs_in_a_burst_share_two_datasets(slurm: Cluster, tell: Tell) -> None:
    pair = [dataset(slurm, f"burst{number}") for number in range(2)]
    jobs = [slurm.sbatch(VERIFY, *on("n1", pair[number % 2])) for number in range(20)]
    slurm.wait(*jobs, seconds=90)
    for number, job in enumerate(jobs):
        output = slurm.output(job)
        assert digest(pair[number % 2]) in output, output + slurm.logs()
        assert ON_A_MOUNT in output, output + log_of(slurm, "n1")
    nothing_left(slurm)
    found = [report_of(slurm, job, "n1") for job in jobs]
    assert {one["source"] for one in found} == {str(path) for path in pair}
    # The source was read once for all of them, or once again where all had left meanwhile.
    assert any(one["shared_with"] for one in found)
    alone = sum(not one["shared_with"] for one in found)
    assert alone < 10
    tell(f"{len(jobs) - alone} of {len(jobs)} jobs shared a mount")


def test_the_jobs_of_an_array_use_one_mount_that_lingers(slurm: Cluster, tell: Tell) -> None:
    data = dataset(slurm, "array")
    configure(slurm.base, 'linger = "4s"')
    try:
        job = slurm.sbatch(VERIFY, "--array=0-7%2", *on("n2", data))
        slurm.wait(job, seconds=90)
        output = slurm.output(job)
        assert output.count(digest(data)) == 8, output + slurm.logs()
        assert output.count(ON_A_MOUNT) == 8
        assert slurm.mount_of("n2", data) is not None, "it lingers"
        log = log_of(slurm, "n2")
        assert log.count(f"mounted {data} ") - log.count(f"unmounted {data} ") == 1, log
        assert log.count(f"shares {data} ") == 7, log
        nothing_left(slurm)
    finally:
        configure(slurm.base)
    tell("8 tasks, 1 mount made, 7 came to it")


def test_a_source_that_hangs_delays_a_job_until_the_deadline(slurm: Cluster, tell: Tell) -> None:
    backing, point = slurm.base / "backing", slurm.base / "frozen"
    backing.mkdir()
    point.mkdir()
    done = slurm.run("n1", "bindfs", "-r", str(backing), str(point))
    assert done.returncode == 0, done.stderr
    pid = slurm.run("n1", "pgrep", "-f", f"^bindfs -r {backing}").stdout.split()[0]
    slurm.run("n1", "kill", "-STOP", pid)
    try:
        began = time.monotonic()
        script = 'echo "root=$MONARCHFS_ROOT warning=$MONARCHFS_WARNING"\n'
        job = slurm.sbatch(script, *on("n1", point))
        slurm.wait(job)
        seconds = time.monotonic() - began
        # What Slurm itself needs comes to it.
        assert seconds < DEADLINE_SECONDS + 5
        assert slurm.output(job) == (f"root={point} warning={point} did not answer within 8 s\n"), (
            slurm.logs()
        )
        assert slurm.node_states()["n1"] == "idle"
        one = report_of(slurm, job, "n1")
        assert one["mounted"] is False
        assert one["reason"] == f"{point} did not answer within 8 s"
    finally:
        slurm.run("n1", "kill", "-CONT", pid)
        slurm.run("n1", "umount", "-l", str(point))
    nothing_left(slurm)
    tell(f"job over after {seconds:.1f} s (deadline 8 s), on the source's own path")


def test_an_epilog_ends_though_a_process_sits_in_the_mount(slurm: Cluster, tell: Tell) -> None:
    data = dataset(slurm, "sitting")
    # Out of the process group that Slurm kills.
    script = "cd $MONARCHFS_ROOT; setsid sleep 61 <file00 >/dev/null 2>&1 &\nsleep 0.5\n"
    job = slurm.sbatch(script, *on("n3", data))
    began = time.monotonic()
    slurm.wait(job)
    seconds = time.monotonic() - began
    assert seconds < 30, "of the 61 for which the process sits there"
    sitting = slurm.run("n3", "pgrep", "-f", "^sleep 61").stdout.split()
    assert len(sitting) == 1, "the process was to outlive its job"
    slurm.run("n3", "kill", *sitting)
    # Another job on the node reads the right bytes, and nothing is left.
    assert digest(data) in slurm.output(after(slurm, "n3", data))
    nothing_left(slurm)
    tell(f"unmounted {seconds:.1f} s after the job was submitted (deadline 8 s)")


def test_a_node_that_was_switched_off_serves_the_next_job(slurm: Cluster, tell: Tell) -> None:
    data = dataset(slurm, "switchedoff")
    assert digest(data) in slurm.output(after(slurm, "n2", data))
    with running(slurm, "echo begun", "begun", "--no-requeue", *on("n2", data)):
        slurm.machines["n2"].power_cut()
        slurm.boot("n2")
    slurm.wait_idle()
    last = after(slurm, "n2", data)
    assert digest(data) in slurm.output(last)
    # What was copied before is still there.
    assert report_of(slurm, last, "n2")["source_read_bytes"] == 0
    nothing_left(slurm)
    tell("next job's bytes right, 0 bytes read from the source")


def test_nobody_else_gets_anything_of_a_mount_or_its_cache(slurm: Cluster, tell: Tell) -> None:
    data = dataset(slurm, "private")
    data.chmod(0o750)
    os.chown(data, -1, 65534)
    script = "cat $MONARCHFS_ROOT/* >/dev/null && echo $MONARCHFS_ROOT"
    with running(slurm, script, "/run/", *on("n1", f"{data}:prefetch=all")) as job:
        point = slurm.output(job).strip()
        for user in ("daemon", None):
            # Not even root: the mount is its user's alone.
            assert slurm.run("n1", "ls", point, user=user).returncode != 0, user
        assert os.listdir(slurm.local_of("n1") / "cache" / "slurm")
        kept = [f"{slurm.local}/tier", f"{slurm.local}/cache/slurm", "/run/monarchfs/slurm"]
        assert slurm.run("n1", "find", *kept, "-readable", "-type", "f", user="daemon").stdout == ""
        inner = slurm.run("n1", "find", f"{slurm.local}/tier", "-mindepth", "2", user=None).stdout
        for path in inner.split():
            assert slurm.run("n1", "ls", path, user="daemon").returncode != 0, path
        assert slurm.run("n1", "ls", "/run/monarchfs/slurm/env", user="daemon").returncode != 0
        # The second user's own request gets what that user may read: nothing.
        script = 'echo "root=$MONARCHFS_ROOT"; ls $MONARCHFS_ROOT\n'
        other = slurm.sbatch(script, *on("n1", data), user="daemon")
        slurm.wait(other)
        assert f"root={data}\n" in slurm.output(other, "daemon")
        assert "Permission denied" in slurm.output(other, "daemon")
    nothing_left(slurm)
    tell("another user and root: 0 files readable, permission denied")


def test_without_an_administrator_a_step_runs_its_own_mount(slurm: Cluster, tell: Tell) -> None:
    """``srun monarchfs run``: no prolog has to do with it, and no privilege."""
    data = dataset(slurm, "ownmount")
    for node in NODES:
        own = slurm.local_of(node) / "own"
        own.mkdir()
        shutil.chown(own, USERS[0])
    verify = (
        "cd $0 && find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum;"
        f" {slurm.base}/monarchfs warm $0 --wait >/dev/null || echo not warm;"
        ' grep -c " $0 .* - fuse.monarchfs " /proc/self/mountinfo; id -u; exit 3'
    )
    place = f"{slurm.local}/own"
    words = "--strict --prefetch all -o reserve_percent=1"
    words += f" --tier {place}/tier=32M --state-dir {place}/state"
    script = (
        f"export XDG_RUNTIME_DIR={place}\n"
        f'srun sh -c \'{slurm.base}/monarchfs run {data} {words} -- sh -c "$0" {data};'
        f" echo code=$?; grep -c fuse.monarchfs /proc/self/mountinfo || true' '{verify}'\n"
    )
    # An ordinary user's mounts want the device open to everybody, as it is on most machines.
    with device_mode(0o666):
        job = slurm.sbatch(script, "-N3")
        slurm.wait(job)
    output = slurm.output(job)
    assert output.count(digest(data)) == 3, output
    assert output.count("code=3\n") == 3, output
    assert sorted(output.split().count(word) for word in ("1", "0", "65534")) == [3, 3, 3], output
    nothing_left(slurm)
    for node in NODES:
        kept = slurm.local_of(node) / "own" / "tier"
        noted = [row for segment in on_disk.segments(kept) for row in on_disk.noted(segment)]
        assert len(on_disk.own_files(kept)) + len(noted) == 12
    tell("3 of 3 nodes: sha256 equal at the source's own path, 12 files kept")


def test_the_plugin_hands_a_request_to_the_prolog(slurm: Cluster) -> None:
    if not (slurm.base / "plugstack.conf").read_text():
        pytest.skip("needs Slurm's headers: apt-get install libslurm-dev gcc")
    data = dataset(slurm, "with plugin")
    job = slurm.sbatch(VERIFY, "-N1", f'--monarchfs="{data}":prefetch=all')
    slurm.wait(job)
    assert digest(data) in slurm.output(job), slurm.logs()
    assert ON_A_MOUNT in slurm.output(job)
    done = slurm.run(
        "ctl", "sbatch", "--wrap=true", "--chdir=/tmp", "--monarchfs=data", user="nobody"
    )
    assert done.returncode != 0
    assert "name a directory by its whole path" in done.stderr
    done = slurm.run("ctl", "srun", "--help")
    assert "--monarchfs=PATH" in done.stdout
    nothing_left(slurm)


def test_what_the_site_gives_comes_to_what_a_job_asks_for(slurm: Cluster) -> None:
    dataset(slurm, "given")
    own = dataset(slurm, "own")
    script = "env | grep MONARCHFS_ | sort\n"
    job = slurm.sbatch(script, "-N1", "-p", "gpu", f"--comment=x monarchfs={own}:name=mine y")
    wrong = slurm.sbatch(script, "-N1", f"--comment=monarchfs={own}:user=root")
    plain = slurm.sbatch(script, "-N1", "--comment=don't")
    slurm.wait(job, wrong, plain)
    lines = dict(line.split("=", 1) for line in slurm.output(job).splitlines())
    assert set(lines) == {"MONARCHFS_ROOT", "MONARCHFS_DATA_MINE", "MONARCHFS_DATA_GIVEN"}
    assert lines["MONARCHFS_ROOT"] == lines["MONARCHFS_DATA_MINE"]
    assert lines["MONARCHFS_DATA_MINE"].endswith("/own")
    assert lines["MONARCHFS_DATA_GIVEN"].endswith("/given")
    assert lines["MONARCHFS_DATA_GIVEN"].startswith("/run/monarchfs/slurm/shares/")
    assert slurm.output(wrong).startswith("MONARCHFS_WARNING=")
    assert "'user=root' is no option that a job may give" in slurm.output(wrong)
    assert slurm.output(plain) == ""
    nothing_left(slurm)


def gc(slurm: Cluster, *more: str) -> dict[str, Any]:
    words = (f"{slurm.base}/monarchfs", "gc", "--json", "--config", f"{slurm.base}/site.toml")
    done = slurm.run("n3", *words, *more, SLURMD_NODENAME="n3")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_gc_takes_out_unknown_jobs_and_what_killed_daemons_leave(slurm: Cluster) -> None:
    data = dataset(slurm, "gc")
    with running(slurm, "echo begun", "begun", *on("n3", data)) as job:
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
        slurm.run("n3", "pkill", "-KILL", "-f", "m monarchf[s]")
        socket = "import socket; socket.socket(socket.AF_UNIX).bind('/run/monarchfs/dead.sock')"
        slurm.run("n3", "python3", "-c", socket)
        found = {one["kind"]: one for one in gc(slurm)["found"]}
        assert (found["mount"]["path"], found["mount"]["removed"]) == (point, True)
        assert found["socket"]["path"] == "/run/monarchfs/dead.sock"
        assert slurm.mount_of("n3", data) is None
        assert slurm.run("n3", "sh", "-c", "ls /run/monarchfs/*.*").stdout == ""
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
    with ExitStack() as until_seen:
        until_seen.callback(slurm.run, "n2", "umount", "/etc/group")
        script = "ls $MONARCHFS_ROOT | wc -l; echo $MONARCHFS_ROOT"
        with running(slurm, script, "/run/", *on("n2", f"{data}:prefetch=all")) as job:
            assert slurm.output(job).startswith("12\n"), "read with the group, by the daemon"
            # It is taken away again: what was copied with it is out of reach, though mounted.
            until_seen.close()
            other = slurm.sbatch(VERIFY, *on("n2", data))
            slurm.wait(other)
            assert "Permission denied (for nobody)" in slurm.output(other)
            assert f"root={data} " in slurm.output(other)
    nothing_left(slurm)


if __name__ == "__main__":
    if reason := cannot_start():
        sys.exit(f"no cluster can be started here: it {reason}")
    sys.exit(pytest.main([__file__, "-q", "-k", " or ".join(sys.argv[1:])]))
