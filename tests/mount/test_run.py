"""``monarchfs run``: what its command sees and gets, who else does, and what is left afterwards;
several jobs on a node: one mount, which outlives the job that made it."""

import errno
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from monarchfs.cli.run import _summary
from tests.support import surroundings, trees
from tests.support.mounting import (
    MONARCHFS,
    WAIT_SECONDS,
    Bench,
    FaultySource,
    Mount,
    fuse_mounts,
    kill_each,
    processes_about,
    requires_mounts,
    wait_for,
)
from tests.support.private_mounts import GROUP, NOBODY, Place, left_clean, lines_of, make_place
from tests.support.processes import parent_of
from tests.support.programs import Running, execute
from tests.support.reading import COMMAND, REPOSITORY
from tests.support.trees import write_files

pytestmark = [*requires_mounts, surroundings.requires_namespaces]

FUSE = "65735546\n"
"""What ``stat -f -c %t`` says of such a file system (FUSE_SUPER_MAGIC)."""
DENIED = os.strerror(errno.EACCES)
STATE_OF = "import os, sys; print(os.getxattr(sys.argv[1], 'user.monarchfs.state').decode())"
UNTIL_COPIED = """
import os, sys, time
open(sys.argv[1]).read()
while os.getxattr(sys.argv[1], 'user.monarchfs.state') != b'resident':
    time.sleep(0.01)
"""
COUNTING = """
import os, signal, sys
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, lambda n, _frame: os.write(1, b"%d\\n" % n))
signal.signal(signal.SIGALRM, lambda _n, _frame: sys.exit(0))
print("ready", flush=True)
while True:
    signal.pause()
"""
"""Prints the signals that it gets until SIGALRM comes."""


@pytest.fixture(params=["root", "user"])
def place(work: Bench, request: pytest.FixtureRequest) -> Iterator[Place]:
    with left_clean(make_place(work, user=request.param == "user")) as made:
        yield made


@pytest.fixture
def roots(work: Bench) -> Iterator[Place]:
    with left_clean(make_place(work, user=False)) as made:
        yield made


@pytest.fixture
def users(work: Bench) -> Iterator[Place]:
    with left_clean(make_place(work, user=True)) as made:
        yield made


def assert_view(place: Place, **more: Any) -> None:
    """The command sees the files of a mount."""
    done = place.run("stat", "-f", "-c", "%t", "source/file", **more)
    assert (done.stdout, done.stderr, done.returncode) == (FUSE, "", 0)


def test_the_command_sees_the_view_where_it_is_and_nobody_else_does(place: Place) -> None:
    """Its mount is private to it; a worker that is killed is replaced there."""
    look = f"{sys.executable} -c {shlex.quote(STATE_OF)} file; cat file; echo"
    script = f"cd source; {look}; read line; cat below/other; stat -f -c %t ."
    running = place.start("sh", "-c", script, stdin=subprocess.PIPE)
    lines = lines_of(running)
    assert next(lines).strip() in ("remote", "copying", "partial", "resident")
    assert next(lines) == "content\n"
    with pytest.raises(OSError, match="No data available"):
        os.getxattr(place.source / "file", "user.monarchfs.state")
    assert fuse_mounts(str(place.path)) == []
    told = place.told()
    assert (told["private"], told["state"], told["files"]["resident"]) == (True, "serving", 1)
    line = next(line for line in place.status().stdout.splitlines() if str(place.source) in line)
    assert "serving, private" in line
    os.kill(told["worker"]["pid"], signal.SIGKILL)

    def another_serves() -> bool:
        now = place.told()
        return bool(now["state"] == "serving" and now["worker"]["restarts"] == 1)

    wait_for(another_serves, "another worker")
    rest = running.communicate("\n", timeout=WAIT_SECONDS)
    assert (*rest, running.returncode) == ("deeper65735546\n", "", 0)
    gone = place.status(str(place.source))
    assert gone.returncode == 1
    assert "is not a monarchfs mount" in gone.stderr


