"""Metrics of real mounts, from the exporter of a node and from a mount's own port: of several
users, coming, going, hanging, dead, lying. What was done is what is counted."""

import json
import mmap
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from monarchfs.cli.exporter import parse_listen
from monarchfs.control.registration import Registration, own_mount_namespace
from monarchfs.metrics.names import FAMILIES
from monarchfs.supervisor.port import listen_on
from tests.support import mounting, scraping, surroundings
from tests.support.fake_daemon import Listener
from tests.support.fake_mounts import interpreter_for
from tests.support.processes import parent_of, status_of
from tests.support.reading import COMMAND, Reader
from tests.support.timing import Stopwatch

pytestmark = mounting.requires_mounts

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
def exporter(*options: str, user: str | None = None) -> Iterator[Exporter]:
    """One that answers; neither of its processes is there afterwards."""
    port = mounting.free_port()
    process = subprocess.Popen(
        mounting.as_user(
            user, [*mounting.MONARCHFS, "exporter", "--listen", f"127.0.0.1:{port}", *options]
        ),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=mounting.ENVIRONMENT,
        cwd="/",
        start_new_session=True,
    )

    def answers() -> bool:
        assert process.poll() is None, process.communicate()[1]
        with suppress(OSError):
            scraping.scrape(port)
            return True
        return False

    with process:
        try:
            mounting.wait_for(answers, "the exporter to answer")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            reader = int(children.split()[0])
            yield Exporter(process, reader, port)
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait(10)
        mounting.wait_for(lambda: not os.path.exists(f"/proc/{reader}"), "its reader to end")


def registrations(mountpoint: Path) -> dict[Path, dict[str, Any]]:
    """Of root's mounts there, by their files."""
    entries = {file: json.loads(file.read_text()) for file in Path("/run/monarchfs").glob("*.json")}
    return {file: e for file, e in entries.items() if e["mountpoint"] == str(mountpoint)}


def ups(now: scraping.Scrape) -> list[tuple[dict[str, str], float]]:
    return [
        (dict(labels), value)
        for (name, labels), value in now.samples.items()
        if name == "monarchfs_mount_up"
    ]


def up(now: scraping.Scrape, mount: mounting.Mount) -> float | None:
    """What is said of a mount; None if nothing is."""
    return of(now, mount, "monarchfs_mount_up")


def of(now: scraping.Scrape, mount: mounting.Mount, name: str, **labels: str) -> float | None:
    """The value of a sample of a mount's; None if there is none."""
    user = mount.user or "root"
    labels |= {"user": user, "source": str(mount.source), "mount": str(mount.path)}
    return now.samples.get((name, frozenset(labels.items())))


def mounted(
    work: mounting.Bench, name: str, *options: str, user: str | None = None
) -> mounting.Mount:
    """One of several mounts of a test, each with a source, a state and a tier of its own."""
    place = work.path / name
    place.mkdir(exist_ok=True)
    place.chmod(0o1777)
    scraping.make_files(place / "src")
    return work.mount(
        place / "src",
        *("--state-dir", str(place / "state"), "--log-file", str(place / "log"), *options),
        tiers=[f"{place}/tier=1G"],
        point=place / "mnt",
        user=user,
    )


def timely(node: Exporter) -> scraping.Scrape:
    started = Stopwatch()
    now = scraping.scrape(node.port)
    started.check(BOUND_SECONDS)
    return now


@pytest.mark.usefixtures("open_device")
def test_mounts_of_several_users_come_and_go(work: mounting.Bench) -> None:
    interpreter_for("nobody")
    with exporter() as node, exporter(user="nobody") as nobodys:
        first = mounted(work, "first")
        scraping.read_all(first)
        first.wait_idle()
        scraping.read_all(first)
        own = mounted(work, "own", user="nobody")
        given = mounted(work, "given", "--user", "nobody")
        given.user = "nobody"
        given_reader = mounting.as_user("nobody", ["cat", str(given.path / "f0")])
        subprocess.run(given_reader, check=True, stdout=subprocess.DEVNULL, timeout=30)
        now = timely(node)
        assert [up(now, mount) for mount in (first, own, given)] == [1, 1, 1]
        assert of(now, first, "monarchfs_opens_total", served="local") == scraping.FILES
        assert of(now, first, "monarchfs_opens_total", served="source") == scraping.FILES
        assert of(now, own, "monarchfs_opens_total", served="source") == 0
        assert of(now, given, "monarchfs_opens_total", served="source") == 1
        labels = {"freshness": "ttl", "prefetch": "auto", "evict": "keep"}
        labels["data_path"] = first.status()["data_path"]
        assert of(now, first, "monarchfs_mount_info", **labels) == 1
        started = of(now, first, "monarchfs_mount_start_time_seconds")
        assert started is not None
        assert 0 < time.time() - started < 100
        scraping.sums_are_right(now)
        # An ordinary user sees mounts of that user.
        theirs = timely(nobodys)
        assert [up(theirs, mount) for mount in (first, own, given)] == [None, 1, 1]
        assert {labels["user"] for labels, _ in ups(theirs)} == {"nobody"}
        assert own.umount().returncode == 0
        now = timely(node)
        assert (up(now, first), up(now, own)) == (1, None)
        assert of(now, own, "monarchfs_opens_total", served="source") is None
        again = mounted(work, "own", user="nobody")
        assert up(timely(node), again) == 1


