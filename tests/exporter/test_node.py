"""The exporter of a node, with real mounts: of several users, coming, going, hanging, dead."""

from __future__ import annotations

import json
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from monarchfs.cli.exporter import parse_listen
from monarchfs.control.registration import Registration, own_mount_namespace
from monarchfs.supervisor.port import listen_on
from tests.support import surroundings
from tests.support.fake_daemon import Listener
from tests.support.fake_mounts import interpreter_for
from tests.support.mounting import (
    ENVIRONMENT,
    MONARCHFS,
    Bench,
    Mount,
    as_user,
    assert_one_line,
    free_port,
    requires_mounts,
    run,
    wait_for,
)
from tests.support.processes import status_of
from tests.support.scraping import FILES, Scrape, make_files, read_all, scrape, sums_are_right
from tests.support.timing import Stopwatch

pytestmark = requires_mounts

OTHER = pwd.getpwnam("daemon")
HOSTILE = pwd.getpwnam("games")
BOUND_SECONDS = 5.0
"""What a scrape may take, whatever hangs: less than Prometheus waits by default (10)."""


class Exporter(NamedTuple):
    """``process`` looks for mounts, ``reader`` is the one without privileges, its only child."""

    process: subprocess.Popen[str]
    reader: int
    port: int


@contextmanager
def exporter(*options: str, user: str | None = None) -> Iterator[int]:
    with exporter_process(*options, user=user) as running:
        yield running.port


@contextmanager
def exporter_process(*options: str, user: str | None = None) -> Iterator[Exporter]:
    """One that answers; neither of its processes is there afterwards."""
    port = free_port()
    process = subprocess.Popen(
        as_user(user, [*MONARCHFS, "exporter", "--listen", f"127.0.0.1:{port}", *options]),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        cwd="/",
        start_new_session=True,
    )

    def answers() -> bool:
        assert process.poll() is None, process.communicate()[1]
        with suppress(OSError):
            scrape(port)
            return True
        return False

    with process:
        try:
            wait_for(answers, "the exporter to answer")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            reader = int(children.split()[0])
            yield Exporter(process, reader, port)
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(10)
        wait_for(lambda: not os.path.exists(f"/proc/{reader}"), "its reader to end")


def registrations(mountpoint: Path) -> dict[Path, dict[str, Any]]:
    """Of root's mounts there, by their files."""
    entries = {file: json.loads(file.read_text()) for file in Path("/run/monarchfs").glob("*.json")}
    return {file: e for file, e in entries.items() if e["mountpoint"] == str(mountpoint)}


def ups(now: Scrape) -> list[tuple[dict[str, str], float]]:
    return [
        (dict(labels), value)
        for (name, labels), value in now.samples.items()
        if name == "monarchfs_mount_up"
    ]


def up(now: Scrape, mount: Mount) -> float | None:
    """What is said of a mount; None if nothing is."""
    return of(now, mount, "monarchfs_mount_up")


def of(now: Scrape, mount: Mount, name: str, **labels: str) -> float | None:
    """The value of a sample of a mount's; None if there is none."""
    user = mount.user or "root"
    labels |= {"user": user, "source": str(mount.source), "mount": str(mount.path)}
    return now.samples.get((name, frozenset(labels.items())))


def mounted(work: Bench, name: str, *options: str, user: str | None = None) -> Mount:
    """One of several mounts of a test, each with a source, a state and a tier of its own."""
    place = work.path / name
    place.mkdir(mode=0o1777)
    place.chmod(0o1777)
    make_files(place / "src")
    return work.mount(
        place / "src",
        *("--state-dir", str(place / "state"), "--log-file", str(place / "log"), *options),
        tiers=[f"{place}/tier=1G"],
        point=place / "mnt",
        user=user,
    )


def timely(port: int) -> Scrape:
    started = Stopwatch()
    now = scrape(port)
    started.check(BOUND_SECONDS)
    return now