def test_the_command_gets_what_it_would_get(place: Place) -> None:
    script = 'cat; echo "$0" "$@"; echo $VARIABLE $LC_CTYPE; pwd; id -u; echo error >&2'
    environment = {"VARIABLE": "v", "LC_CTYPE": "C", "LC_ALL": ""}
    words = ["sh", "-c", script, "--", "--tier", "a b"]
    done = place.run(*words, input="in\n", env=environment)
    uid = NOBODY.pw_uid if place.user else 0
    assert done.stdout == f"in\n-- --tier a b\nv C\n{place.path}\n{uid}\n"
    assert (done.stderr, done.returncode) == ("error\n", 0)


def test_a_users_command_has_no_more_rights_than_before(users: Place) -> None:
    """Also those of supplementary groups."""
    for name, group, mode in (("group", GROUP, 0o640), ("root", 0, 0o600)):
        path = users.source / name
        path.write_text(name)
        os.chown(path, 0, group)
        path.chmod(mode)
    caps = "grep -E '^Cap(Inh|Prm|Eff|Amb)' /proc/self/status"
    done = users.run("sh", "-c", f"{caps}; umount source 2>&1 >&- || cat source/group source/root")
    *capabilities, refused, content = done.stdout.splitlines()
    assert {line.split()[1] for line in capabilities} == {"0" * 16}
    assert "umount" in refused
    assert content == "group"
    assert done.stderr == "cat: source/root: Permission denied\n"


def test_root_runs_the_command_as_another_user(roots: Place) -> None:
    """Also where the working directory is one that only root may enter."""
    (roots.source / "secret").write_text("secret")
    (roots.source / "secret").chmod(0o600)
    locked = roots.path / "locked"
    locked.mkdir(mode=0o700)
    script = 'id -u; cd ..; cat source/file source/secret; cd "$0"'
    done = roots.run("sh", "-c", script, str(locked), options=["--user", "nobody"], cwd=locked)
    assert done.stdout == f"{NOBODY.pw_uid}\ncontent"
    assert "cat: source/secret: Permission denied" in done.stderr
    assert done.returncode == 2  # the shell's, of a cd that is not allowed


def test_what_was_copied_is_there_the_next_time(users: Place) -> None:
    assert users.run(sys.executable, "-c", UNTIL_COPIED, "source/file").returncode == 0
    report_to = ["--report", "--json", f"{users.path}/report"]
    done = users.run("cat", "source/file", options=report_to)
    assert done.stdout == "content"
    assert done.stderr == (
        f"monarchfs: {users.source}: 100% of 1 open were local, 0 bytes read from the source,"
        " 1 file resident\n"
    )
    report = json.loads((users.path / "report").read_text())
    assert report.pop("seconds") > 0
    status = report.pop("status")
    assert (status["served"]["local_opens"], status["source_io"]["read_bytes"]) == (1, 0)
    assert report == {"source": str(users.source), "view": "own", "reason": None, "exit_code": 0}
    full = _summary("source", None, {**status, "prefetch": {"refused": 3}})
    assert full.endswith(" 1 file resident, no room for a copy 3 times")


def test_a_mount_that_is_there_is_shown(work: Bench) -> None:
    place = make_place(work, user=False)
    mount = work.mount(place.source)
    (mount.path / "file").read_bytes()
    report = place.path / "report"
    options = ["--report", "--json", str(report)]
    done = place.run("stat", "-f", "-c", "%t", "source/file", options=options)
    nothing = "the command opened no file there: does it read another path?"
    assert (done.stdout, done.stderr) == (FUSE, f"monarchfs: {place.source}: {nothing}\n")
    told = json.loads(report.read_text())
    assert (told["view"], told["status"]["worker"]["pid"]) == ("existing", mount.worker_pid())
    # Also where that is the source itself.
    assert mount.umount().returncode == 0
    over = work.mount(place.source, point=place.source)
    assert_view(place, options=["--json", str(report)])
    assert json.loads(report.read_text())["status"]["worker"]["pid"] == over.worker_pid()