def test_who_hangs_is_down_and_holds_up_nobody_and_so_is_who_is_dead(work: mounting.Bench) -> None:
    well, hanging = mounted(work, "well"), mounted(work, "hanging")
    worker = hanging.worker_pid()
    supervisor = parent_of(worker)
    with exporter() as node:
        assert up(timely(node), hanging) == 1
        os.kill(worker, signal.SIGSTOP)
        try:
            for _ in range(2):
                now = timely(node)
                assert (up(now, well), up(now, hanging)) == (1, 0)
                assert of(now, hanging, "monarchfs_relayed_bytes_total") is None, "not said twice"
                assert of(now, well, "monarchfs_relayed_bytes_total") == 0
        finally:
            with suppress(ProcessLookupError):  # replaced meanwhile
                os.kill(worker, signal.SIGCONT)
        mounting.wait_for(lambda: up(timely(node), hanging) == 1, "a worker to answer again")
        os.kill(supervisor, signal.SIGSTOP)
        try:
            now = timely(node)
            assert (up(now, well), up(now, hanging)) == (1, 0)
        finally:
            os.kill(supervisor, signal.SIGCONT)
        mounting.wait_for(lambda: up(timely(node), hanging) == 1, "the supervisor to answer again")
        os.kill(supervisor, signal.SIGKILL)
        mounting.wait_for(lambda: up(timely(node), hanging) == 0, "its death to be seen")
        # Somebody has emptied the runtime directory: it is in the mount table all the same.
        left = registrations(hanging.path)
        if os.path.ismount(hanging.path):
            for file in left:
                file.unlink()
            assert up(timely(node), hanging) == 0
        mounting.run("umount", str(hanging.path))
        assert up(timely(node), hanging) is None
        # A registration that is all that is left is no mount.
        ((file, entry),) = left.items()
        file.write_text(json.dumps(entry))
        assert up(timely(node), hanging) is None
        file.unlink()
        assert up(timely(node), well) == 1


def test_a_bind_mount_and_a_new_name_make_no_other_mount(work: mounting.Bench) -> None:
    mount = mounted(work, "before")
    (work.path / "copy").mkdir()
    subprocess.run(["mount", "--bind", mount.path, work.path / "copy"], check=True)
    (work.path / "before").rename(work.path / "after")
    try:
        with exporter() as node:
            now = timely(node)
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
def test_a_mount_in_another_mount_namespace_is_seen(work: mounting.Bench) -> None:
    """Two of them on the same mount point: the second gets a number."""
    outside = mounted(work, "x")
    assert outside.umount().returncode == 0
    inside = [
        *("unshare", "-m", "--propagation", "private", *mounting.MONARCHFS, "mount"),
        *(str(outside.source), str(outside.path), "--log-file", f"{work.path}/log"),
    ]
    for number in (1, 2):
        place = ["--state-dir", f"{work.path}/state{number}", "--tier", f"{work.path}/t{number}=1G"]
        subprocess.run([*inside, *place], check=True, timeout=60, cwd="/")
    pids = [int(entry["supervisor_pid"]) for entry in registrations(outside.path).values()]
    try:
        with exporter() as node:
            mounts = {
                labels["mount"]: value
                for labels, value in ups(timely(node))
                if labels["source"] == str(outside.source)
            }
            assert mounts == {str(outside.path): 1, f"{outside.path} (2)": 1}
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        mounting.wait_for(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the daemons to end"
        )