@pytest.mark.usefixtures("open_device")
def test_mounts_of_several_users_come_and_go(work: Bench) -> None:
    interpreter_for("nobody")
    with exporter() as port, exporter(user="nobody") as nobodys_port:
        first = mounted(work, "first")
        read_all(first)
        first.wait_idle()
        read_all(first)
        own = mounted(work, "own", user="nobody")
        given = mounted(work, "given", "--user", "nobody")
        given.user = "nobody"
        given_reader = as_user("nobody", ["cat", str(given.path / "f0")])
        subprocess.run(given_reader, check=True, stdout=subprocess.DEVNULL, timeout=30)
        now = timely(port)
        assert [up(now, mount) for mount in (first, own, given)] == [1, 1, 1]
        assert of(now, first, "monarchfs_opens_total", served="local") == FILES
        assert of(now, first, "monarchfs_opens_total", served="source") == FILES
        assert of(now, first, "monarchfs_tier_capacity_bytes", tier=f"{work.path}/first/tier") == (
            1 << 30
        )
        assert of(now, own, "monarchfs_opens_total", served="source") == 0
        assert of(now, given, "monarchfs_opens_total", served="source") == 1
        labels = {"freshness": "ttl", "prefetch": "auto", "evict": "keep"}
        labels["data_path"] = first.status()["data_path"]
        assert of(now, first, "monarchfs_mount_info", **labels) == 1
        started = of(now, first, "monarchfs_mount_start_time_seconds")
        assert started is not None
        assert 0 < time.time() - started < 100
        sums_are_right(now)
        # An ordinary user sees mounts of that user.
        theirs = timely(nobodys_port)
        assert [up(theirs, mount) for mount in (first, own, given)] == [None, 1, 1]
        assert {labels["user"] for labels, _ in ups(theirs)} == {"nobody"}
        assert own.umount().returncode == 0
        now = timely(port)
        assert (up(now, first), up(now, own)) == (1, None)
        assert of(now, own, "monarchfs_opens_total", served="source") is None
        again = work.mount(
            own.source,
            *("--state-dir", f"{work.path}/own/state", "--log-file", f"{work.path}/own/log"),
            tiers=[f"{work.path}/own/tier=1G"],
            point=own.path,
            user="nobody",
        )
        assert up(timely(port), again) == 1


def supervisor_of(mount: Mount) -> int:
    (entry,) = registrations(mount.path).values()
    return int(entry["supervisor_pid"])


def test_who_hangs_is_down_and_holds_up_nobody_and_so_is_who_is_dead(work: Bench) -> None:
    well, hanging = mounted(work, "well"), mounted(work, "hanging")
    worker, supervisor = hanging.worker_pid(), supervisor_of(hanging)
    with exporter() as port:
        assert up(timely(port), hanging) == 1
        os.kill(worker, signal.SIGSTOP)
        try:
            for _ in range(2):
                now = timely(port)
                assert (up(now, well), up(now, hanging)) == (1, 0)
                assert of(now, hanging, "monarchfs_relayed_bytes_total") is None, "not said twice"
                assert of(now, well, "monarchfs_relayed_bytes_total") == 0
        finally:
            with suppress(ProcessLookupError):  # replaced meanwhile
                os.kill(worker, signal.SIGCONT)
        wait_for(lambda: up(timely(port), hanging) == 1, "a worker to answer again")
        os.kill(supervisor, signal.SIGSTOP)
        try:
            now = timely(port)
            assert (up(now, well), up(now, hanging)) == (1, 0)
        finally:
            os.kill(supervisor, signal.SIGCONT)
        wait_for(lambda: up(timely(port), hanging) == 1, "the supervisor to answer again")
        os.kill(supervisor, signal.SIGKILL)
        wait_for(lambda: up(timely(port), hanging) == 0, "its death to be seen")
        # Somebody has emptied the runtime directory: it is in the mount table all the same.
        if os.path.ismount(hanging.path):
            for file in registrations(hanging.path):
                file.unlink()
            assert up(timely(port), hanging) == 0
        run("umount", str(hanging.path))
        assert up(timely(port), hanging) is None
        assert up(timely(port), well) == 1


def test_a_registration_that_is_all_that_is_left_is_no_mount(work: Bench) -> None:
    mount = mounted(work, "gone")
    supervisor, worker = supervisor_of(mount), mount.worker_pid()
    os.kill(supervisor, signal.SIGKILL)
    os.kill(worker, signal.SIGKILL)
    subprocess.run(["umount", "-l", str(mount.path)], check=True, timeout=10)
    with exporter() as port:
        assert up(timely(port), mount) is None