def test_an_interrupt_while_it_is_mounted_ends_it(work: Bench, faulty: FaultySource) -> None:
    faulty.faults(hang=["* *"])
    command = [*MONARCHFS, "run", str(faulty.path), *work.storage(), "--", "echo", "ran"]
    with Running(command, stderr=subprocess.PIPE) as running:
        wait_for(lambda: faulty.data_operations(), "run to ask the source")
        running.send_signal(signal.SIGINT)
        assert running.communicate(timeout=WAIT_SECONDS) == ("", "")
    assert running.returncode == -signal.SIGINT
    faulty.faults()
    ours = {faulty.process.pid}
    wait_for(lambda: set(processes_about(str(work.path))) <= ours, "what it began to be taken back")


def test_root_in_a_chroot_stays_in_it(roots: Place) -> None:
    done = _in_chroot(roots, [], "sh", "-c", "test ! -e outside && cat source/file")
    assert (done.stdout, done.stderr) == ("content", "")


def test_output_and_exit_code_are_the_commands_or_as_a_shells(users: Place) -> None:
    """A directory in the source is that of the view, and so is a run in a run."""
    look = ["stat", "-f", "-c", "%t"]
    inner = users.bare(*look, "source/file")
    no_program = f"{users.source}/file"
    for words, where, code, out, said in (
        ([*look, "file"], users.source, 0, FUSE, ""),
        ([*look, "other"], users.source / "below", 0, FUSE, ""),
        (inner, users.path, 0, FUSE, ""),
        (["sh", "-c", "exit 3"], users.path, 3, "", ""),
        (["sh", "-c", "kill -9 $$"], users.path, 137, "", ""),
        (["nosuch"], users.path, 127, "", "monarchfs: cannot run nosuch: command not found\n"),
        ([no_program], users.path, 126, "", f"monarchfs: cannot run {no_program}: {DENIED}\n"),
    ):
        done = users.run(*words, cwd=where)
        assert (done.returncode, done.stdout, done.stderr) == (code, out, said)


def test_without_a_mount_the_command_runs_all_the_same(users: Place) -> None:
    options = ["--tier", f"{users.path}/no/such/directory=1G"]
    done = users.run("sh", "-c", "stat -f -c %t source/file; exit 3", options=options)
    assert done.returncode == 3
    assert done.stdout.strip() not in ("", "65735546")
    assert done.stderr == (
        f"monarchfs: {users.source} is read without a cache: tier"
        f" {users.path}/no/such/directory: {users.path}/no/such does not exist: create it, or name"
        " another --tier\n"
    )
    report = ["--json", f"{users.path}/no/report"]  # cannot be written
    for wrong in ([*options, "--strict"], report):
        done = users.run("echo", "ran", options=wrong)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "cannot be written" in done.stderr


def test_a_mistyped_source_runs_nothing(users: Place) -> None:
    """Also where something else is wrong; the nearest name beside it is shown."""
    command = ["sh", "-c", f"echo ran >{users.path}/ran"]
    before = users.command(*command)
    for typed, words, more in (
        (users.path / "sorce", f"did you mean {users.source}?", []),
        (users.path / "sorce" / "below", f"did you mean {users.source}/below?", ["--strict"]),
        (users.path / "quite other", "name an existing directory", []),
        (users.source / "file" / "below", "does not exist", []),
        (users.path / "sorce", "did you mean", ["--tier", f"{users.path}/no/such=1G"]),
    ):
        arguments = [str(typed) if word == str(users.source) else word for word in before]
        where = arguments.index("--")
        done = users.call([*arguments[:where], *more, *arguments[where:]])
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert f"source {typed} does not exist: " in done.stderr or more
        assert words in done.stderr
    assert not (users.path / "ran").exists()


def test_a_source_in_a_directory_that_may_not_be_entered_is_no_mistyped_one(users: Place) -> None:
    hidden = users.path / "hidden" / "source"
    hidden.mkdir(parents=True)
    hidden.parent.chmod(0o700)
    command = [str(hidden) if w == str(users.source) else w for w in users.command("ls")]
    done = users.call(command)
    assert done.returncode == 0, "the command decides what it can do without"
    assert "is read without a cache" in done.stderr


