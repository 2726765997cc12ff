"""``mount -t monarchfs``, fstab and umount(8), with the helper where mount(8) looks for it.

That place is /sbin of a mount namespace of the test's own: nothing of it is seen outside.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from monarchfs.cli import mount_helper
from tests.support import surroundings, trees
from tests.support.fake_mounts import device_mode, interpreter_for
from tests.support.mounting import (
    REPOSITORY,
    Bench,
    fuse_mounts,
    processes_about,
    requires_mounts,
    wait_for,
)

pytestmark = [*requires_mounts, surroundings.requires_namespaces]

AS_NOBODY = "setpriv --reuid=nobody --regid=nogroup --clear-groups"
NAMESPACE = ["unshare", "--mount", "--propagation", "private"]


@pytest.fixture
def place(work: Bench) -> Iterator[Bench]:
    """A source, a mount point, and a directory with the helper that stands in for /sbin."""
    contents = {"file": b"of the source", "program": b"#!/bin/sh\necho ran\n"}
    (trees.write_files(work.path / "source", contents) / "program").chmod(0o755)
    (work.path / "mnt").mkdir()
    (work.path / "sbin").mkdir()
    helper = work.path / "sbin" / "mount.monarchfs"
    python = shlex.quote(interpreter_for("nobody"))
    start = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r});"
        " from monarchfs.cli.mount_helper import main; sys.exit(main())"
    )
    helper.write_text(f'#!/bin/sh\nexec {python} -I -c {shlex.quote(start)} "$@"\n')
    helper.chmod(0o755)
    yield work
    wait_for(lambda: not processes_about(str(work.path)), "the daemon to end", 10)


def options(work: Bench) -> str:
    return f"tier={work.path}/tier=10M,state_dir={work.path}/state"


def run_there(work: Bench, script: str) -> subprocess.CompletedProcess[str]:
    """A shell script in a mount namespace with the helper; ``$D`` is the test's directory."""
    sbin = os.path.realpath("/sbin")
    command = ["/bin/sh", "-eu", "-c", f"mount --bind {work.path}/sbin {sbin}\n{script}"]
    environment = {"PATH": "/usr/bin:/bin", "D": str(work.path), "O": options(work)}
    return subprocess.run(
        [*NAMESPACE, *command], env=environment, cwd=work.path, capture_output=True, text=True
    )