def test_a_bind_mount_and_a_new_name_make_no_other_mount(work: Bench) -> None:
    mount = mounted(work, "before")
    (work.path / "copy").mkdir()
    subprocess.run(["mount", "--bind", mount.path, work.path / "copy"], check=True)
    (work.path / "before").rename(work.path / "after")
    try:
        with exporter() as port:
            now = timely(port)
            ours = [
                (labels["mount"], value)
                for labels, value in ups(now)
                if str(work.path) in labels["source"]
            ]
            assert ours == [(str(mount.path), 1)]
    finally:
        subprocess.run(["umount", work.path / "copy"], check=True)
        (work.path / "after").rename(work.path / "before")


@surroundings.requires_namespaces
def test_a_mount_in_another_mount_namespace_is_seen(work: Bench) -> None:
    """Two of them on the same mount point: the second gets a number."""
    outside = mounted(work, "x")
    assert outside.umount().returncode == 0
    inside = [
        *("unshare", "-m", "--propagation", "private", *MONARCHFS, "mount"),
        *(str(outside.source), str(outside.path), "--log-file", f"{work.path}/log"),
    ]
    for number in (1, 2):
        place = ["--state-dir", f"{work.path}/state{number}", "--tier", f"{work.path}/t{number}=1G"]
        subprocess.run([*inside, *place], check=True, timeout=60, cwd="/")
    pids = [int(entry["supervisor_pid"]) for entry in registrations(outside.path).values()]
    try:
        with exporter() as port:
            mounts = {
                labels["mount"]: value
                for labels, value in ups(timely(port))
                if labels["source"] == str(outside.source)
            }
            assert mounts == {str(outside.path): 1, f"{outside.path} (2)": 1}
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        wait_for(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the daemons to end"
        )


# The two processes


def test_who_reads_what_mounts_say_has_no_privilege_and_waits_for_nobody(work: Bench) -> None:
    mount = mounted(work, "one")
    with exporter_process("--user", "daemon") as (process, reader, port):
        status = status_of(reader)
        assert set(status["Uid"].split()) == {str(OTHER.pw_uid)}
        assert set(status["Gid"].split()) == {str(OTHER.pw_gid)}
        assert status["Groups"].split() == []
        capabilities = [int(status[f"Cap{kind}"], 16) for kind in ("Prm", "Eff", "Inh", "Amb")]
        assert capabilities == [0] * 4
        assert status["NoNewPrivs"] == "1"
        # And the other one takes part in nothing but looking: it holds no mount's connection.
        assert status_of(process.pid)["Uid"].split()[0] == "0"
        # If that one is stopped, a scrape takes a bounded time all the same.
        process.send_signal(signal.SIGSTOP)
        for _ in range(2):
            started = Stopwatch()
            with pytest.raises(AssertionError):  # status 500
                scrape(port)
            started.check(BOUND_SECONDS)
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: up(timely(port), mount) == 1, "it to go on")


@pytest.mark.parametrize(
    ("killed", "code", "said"),
    [
        ("the first", -signal.SIGKILL, ""),
        ("the reader", 1, "monarchfs: the exporter ended unexpectedly: its log says more\n"),
        ("Ctrl-C", -signal.SIGINT, "monarchfs: interrupted\n"),
    ],
)
def test_each_ends_with_the_other(killed: str, code: int, said: str) -> None:
    with exporter_process() as (process, reader, _port):
        if killed == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(process.pid if killed == "the first" else reader, signal.SIGKILL)
        process.wait(10)
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (code, said)


# The command line


def test_wrong_calls_are_told_in_one_line() -> None:
    for options, code, words in (
        (["--listen", "192.0.2.1:9465"], 1, "cannot serve metrics on 192.0.2.1:9465: Cannot"),
        (["--user", "no such user"], 2, "there is no user 'no such user'"),
        (["--user", "root"], 2, "what users' mounts say is not for root to read"),
    ):
        assert_one_line(run("exporter", *options), code, words)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        told = f"cannot serve metrics on {where}: Address already in use: give another --listen"
        assert_one_line(run("exporter", "--listen", where), 1, told)
    interpreter_for("nobody")
    done = run("exporter", "--user", "daemon", "--once", user="nobody")
    assert_one_line(done, 2, "only root can run it as another user")