def test_who_reads_what_mounts_say_has_no_privilege_and_never_waits(work: mounting.Bench) -> None:
    mount = mounted(work, "one")
    with exporter("--user", "daemon") as node:
        process, status = node.process, status_of(node.reader)
        assert set(status["Uid"].split()) == {str(OTHER.pw_uid)}
        assert set(status["Gid"].split()) == {str(OTHER.pw_gid)}
        assert status["Groups"].split() == []
        assert [int(status[f"Cap{kind}"], 16) for kind in ("Prm", "Eff", "Inh", "Amb")] == [0] * 4
        assert status["NoNewPrivs"] == "1"
        # And the other one takes part in nothing but looking: it holds no mount's connection.
        assert status_of(process.pid)["Uid"].split()[0] == "0"
        # If that one is stopped, a scrape takes a bounded time all the same.
        process.send_signal(signal.SIGSTOP)
        for _ in range(2):
            started = Stopwatch()
            with pytest.raises(AssertionError):  # status 500
                scraping.scrape(node.port)
            started.check(BOUND_SECONDS)
        process.send_signal(signal.SIGCONT)
        mounting.wait_for(lambda: up(timely(node), mount) == 1, "it to go on")


@pytest.mark.parametrize(
    ("killed", "code", "said"),
    [
        ("the first", -signal.SIGKILL, ""),
        ("the reader", 1, "monarchfs: the exporter ended unexpectedly: its log says more\n"),
        ("Ctrl-C", -signal.SIGINT, "monarchfs: interrupted\n"),
    ],
)
def test_each_ends_with_the_other(killed: str, code: int, said: str) -> None:
    with exporter() as (process, reader, _port):
        if killed == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(process.pid if killed == "the first" else reader, signal.SIGKILL)
        process.wait(10)
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (code, said)


def test_wrong_calls_are_told_in_one_line() -> None:
    for options, code, words in (
        (["--listen", "192.0.2.1:9465"], 1, "cannot serve metrics on 192.0.2.1:9465: Cannot"),
        (["--user", "no such user"], 2, "there is no user 'no such user'"),
        (["--user", "root"], 2, "what users' mounts say is not for root to read"),
    ):
        mounting.assert_one_line(mounting.run("exporter", *options), code, words)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        told = f"cannot serve metrics on {where}: Address already in use: give another --listen"
        mounting.assert_one_line(mounting.run("exporter", "--listen", where), 1, told)
    interpreter_for("nobody")
    done = mounting.run("exporter", "--user", "daemon", "--once", user="nobody")
    mounting.assert_one_line(done, 2, "only root can run it as another user")