def test_mount_by_type_then_umount(place: Bench) -> None:
    done = run_there(
        place,
        """
        mount -v -t monarchfs -o $O,freshness=immutable $D/source $D/mnt
        cat $D/mnt/file; echo
        findmnt -n -o FSTYPE,SOURCE,VFS-OPTIONS $D/mnt
        $D/mnt/program
        touch $D/mnt/new 2>&1 || true
        umount $D/mnt
        ls $D/mnt
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said, content, found, ran, refused = done.stdout.splitlines()
    assert said.startswith(f"mount.monarchfs: {place.path}/source mounted on {place.path}/mnt (ro,")
    assert content == "of the source"
    assert found.split() == ["fuse.monarchfs", f"{place.path}/source", "ro,nosuid,nodev,relatime"]
    assert ran == "ran"
    assert "Read-only file system" in refused


def test_a_line_of_fstab(place: Bench) -> None:
    (place.path / "with space").symlink_to("source")
    (place.path / "fstab").write_text(
        f'{place.path}/with\\040space {place.path}/mnt monarchfs tier="{place.path}/a,b=10M",'
        f"state_dir={place.path}/state,_netdev,nofail,noexec,x-systemd.requires=network.target,"
        "freshness=ttl=5,comment=mine 0 0\n"
    )
    done = run_there(
        place,
        """
        mount -T $D/fstab $D/mnt
        mount -T $D/fstab -a
        cat $D/mnt/file; echo
        $D/mnt/program 2>&1 || true
        grep -c "$D/mnt" /proc/self/mountinfo
        umount $D/mnt
        """,
    )
    assert (done.returncode, done.stderr) == (0, "")
    content, not_run, mounts = done.stdout.splitlines()
    assert content == "of the source"
    assert "Permission denied" in not_run
    assert mounts == "1"
    assert (place.path / "a,b").is_dir()


def test_a_user_mounts_and_unmounts_what_fstab_allows(place: Bench) -> None:
    if not os.stat("/usr/bin/mount").st_mode & 0o4000:
        pytest.skip("needs mount(8) setuid root: chmod u+s /usr/bin/mount")
    for name in ("mnt", "tier", "state"):
        (place.path / name).mkdir(exist_ok=True)
        os.chown(place.path / name, 65534, 65534)
    line = f"{place.path}/source {place.path}/mnt monarchfs noauto,users,{options(place)} 0 0\n"
    (place.path / "fstab").write_text(line)
    with device_mode(0o666):
        done = run_there(
            place,
            f"""
            {AS_NOBODY} mount -T $D/fstab $D/mnt
            {AS_NOBODY} cat $D/mnt/file; echo
            findmnt -n -o OPTIONS $D/mnt
            {AS_NOBODY} umount $D/mnt
            """,
        )
    assert (done.returncode, done.stderr) == (0, "")
    content, mounted = done.stdout.splitlines()
    assert content == "of the source"
    assert {"user_id=65534", "noexec"} <= set(mounted.split(","))  # users implies noexec


def test_checking_only_changes_nothing(place: Bench) -> None:
    before = set(place.path.rglob("*"))
    done = run_there(place, "mount -f -v -t monarchfs -o $O $D/source $D/mnt; ls $D/mnt")
    assert (done.returncode, done.stderr) == (0, "")
    assert "could be mounted" in done.stdout
    assert set(place.path.rglob("*")) == before


def test_sloppy_leaves_out_what_is_not_known_and_sudo_makes_no_difference(place: Bench) -> None:
    done = run_there(
        place,
        "export SUDO_UID=65534; mount -s -t monarchfs -o $O,colour=red,intr $D/source $D/mnt;"
        " findmnt -n -o FS-OPTIONS $D/mnt; cat $D/mnt/file; umount $D/mnt",
    )
    assert (done.returncode, done.stderr) == (0, "")
    shown, content = done.stdout.splitlines()
    assert "user_id=0" in shown
    assert content == "of the source"


FAILURES = [
    ("-o $O,colour=red $D/source $D/mnt", 1, "colour=red"),
    ("-o remount,$O $D/source $D/mnt", 1, "cannot be changed"),
    ("-f -o $O $D/nosuch $D/mnt", 32, "does not exist"),
    ("-o $O $D/nosuch $D/mnt", 32, "does not exist"),
    ("-o $O $D/source $D/sbin/mount.monarchfs", 32, "not a directory"),
    ("-o $O,config=/x $D/source $D/mnt", 1, "config=/x"),
    ("$D/source", 1, "required: DIR"),
]


@pytest.mark.parametrize(("words", "code", "reason"), FAILURES)
def test_one_line_and_the_exit_code_of_mount(
    place: Bench, words: str, code: int, reason: str
) -> None:
    before = set(place.path.rglob("*"))
    # Directly, because some of these mount(8) itself would not let through.
    done = run_there(place, f"$D/sbin/mount.monarchfs {words}")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("mount.monarchfs: ")
    assert done.stderr.count("\n") == 1
    assert reason in done.stderr
    assert set(place.path.rglob("*")) == before
    assert fuse_mounts(str(place.path)) == []


def test_another_mount_namespace(place: Bench) -> None:
    command = [*NAMESPACE, "/bin/sh", "-c", "echo there; read x"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as there:
        assert there.stdout is not None
        assert there.stdout.readline() == "there\n"
        enter = ["nsenter", "--mount", f"--target={there.pid}"]
        script = f"mount -N {there.pid} -t monarchfs -o $O $D/source $D/mnt"
        done = run_there(place, script)
        assert (done.returncode, done.stderr) == (0, "")
        assert fuse_mounts(str(place.path)) == []
        cat = [*enter, "cat", f"{place.path}/mnt/file"]
        assert subprocess.run(cat, capture_output=True, check=True).stdout == b"of the source"
        subprocess.run([*enter, "umount", f"{place.path}/mnt"], check=True)
        there.communicate("\n", timeout=10)


def test_a_namespace_that_is_none(place: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    source, point = str(place.path / "source"), str(place.path / "mnt")
    assert mount_helper.main([source, point, "-N", "4194999"]) == mount_helper.FAILED
    assert "give a PID" in capsys.readouterr().err
    assert mount_helper.main([source, point, "-N", sys.executable]) == mount_helper.FAILED
    assert "cannot enter mount namespace" in capsys.readouterr().err
