"""The exporter of a node, with real mounts: of several users, coming, going, hanging, dead."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from monarchfs.control.registration import Registration, own_mount_namespace
from tests.exporter.nodes import exporter, exporter_process, of, reader_of, up, wait_answering
from tests.support import surroundings
from tests.support.fake_mounts import interpreter_for
from tests.support.mounting import (
    MONARCHFS,
    Bench,
    Mount,
    as_user,
    free_port,
    requires_mounts,
    run,
    wait_for,
)
from tests.support.scraping import (
    FILES,
    Scrape,
    make_files,
    parse,
    read_all,
    scrape,
    sums_are_right,
)
from tests.support.timing import Stopwatch

pytestmark = requires_mounts

OTHER = pwd.getpwnam("daemon")
HOSTILE = pwd.getpwnam("games")
BOUND_SECONDS = 5.0
"""What a scrape may take, whatever hangs: less than Prometheus waits by default (10)."""


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
        ups = [dict(labels) for name, labels in theirs.samples if name == "monarchfs_mount_up"]
        assert {labels["user"] for labels in ups} == {"nobody"}
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
    for file in Path("/run/monarchfs").glob("*.json"):
        entry = json.loads(file.read_text())
        if entry["mountpoint"] == str(mount.path):
            return int(entry["supervisor_pid"])
    raise AssertionError("it is not registered")


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
            for file in Path("/run/monarchfs").glob("*.json"):
                if json.loads(file.read_text())["mountpoint"] == str(hanging.path):
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
                (dict(labels)["mount"], value)
                for (name, labels), value in now.samples.items()
                if name == "monarchfs_mount_up" and str(work.path) in dict(labels)["source"]
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
    pids = []
    for file in Path("/run/monarchfs").glob("*.json"):
        entry = json.loads(file.read_text())
        if entry["mountpoint"] == str(outside.path):
            pids.append(int(entry["supervisor_pid"]))
    assert len(pids) == 2
    try:
        with exporter() as port:
            now = timely(port)
            mounts = {
                dict(labels)["mount"]: value
                for (name, labels), value in now.samples.items()
                if name == "monarchfs_mount_up" and ("source", str(outside.source)) in labels
            }
            assert mounts == {str(outside.path): 1, f"{outside.path} (2)": 1}
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        wait_for(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the daemons to end"
        )


# The two processes


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def test_who_reads_what_mounts_say_has_no_privilege_and_waits_for_nobody(work: Bench) -> None:
    mount = mounted(work, "one")
    with exporter_process("--user", "daemon") as (process, port):
        reader = reader_of(process.pid)
        assert reader is not None
        status = status_of(reader)
        assert set(status["Uid"].split()) == {str(OTHER.pw_uid)}
        assert set(status["Gid"].split()) == {str(OTHER.pw_gid)}
        assert status["Groups"].split() == []
        assert [int(status[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")] == [
            0
        ] * 4
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


def test_the_capabilities_of_its_unit_are_enough(work: Bench) -> None:
    unit = (Path(__file__).parents[2] / "systemd" / "monarchfs-exporter.service").read_text()
    (line,) = [x for x in unit.splitlines() if x.startswith("CapabilityBoundingSet=")]
    names = [name.removeprefix("CAP_").lower() for name in line.partition("=")[2].split()]
    kept = ",".join(["-all", *(f"+{name}" for name in names)])
    mount = mounted(work, "one", "--user", "nobody")
    mount.user = "nobody"
    restricted = ["setpriv", "--no-new-privs", "--bounding-set", kept]
    done = subprocess.run(
        [*restricted, *MONARCHFS, "exporter", "--once"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd="/",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert up(parse(done.stdout), mount) == 1


def test_each_ends_with_the_other() -> None:
    with exporter_process() as (process, _port):
        reader = reader_of(process.pid)
        assert reader is not None
        process.kill()
        process.wait(10)
        wait_for(lambda: not Path(f"/proc/{reader}").exists(), "the reader to end")
    port = free_port()
    other = subprocess.Popen(
        [*MONARCHFS, "exporter", "--listen", f"127.0.0.1:{port}"],
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
    )
    try:
        wait_answering(other, port)
        reader = reader_of(other.pid)
        assert reader is not None
        os.kill(reader, signal.SIGKILL)
        _, errors = other.communicate(timeout=10)
        assert other.returncode == 1
        assert errors == "monarchfs: the exporter ended unexpectedly: its log says more\n"
    finally:
        other.kill()
        other.communicate(timeout=10)


def test_ctrl_c_ends_it_with_one_line() -> None:
    port = free_port()
    process = subprocess.Popen(
        [*MONARCHFS, "exporter", "--listen", f"127.0.0.1:{port}"],
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        start_new_session=True,
    )
    wait_answering(process, port)
    reader = reader_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (-signal.SIGINT, "monarchfs: interrupted\n")
    wait_for(lambda: not Path(f"/proc/{reader}").exists(), "the reader to end")


# The command line


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--listen", "192.0.2.1:9465"], 1, "cannot serve metrics on 192.0.2.1:9465: Cannot"),
        (["--user", "no such user"], 2, "there is no user 'no such user'"),
        (["--user", "root"], 2, "what users' mounts say is not for root to read"),
    ],
)
def test_wrong_calls_are_told_in_one_line(options: list[str], code: int, words: str) -> None:
    done = run("exporter", *options)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("monarchfs: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_told_and_user_is_for_root() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        done = run("exporter", "--listen", where)
        assert done.returncode == 1
        assert done.stderr == (
            f"monarchfs: cannot serve metrics on {where}: Address already in use:"
            " give another --listen\n"
        )
    interpreter_for("nobody")
    done = run("exporter", "--user", "daemon", "--once", user="nobody")
    assert (done.returncode, done.stdout) == (2, "")
    assert "only root can run it as another user" in done.stderr


def test_it_listens_on_ipv6_too() -> None:
    port = free_port()
    try:
        socket.create_server(("::1", port), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs IPv6: sysctl net.ipv6.conf.lo.disable_ipv6=0")
    process = subprocess.Popen([*MONARCHFS, "exporter", "--listen", f"[::1]:{port}"], cwd="/")
    try:

        def connected() -> bool:
            try:
                socket.create_connection(("::1", port), 1).close()
            except OSError:
                return False
            return True

        wait_for(connected, "it to listen")
    finally:
        process.terminate()
        process.wait(10)


# Users who do not play by the rules


DAEMON = """
import json, os, socket, sys, time
directory, answer = sys.argv[1], sys.argv[2]
entry = json.loads(sys.argv[3])
os.makedirs(directory, mode=0o700, exist_ok=True)
name = "0123456789abcdef01234567"
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"{directory}/{name}.sock")
listener.listen(64)
with open(f"{directory}/{name}.json", "w") as file:
    json.dump(entry, file)