def test_it_listens_on_ipv6_too() -> None:
    port = mounting.free_port()
    try:
        socket.create_server(("::1", port), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs IPv6: sysctl net.ipv6.conf.lo.disable_ipv6=0")
    with listen_on(*parse_listen(f"[::1]:{port}"), "--listen") as listener:
        assert listener.getsockname()[:2] == ("::1", port)


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


LIE = 987_654_321  # no mount of another test has it
NONSENSE = answer("nonsense")
HOSTILE_ANSWERS = {
    "never ends": never_end,
    "never comes": never_come,
    "comes byte by byte": come_byte_by_byte,
    "is no JSON": NONSENSE,
    "is deep": answer("[" * 50_000),
}


def test_a_hostile_daemon_is_down_and_disturbs_nobody(work: mounting.Bench) -> None:
    mount = mounted(work, "one")
    with exporter() as node:
        cases = [(what, say, 1) for what, say in HOSTILE_ANSWERS.items()]
        cases += [(f"began at {number}", NONSENSE, number) for number in (10**400, -1, 1 << 63)]
        for what, say, started_ns in cases:
            with hostile_daemon(say, started_ns=started_ns):
                now = timely(node)
            assert up(now, mount) == 1, what
            hostile = {
                name: value
                for (name, labels), value in now.samples.items()
                if ("user", HOSTILE.pw_name) in labels
            }
            assert hostile.pop("monarchfs_mount_up") == 0, what
            began = {"monarchfs_mount_start_time_seconds"} if started_ns == 1 else set()
            assert set(hostile) == began, what
        # It is heard about its own user alone.
        lies = metrics(
            monarchfs_opens_total=[[["local"], LIE]],
            monarchfs_unheard_of=[[["x"], 1]],
            monarchfs_mount_info=[[["/s", "/m", "relay", "ttl", "all", "keep"], 1]],
        )
        with hostile_daemon(lies):
            now = timely(node)
        assert up(now, mount) == 1
        assert "unheard_of" not in now.text
        told = [(name, dict(labels), value) for (name, labels), value in now.samples.items()]
        liars = {labels.get("user") for _, labels, value in told if value == LIE}
        assert liars == {HOSTILE.pw_name}
        infos = [labels for name, labels, _ in told if name == "monarchfs_mount_info"]
        (lie,) = [labels for labels in infos if labels["user"] == HOSTILE.pw_name]
        assert (lie["source"], lie["mount"]) == ("/lustre/of-somebody-else", "/hostile")


def with_port(work: mounting.Bench, *options: str) -> tuple[mounting.Mount, int]:
    scraping.make_files(work.path / "src")
    port = mounting.free_port()
    return work.mount(work.path / "src", "--metrics-port", str(port), *options), port


def faulty_with_port(
    work: mounting.Bench, *options: str
) -> tuple[mounting.Mount, int, mounting.FaultySource]:
    scraping.make_files(work.path / "backing")
    source = work.faulty_source(work.path / "backing")
    port = mounting.free_port()
    return work.mount(source.path, "--metrics-port", str(port), *options), port, source


@contextmanager
def reading(*call: object, healed: mounting.FaultySource | None = None) -> Iterator[Reader]:
    """Who reads files meanwhile; killed at the end, when the source is well again."""
    with closing(Reader(COMMAND)) as reader:
        reader.tell(*call)
        try:
            yield reader
        finally:
            if healed is not None:
                healed.faults()


def test_what_was_done_is_what_is_counted(work: mounting.Bench) -> None:
    """What each operation counts is recorded in tests/scenarios."""
    mount, port = with_port(work, "--freshness", "ttl=3600")
    assert mount.status()["metrics_port"] == port
    scraping.read_all(mount)
    mount.wait_idle()
    scraping.read_all(mount)
    assert mounting.run("evict", str(mount.path), "f0").returncode == 0
    now = scraping.scrape(port)
    tier = f"{work.path}/tier"
    for served in ("local", "source"):
        assert now.value("monarchfs_opens_total", served=served) == scraping.FILES
        assert (
            now.value("monarchfs_opened_file_bytes_total", served=served)
            == scraping.FILES * scraping.SIZE
        )
    assert now.total("monarchfs_source_read_bytes_total") == scraping.FILES * scraping.SIZE
    assert now.value("monarchfs_copies_completed_total") == scraping.FILES
    assert now.value("monarchfs_evictions_total", reason="manual") == 1
    assert now.value("monarchfs_tier_files", tier=tier, state="complete") == scraping.FILES - 1
    assert now.value("monarchfs_tier_capacity_bytes", tier=tier) == 1 << 30
    assert now.value("monarchfs_tier_in_service", tier=tier) == 1
    # Also of what is just being removed.
    used = now.value("monarchfs_tier_used_bytes", tier=tier)
    assert (scraping.FILES - 1) * scraping.SIZE <= used <= scraping.FILES * (scraping.SIZE + 8192)
    assert now.value("monarchfs_index_inodes") == scraping.FILES + 1
    assert now.value("monarchfs_index_bytes") > 4096
    assert now.value("process_open_fds") > 5
    assert f'mountpoint="{mount.path}"' in now.text
    scraping.sums_are_right(now)
    # Everything that is documented is exported, and nothing else.
    ours = {name: kind for name, kind in now.kinds.items() if name.startswith("monarchfs_")}
    assert ours == {family.name: family.kind.value for family in FAMILIES}
    for family in FAMILIES:
        # An empty label is the same as none, and the parser leaves none out.
        assert now.labels[family.name] == set(family.labels)
    document = (mounting.REPOSITORY / "docs" / "METRICS.md").read_text()
    assert [name for name in now.kinds if f"`{name}`" not in document] == []
    scraping.read_all(mount, ["f1", "f2"])
    mount.wait_idle()
    assert len(scraping.scrape(port).samples) == len(now.samples), "work makes no series"


def waits(now: scraping.Scrape) -> dict[str, float]:
    causes = ("source", "memory", "tier", "peer", "copy", "names")
    return {cause: now.value("monarchfs_wait_seconds_total", cause=cause) for cause in causes}


def read_without_pages(mount: mounting.Mount) -> None:
    for n in range(scraping.FILES):
        reader = os.open(mount.path / f"f{n}", os.O_RDONLY | os.O_DIRECT)
        os.preadv(reader, [mmap.mmap(-1, 64 << 10)], 0)
        os.close(reader)


def test_waiting_is_counted_by_what_is_waited_for(work: mounting.Bench) -> None:
    mount, port = with_port(work, "--data-path", "relay")
    read_without_pages(mount)
    first = scraping.scrape(port)
    scraping.waits_are_right(first)
    assert waits(first)["source"] > 0
    assert waits(first)["names"] > 0
    mount.wait_idle()
    before = scraping.scrape(port)
    read_without_pages(mount)
    again = scraping.scrape(port)
    scraping.waits_are_right(again)
    more = {cause: now - waits(before)[cause] for cause, now in waits(again).items()}
    assert more["tier"] > 0
    assert more["names"] > 0
    assert more["source"] == more["memory"] == more["peer"] == more["copy"] == 0
    assert mounting.run("restart", str(mount.path)).returncode == 0
    mounting.wait_for(lambda: mount.status()["worker"]["restarts"], "another worker")
    after = waits(scraping.scrape(port))
    assert all(after[cause] >= waits(again)[cause] for cause in after)


def test_a_scrape_while_the_source_hangs(work: mounting.Bench) -> None:
    mount, port, source = faulty_with_port(work, "-o", "source_deadline_seconds=0.5")
    scraping.read_all(mount, ["f0"])
    mount.wait_idle()
    source.faults(hang=["* *"])

    def hanging() -> scraping.Scrape | None:
        started = Stopwatch()
        now = scraping.scrape(port)
        started.check(5)
        return now if now.value("monarchfs_source_calls_stuck") else None

    def responds(value: int) -> bool:
        return scraping.scrape(port).value("monarchfs_source_responding") == value

    with reading("read", str(mount.path), ["f1"], "whole", 0, healed=source):
        now = mounting.wait_for(hanging, "the call to be seen as stuck")
        assert now.value("monarchfs_source_oldest_call_seconds", lane="demand") > 0.9
        assert now.value("monarchfs_source_calls_active", lane="demand") >= 1
        assert now.value("monarchfs_requests_waiting") >= 1
        mounting.wait_for(lambda: responds(0), "the source to hang")
    mounting.wait_for(lambda: responds(1), "the source again")


def test_a_port_that_is_taken_fails_the_mount(work: mounting.Bench) -> None:
    mount, port = with_port(work)
    (work.path / "other").mkdir()
    before = sorted(os.listdir(work.path))
    words = ["mount", str(mount.source), f"{work.path}/other", "--metrics-port", str(port)]
    done = mounting.run(*words, *work.storage(name="2"))
    mounting.assert_one_line(done, 1, f"cannot serve metrics on 127.0.0.1:{port}: ")
    assert sorted(os.listdir(work.path)) == before
    assert scraping.scrape(port).value("monarchfs_source_responding") == 1


def test_a_worker_that_is_stopped_or_dead_costs_a_scrape_its_timeout(work: mounting.Bench) -> None:
    mount, port = with_port(work)
    worker = mount.worker_pid()
    os.kill(worker, signal.SIGSTOP)
    try:
        with pytest.raises(OSError, match="timed out"):
            scraping.scrape(port, 0.3)
    finally:
        os.kill(worker, signal.SIGCONT)
    assert scraping.scrape(port).total("monarchfs_opens_total") == 0
    os.kill(worker, signal.SIGKILL)

    def answered() -> bool:
        started = Stopwatch()
        try:
            return scraping.scrape(port, 2).value("monarchfs_worker_restarts_total") == 1
        # The supervisor has the socket, and those that the dead one took are reset.
        except (OSError, HTTPException):
            started.check(4)
        return False

    mounting.wait_for(answered, "another worker to answer")


def test_a_worker_that_cannot_die_does_not_keep_the_port(work: mounting.Bench) -> None:
    mount, port, source = faulty_with_port(work)
    worker = mount.worker_pid()
    source.faults(hang=["open *"])
    with reading("read", str(mount.path), ["f1"], "whole", 0, healed=source):
        mounting.wait_for(
            lambda: scraping.scrape(port).value("monarchfs_requests_waiting") >= 1,
            "the open to hang",
        )
        assert mount.umount(timeout=3).returncode == 0
        assert Path(f"/proc/{worker}").exists(), "a thread of it hangs in the source"
        other = work.path / "other"
        scraping.make_files(other)
        work.mount(other, "--metrics-port", str(port), "--state-dir", f"{work.path}/state2")
        assert scraping.scrape(port).value("monarchfs_source_responding") == 1


def test_without_the_option_nobody_listens(work: mounting.Bench) -> None:
    scraping.make_files(work.path / "src")
    mount = work.mount(work.path / "src")
    assert mount.status()["metrics_port"] is None
    worker = mount.worker_pid()
    tcp = Path(f"/proc/{worker}/net/tcp").read_text()
    inodes = {line.split()[9] for line in tcp.splitlines()[1:]}
    links = [os.readlink(entry) for entry in Path(f"/proc/{worker}/fd").iterdir()]
    assert not [link for link in links if link.removeprefix("socket:[").rstrip("]") in inodes]
