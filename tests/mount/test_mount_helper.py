"""``mount -t monarchfs``, fstab and umount(8), with the helper where mount(8) looks for it.

That place is /sbin of a mount namespace of the test's own: nothing of it is seen outside.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from monarchfs.cli import mount_helper
from tests.support import mounting, surroundings, trees
from tests.support.fake_mounts import device_mode, interpreter_for
from tests.support.mounting import REPOSITORY
from tests.support.programs import execute

pytestmark = [*mounting.requires_mounts, surroundings.requires_namespaces]

AS_NOBODY = "setpriv --reuid=nobody --regid=nogroup --clear-groups"
NAMESPACE = ["unshare", "--mount", "--propagation", "private"]


@pytest.fixture
def place(work: mounting.Bench) -> Iterator[mounting.Bench]:
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
    mounting.wait_for(lambda: not mounting.processes_about(str(work.path)), "the daemon to end", 10)


def run_there(work: mounting.Bench, script: str) -> subprocess.CompletedProcess[str]:
    """A shell script in a mount namespace with the helper; ``$D`` is the test's directory."""
    sbin = os.path.realpath("/sbin")
    command = ["/bin/sh", "-eu", "-c", f"mount --bind {work.path}/sbin {sbin}\n{script}"]
    options = f"tier={work.path}/tier=10M,state_dir={work.path}/state"
    environment = {"PATH": "/usr/bin:/bin", "D": str(work.path), "O": options}
    return execute([*NAMESPACE, *command], env=environment, cwd=work.path)


CASES = {
    "by type": """
said=$(mount -v -t monarchfs -o $O,freshness=immutable $D/source $D/mnt)
echo "$said" | grep "^mount.monarchfs: $D/source mounted on $D/mnt (ro,"
test "$(cat $D/mnt/file)" = "of the source"
test "$(findmnt -n -o FSTYPE,VFS-OPTIONS $D/mnt)" = "fuse.monarchfs ro,nosuid,nodev,relatime"
test "$(findmnt -n -o SOURCE $D/mnt)" = $D/source
test "$($D/mnt/program)" = ran
fails touch $D/mnt/new
umount $D/mnt
""",
    "a line of fstab": r"""
ln -s source "$D/with space"
options="tier=\"$D/a,b=10M\",state_dir=$D/state,_netdev,nofail,noexec,freshness=ttl=5,comment=mine"
options="$options,x-systemd.requires=network.target"
printf '%s\n' "$D/with\040space $D/mnt monarchfs $options 0 0" >$D/fstab
mount -T $D/fstab $D/mnt
mount -T $D/fstab -a
test "$(cat $D/mnt/file)" = "of the source"
fails $D/mnt/program
test $(grep -c "$D/mnt" /proc/self/mountinfo) = 1
umount $D/mnt
test -d $D/a,b
""",
    "checking only changes nothing": """
before=$(find $D)
mount -f -v -t monarchfs -o $O $D/source $D/mnt | grep "could be mounted"
test "$(find $D)" = "$before"
""",
    "sloppy leaves out what is not known, and sudo makes no difference": """
export SUDO_UID=65534
mount -s -t monarchfs -o $O,colour=red,intr $D/source $D/mnt
findmnt -n -o FS-OPTIONS $D/mnt | grep user_id=0
test "$(cat $D/mnt/file)" = "of the source"
umount $D/mnt
""",
    # The option users implies noexec.
    "a user mounts and unmounts what fstab allows": f"""
mkdir $D/tier $D/state
chown nobody: $D/mnt $D/tier $D/state
echo "$D/source $D/mnt monarchfs noauto,users,$O 0 0" >$D/fstab
{AS_NOBODY} mount -T $D/fstab $D/mnt
test "$({AS_NOBODY} cat $D/mnt/file)" = "of the source"
findmnt -n -o OPTIONS $D/mnt | grep noexec | grep user_id=65534
{AS_NOBODY} umount $D/mnt
""",
}
PRELUDE = """
trap 'test $? = 0 || echo "up to line $LINENO" >&2' EXIT
fails() { if "$@"; then exit 1; fi; } 2>/dev/null
"""


@pytest.mark.parametrize("case", CASES)
def test_case(place: mounting.Bench, case: str) -> None:
    if "a user" in case and not os.stat("/usr/bin/mount").st_mode & 0o4000:
        pytest.skip("needs mount(8) setuid root: chmod u+s /usr/bin/mount")
    with device_mode(0o666) if "a user" in case else nullcontext():
        done = run_there(place, PRELUDE + CASES[case])
    assert (done.returncode, done.stderr) == (0, "")


FAILURES = [
    ("-o $O,colour=red $D/source $D/mnt", 1, "colour=red"),
    ("-o remount,$O $D/source $D/mnt", 1, "cannot be changed"),
    ("-f -o $O $D/nosuch $D/mnt", 32, "does not exist"),
    ("-o $O $D/source $D/sbin/mount.monarchfs", 32, "not a directory"),
    ("-o $O,config=/x $D/source $D/mnt", 1, "config=/x"),
    ("$D/source", 1, "required: DIR"),
]


@pytest.mark.parametrize(("words", "code", "reason"), FAILURES)
def test_one_line_and_mounts_exit_code(
    place: mounting.Bench, words: str, code: int, reason: str
) -> None:
    before = set(place.path.rglob("*"))
    # Directly, because some of these mount(8) itself would not let through.
    done = run_there(place, f"$D/sbin/mount.monarchfs {words}")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("mount.monarchfs: ")
    assert done.stderr.count("\n") == 1
    assert reason in done.stderr
    assert set(place.path.rglob("*")) == before
    assert mounting.fuse_mounts(str(place.path)) == []


def test_what_is_no_namespace(place: mounting.Bench, capsys: pytest.CaptureFixture[str]) -> None:
    source, point = str(place.path / "source"), str(place.path / "mnt")
    assert mount_helper.main([source, point, "-N", "4194999"]) == mount_helper.FAILED
    assert "give a PID" in capsys.readouterr().err
    assert mount_helper.main([source, point, "-N", sys.executable]) == mount_helper.FAILED
    assert "cannot enter mount namespace" in capsys.readouterr().err