def test_it_listens_on_ipv6_too() -> None:
    port = free_port()
    try:
        socket.create_server(("::1", port), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs IPv6: sysctl net.ipv6.conf.lo.disable_ipv6=0")
    with listen_on(*parse_listen(f"[::1]:{port}"), "--listen") as listener:
        assert listener.getsockname()[:2] == ("::1", port)


# Users who do not play by the rules


Say = Callable[[socket.socket], object]


@contextmanager
def hostile_daemon(say: Say, *, started_ns: int = 1) -> Iterator[None]:
    """Something of a user's in place of a mount's daemon, which says it has root's dataset."""
    directory = Path(f"/tmp/monarchfs-{HOSTILE.pw_uid}/run")
    entry = Registration(
        *("/hostile", own_mount_namespace(), "/lustre/of-somebody-else", HOSTILE.pw_uid),
        *(1, 1, "/x", started_ns),
    )
    if directory.exists() and list(directory.iterdir()):
        pytest.skip(f"needs {directory} unused: umount the mounts of {HOSTILE.pw_name}")

    def serve(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.recv(4096)
            say(connection)

    stem = directory / "0123456789abcdef01234567"
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        stack.callback(Listener(f"{stem}.sock", serve).close)
        stem.with_suffix(".json").write_text(entry.to_json())
        for path in (directory.parent, directory, *directory.iterdir()):
            os.chown(path, HOSTILE.pw_uid, HOSTILE.pw_gid)
            path.chmod(0o700)
        yield


def never_end(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x" * 65536)


def never_come(connection: socket.socket) -> None:
    poll = select.poll()
    poll.register(connection, 0)
    poll.poll(10_000)


def come_byte_by_byte(connection: socket.socket) -> None:
    for _ in range(100):
        connection.sendall(b"{")
        time.sleep(0.1)


def answer(text: str) -> Say:
    return lambda connection: connection.sendall(text.encode() + b"\n")


def metrics(**values: object) -> Say:
    return answer(json.dumps({"ok": True, "result": {"metrics": values, "bounds_ns": {}}}))


BAD = "monarchfs_opens_total"
LIE = 987_654_321  # no mount of another test has it
NONSENSE = answer("nonsense")
HOSTILE_ANSWERS = {
    "never ends": never_end,
    "never comes": never_come,
    "comes byte by byte": come_byte_by_byte,
    "is no JSON": NONSENSE,
    "is deep": answer("[" * 50_000),
    "has labels that break lines": metrics(**{BAD: [[['x"} 1\nup 0\n#'], 1]]}),
}


def test_a_hostile_daemon_is_down_and_disturbs_nobody(work: Bench) -> None:
    mount = mounted(work, "one")
    with exporter() as port:
        cases = [(what, say, 1) for what, say in HOSTILE_ANSWERS.items()]
        cases += [(f"began at {number}", NONSENSE, number) for number in (10**400, -1, 1 << 63)]
        for what, say, started_ns in cases:
            with hostile_daemon(say, started_ns=started_ns):
                now = timely(port)
            assert up(now, mount) == 1, what
            hostile = {
                name: value
                for (name, labels), value in now.samples.items()
                if ("user", HOSTILE.pw_name) in labels
            }
            assert hostile.pop("monarchfs_mount_up") == 0, what
            began = {"monarchfs_mount_start_time_seconds"} if started_ns == 1 else set()
            assert set(hostile) == began, what
        only_about_its_own_user(mount, port)


def only_about_its_own_user(mount: Mount, port: int) -> None:
    lies = metrics(
        monarchfs_opens_total=[[["local"], LIE]],
        monarchfs_unheard_of=[[["x"], 1]],
        monarchfs_mount_info=[[["/s", "/m", "relay", "ttl", "all", "keep"], 1]],
    )
    with hostile_daemon(lies):
        now = timely(port)
        assert up(now, mount) == 1
        users = {
            dict(labels).get("user") for (_, labels), value in now.samples.items() if value == LIE
        }
        assert users == {HOSTILE.pw_name}
        assert "unheard_of" not in now.text
        told = [dict(labels) for name, labels in now.samples if name == "monarchfs_mount_info"]
        (lie,) = [labels for labels in told if labels["user"] == HOSTILE.pw_name]
        assert lie["source"] == "/lustre/of-somebody-else"
        assert lie["mount"] == "/hostile"