def test_a_mistake_in_the_machines_file_keeps_no_command_from_running(users: Place) -> None:
    script = """
cp -a /etc "$0/etc" && echo nonsense = 1 >"$0/etc/monarchfs.toml" && mount --bind "$0/etc" /etc
exec "$@"
"""
    inside = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", script, str(users.path)]
    for options, code, out in (([], 3, "ran\n"), (["--strict"], 2, "")):
        command = users.bare("sh", "-c", "echo ran; exit 3", options=options)
        done = users.call([*inside, *users.wrapper(), *command])
        assert (done.returncode, done.stdout) == (code, out)
        assert "/etc/monarchfs.toml" in done.stderr
        assert done.stderr.count("\n") == 1
    done = _in_chroot(users, users.wrapper(), "cat", "source/file")
    assert done.stdout == "content"
    assert "is read without a cache: you may not make a user namespace here" in done.stderr
    assert done.stderr.count("\n") == 1


def _in_chroot(place: Place, wrapper: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a chroot that holds all but a file called ``outside``."""
    (place.path / "root").mkdir()
    script = f"""
mount --rbind / {place.path}/root && mount -t tmpfs none /mnt && : >/mnt/outside
cd / && exec chroot {place.path}/root "$@"
"""
    inside = place.bare(*words)
    place_in = ["sh", "-c", 'cd "$0" && exec "$@"', str(place.path), *inside]
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    return place.call([*command, *wrapper, *place_in])


@pytest.mark.parametrize("to_group", [False, True], ids=["process", "group"])
def test_each_signal_reaches_the_command_once(users: Place, to_group: bool) -> None:
    running = users.start(sys.executable, "-c", COUNTING, start_new_session=True)
    lines = lines_of(running)
    assert next(lines) == "ready\n"
    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP, signal.SIGINT]
    for number in numbers:
        (os.killpg if to_group else os.kill)(running.pid, number)
        assert next(lines) == f"{int(number)}\n"
    time.sleep(0.1)  # for one too many to come
    running.send_signal(signal.SIGALRM)
    assert running.communicate(timeout=WAIT_SECONDS) == ("", "")
    assert running.returncode == 0


def _command_of(place: Place, word: str) -> int | None:
    """The process of a command that is neither run's own nor a wrapper's."""
    for process in psutil.process_iter(["cmdline", "cwd"]):
        command = process.info["cmdline"] or []  # that of a process which ends is empty
        is_there = process.info["cwd"] == str(place.path) and word in " ".join(command)
        if is_there and "run" not in command:
            return process.pid
    return None


def test_stopping_run_stops_the_command_and_continuing_continues_it(users: Place) -> None:
    # In a group of its own: that of the tests may be orphaned, which SIGTSTP does not stop (POSIX).
    running = users.start("sleep", "60.25", preexec_fn=os.setpgrp)
    command = wait_for(lambda: _command_of(users, "60.25"), "the command")
    running.send_signal(signal.SIGTSTP)
    both = [psutil.Process(pid) for pid in (command, running.pid)]
    wait_for(lambda: {one.status() for one in both} == {psutil.STATUS_STOPPED}, "both to stop")
    running.send_signal(signal.SIGCONT)
    wait_for(lambda: {one.status() for one in both} == {psutil.STATUS_SLEEPING}, "both to go on")
    running.terminate()
    running.communicate(timeout=WAIT_SECONDS)
    assert running.returncode == 143


def test_other_options_and_other_jobs(users: Place) -> None:
    first = users.start("sh", "-c", "readlink /proc/self/ns/mnt; read line", stdin=subprocess.PIPE)
    space = next(lines_of(first)).strip()
    other = users.run("readlink", "/proc/self/ns/mnt", options=["--freshness", "open"])
    assert other.stdout.strip() == space
    assert other.stderr == (
        f"monarchfs: {users.source} is mounted already for you: with the options of that mount\n"
    )
    own = Bench(users.path).storage(name="2")
    job = users.run("readlink", "/proc/self/ns/mnt", options=own, env={"SLURM_JOB_ID": "7"})
    assert job.stdout.strip() == space
    assert "with the options of that mount" in job.stderr
    first.communicate("\n", timeout=WAIT_SECONDS)


def test_another_mount_namespace_has_no_part_in_it(place: Place) -> None:
    """A container's, say: a command is not to be in another one's."""
    first = place.start("sh", "-c", SCRIPT, stdin=subprocess.PIPE)
    space = next(lines_of(first))
    command = ["unshare", "--mount", *place.wrapper(), *place.bare("readlink", "/proc/self/ns/mnt")]
    for job in ({}, {"SLURM_JOB_ID": "7"}):
        done = place.call(command, env=job)
        assert (done.returncode, done.stdout != space) == (0, True)
        assert done.stderr == (
            f"monarchfs: {place.source} is read without a cache: it is mounted for you in another"
            " container or mount namespace\n"
        )
    first.communicate("\n", timeout=WAIT_SECONDS)


def test_a_killed_run_takes_all_with_it(place: Place) -> None:
    running = place.start("sh", "-c", "echo ready; exec sleep 60.5")
    assert next(lines_of(running)) == "ready\n"
    # The wrapper has become run itself.
    running.kill()
    running.communicate(timeout=WAIT_SECONDS)
    wait_for(lambda: not processes_about("60.5"), "the command to end")
    place.wait_nothing_left()


def test_a_killed_keeper_takes_the_mount_with_it(place: Place) -> None:
    """Also if the supervisor has acted as another user, which opens the log of the next worker."""
    options = [] if place.user else ["--user", "nobody"]
    words = ("sh", "-c", "echo ready; read line; exit 5")
    running = place.start(*words, stdin=subprocess.PIPE, options=options)
    assert next(lines_of(running)) == "ready\n"
    first = place.told()["worker"]["pid"]
    keeper = parent_of(parent_of(first))
    os.kill(first, signal.SIGKILL)
    worker = wait_for(lambda: (pid := place.told()["worker"]["pid"]) != first and pid, "the next")
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{worker}").exists(), "the worker to end")
    running.communicate("\n", timeout=WAIT_SECONDS)
    assert running.returncode == 5
    # What a killed daemon leaves is in nobody's way, and goes with the next one.
    assert_view(place, options=options)


def test_what_a_killed_job_leaves_goes_with_the_next_run(place: Place) -> None:
    running = place.start("sh", "-c", "echo ready; exec sleep 60.625")
    assert next(lines_of(running)) == "ready\n"
    worker = place.told()["worker"]["pid"]
    killed: set[int] = set()
    # None is to have time to clean up, also none that was being started meanwhile.
    while more := {*place.processes(), worker} - killed:
        kill_each(more, signal.SIGSTOP)
        killed |= more
    kill_each(killed)
    running.communicate(timeout=WAIT_SECONDS)
    wait_for(lambda: not place.processes(), "all to be gone")
    assert place.runtime_files() != []
    assert_view(place, env={"SLURM_JOB_ID": "8"})
    assert place.runtime_files() == []


def test_what_outlives_the_command_does_not_keep_the_mount(users: Place) -> None:
    script = "cd source; sleep 60.125 >/dev/null 2>&1 & echo $!"
    done = users.run("sh", "-c", script)
    assert done.returncode == 0
    left = int(done.stdout)
    mounts = Path(f"/proc/{left}/mountinfo").read_text()
    os.kill(left, signal.SIGKILL)
    assert f" {users.source} " not in mounts
    wait_for(lambda: not processes_about("60.125"), "the last process to end")


# Seen from another mount namespace, as a container's: the truth


NAMESPACES = {
    "mounts": ["--mount", "--propagation", "private"],
    "mounts and processes": ["--mount", "--propagation", "private", "--pid", "--fork"],
}


@pytest.fixture
def mount(work: Bench) -> Mount:
    return work.mount(write_files(work.path / "source", {"file": b"content"}))


def inside(kind: str, script: str) -> str:
    """What a shell prints in a mount namespace of its own; ``m`` is the command."""
    proc = "mount -t proc proc /proc; " if "processes" in kind else ""
    script = f'm() {{ {shlex.join(MONARCHFS)} "$@"; }}; {proc}{script}'
    done = execute(["unshare", *NAMESPACES[kind], "sh", "-ec", script])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", NAMESPACES)
def test_a_mount_is_what_it_is(mount: Mount, kind: str) -> None:
    """Its copy there; where it is not there, it serves elsewhere; and who unmounts a copy takes
    nothing from others."""
    point = shlex.quote(str(mount.path))
    look = f"m status {point} --json; m status --json; m doctor --quick --json || true"
    for before, private in (("", False), (f"umount -l {point}; ", True)):
        one, listed, doctor = map(json.loads, inside(kind, before + look).splitlines())
        assert (one["state"], one["private"]) == ("serving", private)
        assert one["worker"]["pid"] == mount.worker_pid()
        ours = [m for m in listed["mounts"] if m["mountpoint"] == str(mount.path)]
        assert [(m["state"], m["private"]) for m in ours] == [("serving", private)]
        checks = [check for check in doctor["checks"] if check["name"] == "stale_mount"]
        assert [check for check in checks if check["mountpoint"] == str(mount.path)] == []
    inside(kind, f"m warm {point} --wait; m why {point}/file; m evict {point}/file")
    text = inside(kind, f"umount -l {point}; m status {point}")
    assert "serving" in text
    assert "not visible in this mount namespace" in text
    umount = f"m umount {point}; ! mountpoint -q {point}; m umount {point}"
    assert inside(kind, umount).endswith("is not mounted\n")
    assert mount.status()["state"] == "serving"
    assert (mount.path / "file").read_text() == "content"


FILES, LARGE = 16, 2
"""The large ones have the last numbers."""
SMALL_BYTES = 110_000
KILLED = int(os.environ.get("JOBS_KILLED", "4"))
SCRIPT = "readlink /proc/self/ns/mnt; read line"


class Jobs:
    """Jobs of one user, and the files that they read."""

    def __init__(self, place: Place) -> None:
        self.place = place
        sizes = [SMALL_BYTES] * FILES + [3 << 20] * LARGE
        self.bytes = sum(sizes)
        self.files = {f"f{n}": trees.random_bytes(size, n) for n, size in enumerate(sizes)}
        trees.write_files(place.source, self.files)
        for name in self.files:
            os.utime(place.source / name, (1e9, 1e9))
        shutil.copytree(place.source, place.path / "truth")

    def start(self, job: int, *words: str) -> subprocess.Popen[str]:
        return self.place.start(
            *words, job=job, stdin=subprocess.PIPE, options=["--freshness", "immutable"]
        )

    def waiting(self, job: int) -> subprocess.Popen[str]:
        """A job that has the mount, and does nothing until it gets a line."""
        process = self.start(job, "sh", "-c", SCRIPT)
        assert next(lines_of(process)).startswith("mnt:")
        return process

    def reading(self, job: int) -> subprocess.Popen[str]:
        """A job that reads here and there, compares, and has some files open and mapped."""
        process = self.start(job, "sh", "-c", f"cd {REPOSITORY} && exec {shlex.join(COMMAND)}")
        call = ["loop", str(self.place.source), list(self.files), f"{self.place.path}/truth", job]
        assert process.stdin is not None
        process.stdin.write(json.dumps(call) + "\n")
        process.stdin.flush()
        assert json.loads(next(lines_of(process))) == {"result": "reading"}
        return process

    def ended(self, reader: subprocess.Popen[str]) -> tuple[int, float]:
        """How often a reader has read, and how many seconds the longest round took. On a busy
        machine that may have waited for seconds for the next worker."""
        out, errors = reader.communicate('["end"]\n', timeout=WAIT_SECONDS)
        assert (errors, reader.returncode) == ("", 0)
        said, _ = map(json.loads, out.splitlines())
        rounds, worst = said["result"]
        assert rounds > 0
        return rounds, worst

    def is_other(self, worker: int) -> bool:
        return bool(self.status()["worker"]["pid"] != worker)

    def status(self) -> Any:
        """Once a worker answers."""

        def told() -> dict[str, Any] | None:
            status = self.place.told()
            return status if status.get("state") == "serving" else None

        return wait_for(told, "a mount that serves")


def below(pid: int) -> list[int]:
    """A process and its descendants, parents first."""
    return [pid, *(one.pid for one in psutil.Process(pid).children(recursive=True))]


def mount_namespaces(pid: int) -> set[str]:
    """Those in which a process and its descendants are, without that of the test."""
    found = set()
    for one in below(pid):
        with suppress(FileNotFoundError):  # a command of its that has ended
            found.add(os.readlink(f"/proc/{one}/ns/mnt"))
    return found - {os.readlink("/proc/self/ns/mnt")}


def kill_job(process: subprocess.Popen[str], seed: int | None = None) -> None:
    """As a batch system ends a job: nobody has time to clean up. With ``seed`` one dies after the
    other, in some order, and may react."""
    pids = below(process.pid)
    if seed is None:
        kill_each(pids, signal.SIGSTOP)
        while started := [pid for pid in below(process.pid) if pid not in pids]:
            kill_each(started, signal.SIGSTOP)
            pids += started
    else:
        random.Random(seed).shuffle(pids)
    kill_each(pids)
    process.communicate(timeout=WAIT_SECONDS)


@pytest.mark.smoke
def test_jobs_share_a_mount_and_the_last_one_unmounts(place: Place) -> None:
    """The exit code and the report of each are its own command's and the mount's."""
    jobs = Jobs(place)
    processes = [jobs.waiting(number) for number in (1, 2, 3)]
    spaces = [mount_namespaces(process.pid) for process in processes]
    # Only the shells of the jobs, deep below, are in the mount's own; the rest is in the place's.
    assert len(set.intersection(*spaces)) == 1 + place.user
    report = place.path / "report"
    report.touch()
    report.chmod(0o666)
    done = place.run(
        *("sh", "-c", "cat source/f1 | wc -c; exit 7"),
        options=["--json", str(report), "--freshness", "immutable"],
        env={"SLURM_JOB_ID": "4"},
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (7, "110000", "")
    told = json.loads(report.read_text())
    assert (told["view"], told["exit_code"], told["status"]["state"]) == ("own", 7, "serving")
    for process in processes:
        # The one that made the mount ends first, and is waited for by nobody.
        assert process.communicate("\n", timeout=WAIT_SECONDS) == ("", "")
        assert process.returncode == 0
    place.wait_nothing_left()


def test_the_owner_is_killed_again_and_again(place: Place) -> None:
    """It takes nothing of the others: what is local is not read again. JOBS_KILLED: how often.
    Prints the longest read."""
    jobs = Jobs(place)
    holders = [jobs.waiting(1)]
    readers = [jobs.reading(98), jobs.reading(99)]
    wait_for(lambda: jobs.status()["files"]["resident"] >= FILES + LARGE, "all to be copied")
    for number in range(2, KILLED + 2):
        holders.append(jobs.waiting(number))
        status = jobs.status()
        # A read that has to wait for a second goes to the source by itself.
        assert status["source_io"]["read_bytes"] < jobs.bytes + SMALL_BYTES
        worker = status["worker"]["pid"]
        supervisor = parent_of(worker)
        owner = next((holder for holder in holders if supervisor in below(holder.pid)), None)
        if owner is not None:
            kill_job(owner, seed=number if number % 2 else None)
            holders.remove(owner)
        else:  # a reader's job: its command goes on
            kill_each((parent_of(supervisor), supervisor, worker))
        wait_for(partial(jobs.is_other, worker), "another worker")
    readers.append(jobs.reading(100))
    status = jobs.status()
    assert status["files"]["resident"] >= FILES + LARGE
    assert status["source_io"]["read_bytes"] < jobs.bytes + SMALL_BYTES
    for reader in readers:
        print(f"{KILLED} kills:", jobs.ended(reader))
    for holder in holders:
        assert holder.communicate("\n", timeout=WAIT_SECONDS) == ("", "")


@contextmanager
def may_open_nothing(daemon: psutil.Process) -> Iterator[None]:
    """Until it has tried again and again."""
    limits = daemon.rlimit(psutil.RLIMIT_NOFILE)
    daemon.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
    yield
    often = daemon.num_ctx_switches().voluntary + 20
    wait_for(lambda: daemon.num_ctx_switches().voluntary > often, "attempts in vain")
    daemon.rlimit(psutil.RLIMIT_NOFILE, limits)


def test_a_killed_supervisor_is_replaced(place: Place) -> None:
    """Also if its daemon may open nothing for a while, and the next one dies at once. If the daemon
    is killed, its supervisor leaves the mount to another job, also if that did not stand by yet."""
    jobs = Jobs(place)
    reader = jobs.reading(1)
    began = time.monotonic()
    for _ in range(2):
        worker = jobs.status()["worker"]["pid"]
        daemon = psutil.Process(parent_of(parent_of(worker)))
        with may_open_nothing(daemon) if not place.user else nullcontext():
            kill_each((supervisor := parent_of(worker),))
        kill_each(wait_for(lambda: {*below(daemon.pid)[1:]} - {supervisor}, "the next one"))  # noqa: B023
        wait_for(partial(jobs.is_other, worker), "another worker")
    other = jobs.waiting(2)
    kill_each(stopped := below(other.pid), signal.SIGSTOP)
    os.kill(parent_of(worker := jobs.status()["worker"]["pid"]), signal.SIGKILL)
    wait_for(partial(jobs.is_other, worker), "another worker")
    os.kill(parent_of(parent_of(worker := jobs.status()["worker"]["pid"])), signal.SIGKILL)
    kill_each(stopped, signal.SIGCONT)
    wait_for(partial(jobs.is_other, worker), "another worker")
    assert time.monotonic() - began < jobs.status()["uptime_seconds"], "it is the mount's"
    jobs.ended(reader)
    assert other.communicate("\n", timeout=WAIT_SECONDS) == ("", "")


def test_a_job_that_is_killed_while_it_joins(place: Place) -> None:
    jobs = Jobs(place)
    reader = jobs.reading(1)
    for milliseconds in range(125 if place.user else 50, 500, 150):
        joining = jobs.start(2, "sh", "-c", SCRIPT)
        with pytest.raises(subprocess.TimeoutExpired):
            joining.wait(milliseconds / 1000)  # each is at another place by then
        kill_job(joining)
    jobs.ended(reader)


def test_unmounting_ends_it_for_all(work: Bench) -> None:
    """A signal does not: batch systems send it to each process of a job, whose command may go
    on."""
    with left_clean(make_place(work, user=True)) as place:
        jobs = Jobs(place)
        first, second = jobs.waiting(1), jobs.waiting(2)
        worker = jobs.status()["worker"]["pid"]
        supervisor = parent_of(worker)
        for pid in (parent_of(supervisor), supervisor, worker):
            for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM):
                os.kill(pid, number)
        assert jobs.status()["worker"]["pid"] == worker
        umount = place.run(*MONARCHFS, "umount", str(place.source), env={"SLURM_JOB_ID": "1"})
        assert (umount.returncode, umount.stdout) == (0, "")
        wait_for(lambda: not Path(f"/proc/{supervisor}").exists(), "the supervisor to end")
        for process in (first, second):
            assert process.communicate("\n", timeout=WAIT_SECONDS) == ("", "")
            assert process.returncode == 0


def test_files_that_the_kernel_reads_itself_stay_open(work: Bench) -> None:
    with left_clean(make_place(work, user=False)) as place:
        jobs = Jobs(place)
        first = jobs.waiting(1)
        warm = place.run("sh", "-c", f"cat source/f{FILES} | wc -c", env={"SLURM_JOB_ID": "1"})
        assert warm.returncode == 0
        wait_for(lambda: jobs.status()["files"]["resident"] >= 1, "a large file to be copied")
        reader = jobs.reading(2)
        wait_for(lambda: jobs.status()["passthrough"]["registered"] > 0, "a backing file")
        assert jobs.status()["data_path"] == "passthrough"
        kill_job(first)
        assert jobs.status()["data_path"] == "passthrough"
        jobs.ended(reader)