print("ready", flush=True)
kept = []
while True:
    connection, _ = listener.accept()
    connection.recv(4096)
    try:
        if answer == "endless":
            while True:
                connection.sendall(b"x" * 65536)
        elif answer == "silent":
            kept.append(connection)
        elif answer == "slow":
            for _ in range(100):
                connection.sendall(b"{")
                time.sleep(0.1)
        else:
            connection.sendall(answer.encode() + b"\\n")
            connection.close()
    except OSError:
        pass
"""


@contextmanager
def hostile_daemon(answer: str, *, started_ns: int = 1) -> Iterator[None]:
    """A program of a user's in place of a mount's daemon, which says it has root's dataset."""
    directory = Path(f"/tmp/monarchfs-{HOSTILE.pw_uid}/run")
    entry = Registration(
        mountpoint="/hostile",
        mount_namespace=own_mount_namespace(),
        source="/lustre/of-somebody-else",
        uid=HOSTILE.pw_uid,
        supervisor_pid=1,
        start_ticks=1,
        state_dir="/x",
        started_ns=started_ns,
    )
    if directory.exists() and list(directory.iterdir()):
        pytest.skip(f"needs {directory} unused: umount the mounts of {HOSTILE.pw_name}")
    shutil.rmtree(directory, ignore_errors=True)
    python = interpreter_for(HOSTILE.pw_name)
    process = subprocess.Popen(
        as_user(HOSTILE.pw_name, [python, "-c", DAEMON, str(directory), answer, entry.to_json()]),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
    finally:
        process.kill()
        process.communicate(timeout=10)
        shutil.rmtree(directory, ignore_errors=True)


BAD = "monarchfs_opens_total"
LIE = 987_654_321  # no mount of another test has it


def saying(**metrics: object) -> str:
    return json.dumps({"ok": True, "result": {"metrics": metrics, "bounds_ns": {}}})


HOSTILE_ANSWERS = {
    "never ends": "endless",
    "never comes": "silent",
    "comes byte by byte": "slow",
    "is no JSON": "nonsense",
    "is deep": "[" * 50_000,
    "has labels that break lines": saying(**{BAD: [[['x"} 1\nup 0\n#'], 1]]}),
}


def test_a_hostile_daemon_is_down_and_disturbs_nobody(work: Bench) -> None:
    mount = mounted(work, "one")
    with exporter() as port:
        cases = [(what, answer, 1) for what, answer in HOSTILE_ANSWERS.items()]
        cases += [(f"began at {number}", "nonsense", number) for number in (10**400, -1, 1 << 63)]
        for what, answer, started_ns in cases:
            with hostile_daemon(answer, started_ns=started_ns):
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
    """A daemon may lie, but not about others."""
    answer = {
        "metrics": {
            BAD: [[["local"], LIE]],
            "monarchfs_unheard_of": [[["x"], 1]],
            "monarchfs_mount_info": [[["/s", "/m", "relay", "ttl", "all", "keep"], 1]],
        },
        "bounds_ns": {},
    }
    with hostile_daemon(json.dumps({"ok": True, "result": answer})):
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
