"""``monarchfs doctor``: what findings mean, what is found on real machines, and bad input; and
``monarchfs selftest``."""

import fcntl
import json
import os
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import tarfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from monarchfs.cli import bugreport as cli_bugreport
from monarchfs.cli import doctor as cli_doctor
from monarchfs.cli import mount as cli_mount
from monarchfs.cli.main import main
from monarchfs.cli.parser import build_parser
from monarchfs.config import Config, User, personal
from monarchfs.config.places import DefaultPlaces, places_without_home
from monarchfs.control.registration import Registered, Registration
from monarchfs.doctor import bugreport, leftovers, peers, selftest, speed, storage, system
from monarchfs.doctor import selftest_dataset as dataset
from monarchfs.doctor.checks import Check, Severity
from monarchfs.doctor.run import examine
from monarchfs.fuse.mountinfo import Mount
from monarchfs.fuse.protocol import InitFlag
from monarchfs.insight.estimates import SourceRates, TierRates
from monarchfs.supervisor.directories import Holder
from monarchfs.supervisor.identity import in_first_user_namespace
from monarchfs.supervisor.recover import FoundMount
from monarchfs.system.memory import UNLIMITED, MemoryHeadroom
from monarchfs.types import Space, TierSize
from tests.support import mounting, surroundings
from tests.support.fake_mounts import NOBODY, device_mode
from tests.support.programs import Running
from tests.support.trees import write_files

MIB, GIB = 1 << 20, 1 << 30
OK, WARNING, PROBLEM = Severity.OK, Severity.WARNING, Severity.PROBLEM


def states(checks: list[Check]) -> dict[str, Severity]:
    return {check.name: check.state for check in checks}


ALL = int(InitFlag.PASSTHROUGH | InitFlag.HAS_RESEND)


@pytest.mark.parametrize(
    ("flags", "release", "is_root", "expected"),
    [
        (ALL, (6, 18), True, {"mount": OK, "passthrough": OK, "resend": OK}),
        (ALL, (6, 18), False, {"mount": OK, "passthrough": OK, "resend": OK}),
        (0, (5, 14), True, {"mount": OK, "passthrough": WARNING, "resend": OK}),
        (None, (6, 18), False, {"passthrough": OK, "resend": OK}),
        (None, (6, 8), False, {"passthrough": WARNING, "resend": OK}),
        (None, (6, 18), True, {"mount": PROBLEM, "passthrough": OK}),
    ],
)
def test_what_the_kernel_offers(
    flags: int | None, release: tuple[int, int], is_root: bool, expected: dict[str, Severity]
) -> None:
    found = system.judge_offers(flags, "EPERM", release, is_root=is_root, passes=is_root)
    assert expected.items() <= states(found).items()
    (available,) = [one.numbers["available"] for one in found if one.name == "passthrough"]
    assert available is (is_root and expected["passthrough"] is OK)


def test_root_of_a_user_namespace_does_without_passthrough(tmp_path: Path) -> None:
    for text, first in (("         0          0 4294967295\n", True), ("0 1000 1\n", False)):
        (tmp_path / "uid_map").write_text(text)
        assert in_first_user_namespace(f"{tmp_path}/uid_map") is first
    found = system.judge_offers(ALL, "", (6, 18), is_root=True, passes=False)
    (check,) = [check for check in found if check.name == "passthrough"]
    assert check.numbers["available"] is False
    assert "outside of any user namespace" in check.detail


def fusermount(
    bits: int, uid: int = 0, *, honoured: bool = True, capable: bool = False, is_root: bool = False
) -> Check:
    st = os.stat_result((stat.S_IFREG | bits, 1, 1, 1, uid, 0, 0, 0, 0, 0))
    how = {"honoured": honoured, "capable": capable, "is_root": is_root}
    return system.judge_fusermount("/bin/f", "3", st, **how)


def tier_at(
    free: int = 50 * GIB,
    inodes: int = 500,
    fstype: str = "ext4",
    headroom: MemoryHeadroom | None = None,
) -> storage.TierLocation:
    space = Space(100 * GIB, free, 1000, inodes)
    return storage.TierLocation("/t", "/t", fstype, "rw", 5, space, headroom)


def rates(read: float | None, opening: float | None = 0.001) -> SourceRates:
    return SourceRates(read, opening, 4, 1, 1)


HEADROOM = MemoryHeadroom(8 * GIB, 16 * GIB, "machine")
NO_HEADROOM = MemoryHeadroom(MIB, GIB, "cgroup /job")
UNKNOWN = MemoryHeadroom(UNLIMITED, UNLIMITED, "nothing known")
WORKER = json.dumps({"python": "3.11", "pyfuse3": "3", "libfuse": "3"})
HIDES = "proc /proc proc rw,hidepid=2"
BROKEN = "Traceback\nModuleNotFoundError: no trio\n"
NGINX = "nginx version: nginx/1.22.1\nconfigure arguments: --with-http_secure_link_module\n"
SLOW = rates(100e6)
TMPFS = tier_at(fstype="tmpfs", headroom=MemoryHeadroom(2 * GIB, 64 * GIB, "machine"))
OF_A_JOB = tier_at(fstype="tmpfs", headroom=MemoryHeadroom(8 * GIB, 16 * GIB, "cgroup /job"))


def room(place: storage.TierLocation, size: TierSize) -> Check:
    return storage.judge_room(place, storage.room_of(place, size, 10), True)


def charged(place: storage.TierLocation, size: int) -> Check:
    """Of a tier in memory."""
    found = storage.room_of(place, TierSize(bytes=size), 10)
    assert place.headroom is not None
    assert found.usable_bytes <= place.headroom.available_bytes
    (check,) = storage.judge_memory(place, found)
    return check


def purge(fstype: str, options: str, touches: bool) -> Check:
    (check,) = storage.judge_purge(fstype, options, touches=touches)
    return check


JUDGED: list[tuple[Check, Severity, dict[str, object] | str]] = [
    (system.judge_kernel("4.20.0"), OK, {}),
    (system.judge_kernel("4.18.0-553.el8"), WARNING, {}),
    (system.judge_kernel("strange"), WARNING, {}),
    (fusermount(0o4755), OK, {}),
    (fusermount(0o755, capable=True), OK, {}),
    (fusermount(0o755), PROBLEM, {}),
    (fusermount(0o4755, honoured=False), PROBLEM, {}),
    (fusermount(0o755, honoured=False, is_root=True), OK, {}),
    (system.judge_allow_other("user_allow_other\n", "", is_root=False), OK, {"allowed": True}),
    (system.judge_allow_other("#user_allow_other\n", "", is_root=False), OK, {"allowed": False}),
    (system.judge_allow_other("", "", is_root=True), OK, {"allowed": True}),
    (system.judge_allow_other("", HIDES, is_root=True), WARNING, "hidepid=2"),
    (system.judge_worker(0, WORKER, "", "me"), OK, {}),
    (system.judge_worker(1, "", BROKEN, "me"), PROBLEM, "ModuleNotFoundError: no trio"),
    (system.judge_worker(-9, "", "", "me"), PROBLEM, {}),
    (system.judge_descriptors(-1), OK, {}),
    (system.judge_descriptors(1024), WARNING, {}),
    (system.judge_memory(HEADROOM, "always [advise] never"), OK, {"huge_pages": "advise"}),
    (system.judge_memory(NO_HEADROOM, ""), WARNING, {"limited_by": "cgroup /job"}),
    (system.judge_memory(UNKNOWN, ""), OK, {"available_bytes": None}),
    (peers.judge_nginx("/nginx", NGINX), OK, {"version": "1.22.1"}),
    (peers.judge_nginx("/nginx", NGINX.split("\n")[0]), PROBLEM, {}),
    (speed.judge_source_speed(SLOW), OK, {}),
    (speed.judge_source_speed(rates(9e9)), WARNING, {}),
    (speed.judge_source_speed(rates(None, None)), WARNING, {}),
    (speed.judge_tier_speed("/t", TierRates(1e9, 2e9, 1), SLOW), OK, {"times_source": 20}),
    (speed.judge_tier_speed("/t", TierRates(1e9, 120e6, 1), SLOW), WARNING, {}),
    (speed.judge_tier_speed("/t", TierRates(1e9, 1e6, 1), None), OK, {}),
    (room(tier_at(), TierSize(bytes=GIB)), OK, {"usable_bytes": GIB}),
    (room(tier_at(), TierSize(percent=80)), WARNING, {"usable_bytes": 40 * GIB}),
    (room(tier_at(free=GIB), TierSize(bytes=GIB)), WARNING, {"usable_bytes": 0}),
    (room(tier_at(inodes=50), TierSize(bytes=GIB)), WARNING, "inodes"),
    (charged(TMPFS, GIB), OK, {"charged_to": "machine"}),
    (charged(TMPFS, 16 * GIB), WARNING, {"charged_to": "machine"}),
    (charged(OF_A_JOB, GIB), WARNING, {"charged_to": "cgroup /job"}),
    (purge("lustre", "rw,flock", False), WARNING, {}),
    (purge("lustre", "rw,flock", True), OK, {}),
    (purge("beegfs", "rw,noatime", True), WARNING, {}),
]


@pytest.mark.parametrize(("check", "expected", "said"), JUDGED)
def test_what_stands_alone(check: Check, expected: Severity, said: dict[str, object] | str) -> None:
    assert check.state is expected
    assert Check.from_json(json.loads(json.dumps(check.to_json()))) == check
    assert check.remedy or expected is not PROBLEM
    if isinstance(said, str):
        assert said in check.detail
    else:
        assert said.items() <= check.numbers.items()


def test_who_shares_a_file_system() -> None:
    mounts = [
        Mount(number, 1, 8, number, "/", point, "rw", "ext4", "/dev/x", "rw")
        for number, point in ((1, "/"), (2, "/scratch"), (3, "/scratch"))
    ]
    named = storage.scratch_directories({"TMPDIR": "/scratch/me", "SCRATCH": "relative"})
    assert named[0] == "/scratch/me"
    assert "relative" not in named
    assert storage.sharing(os.makedev(8, 3), ["/scratch", "/tmp"], mounts) == ["/scratch"]
    assert storage.sharing(os.makedev(8, 1), ["/scratch", "/tmp", "/nosuch"], mounts) == ["/tmp"]
    assert storage.sharing(os.makedev(8, 2), ["/scratch", "/tmp"], mounts) == []
    (check,) = storage.judge_sharing(tier_at(), ["/tmp"], 10)
    assert check.state is WARNING
    assert storage.judge_sharing(tier_at(), [], 10) == []


def test_caches_of_sources_that_are_gone() -> None:
    identity = "0123456789abcdef"
    gone = Holder(1, "/m", "/gone", identity, ("/scratch/a b",))
    there = Holder(1, "/m", "/there", identity, ("/t",))
    first, orphan = leftovers.judge_caches([("/c/1", gone, True), ("/c/2", there, False)])
    assert (first.numbers["kept"], first.numbers["orphans"]) == (2, 1)
    assert orphan.remedy == "if it will not come back: monarchfs cache remove /c/1"
    # A user cannot have root told to remove the system.
    evil = Holder(1, "/m", "/gone", "etc", ("/", "/usr"))
    orphan = leftovers.judge_caches([("/c/1", evil, True)])[1]
    assert orphan.remedy.endswith("monarchfs cache remove /c/1")


def test_what_leads_to_the_source_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "resolve_mountpoint", lambda path: time.sleep(5))
    (check,) = storage.source("/s", User("root", 0, 0), 0.1, touches=False)
    assert "did not answer within 0.1 s" in check.detail


def test_measuring_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY, raising=True)
    fd = speed.nameless_file(str(tmp_path))
    try:
        assert os.write(fd, b"x") == 1
        assert list(tmp_path.iterdir()) == [], "nothing to be left, whatever happens now"
    finally:
        os.close(fd)


def test_measuring_a_source(tmp_path: Path) -> None:
    nothing = speed.measure_source(str(tmp_path), 2)
    assert (nothing.read_bytes_per_second, nothing.open_seconds) == (None, None)
    for number in range(20):
        (tmp_path / f"{number}").write_bytes(b"x" * 100_000)
    (tmp_path / "large").write_bytes(b"x" * 3 * MIB)
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    found = speed.measure_source(str(tmp_path), 2)
    assert (found.sampled_bytes, found.sampled_files) == (20 * 100_000 + 3 * MIB, 22)
    assert found.open_seconds


KEYS = {"can_mount", "warnings", "problems", "checks"}
NAMES = {
    *("kernel", "device", "fusermount3", "allow_other", "passthrough", "resend", "worker"),
    *("descriptors", "limits", "memory", "state_dir", "runtime_dir", "mounts"),
}


def doctor(*arguments: str, user: str | None = None, timeout: float = 60) -> dict[str, Any]:
    done = mounting.run("doctor", *arguments, "--json", user=user, timeout=timeout)
    assert done.stderr == "", done.stderr
    assert done.stdout.count("\n") == 1
    result: dict[str, Any] = json.loads(done.stdout)
    assert set(result) - {"can_run"} == KEYS
    assert done.returncode == int(not result.get("can_run", result["can_mount"]))
    for check in result["checks"]:
        assert check["state"] in ("ok", "warning", "problem")
        assert "\n" not in check["detail"] + check["remedy"]
        assert check["remedy"] or check["state"] != "problem"
    return result


def by_name(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(check for check in result["checks"] if check["name"] == name)


@pytest.fixture
def src(work: mounting.Bench) -> Path:
    (work.path / "file").write_bytes(b"no TOML, no directory")
    return write_files(work.path / "src", {"f": b"x" * 5000})


@mounting.needs_mounts
def test_a_machine_that_can_mount(work: mounting.Bench, src: Path) -> None:
    before = sorted(work.path.rglob("*"))
    result = doctor(str(src), "--tier", f"{work.path}/tier=100M", "--state-dir", f"{work.path}/s")
    assert result["can_mount"] is True
    assert {check["name"] for check in result["checks"]} >= NAMES | {
        *("mount", "source", "tier", "source_speed", "tier_speed")
    }
    assert by_name(result, "mount")["state"] == "ok"
    assert by_name(result, "source")["path"] == str(src)
    assert by_name(result, "tier")["usable_bytes"] == 100 * MIB
    for rate in ("write_bytes_per_second", "read_bytes_per_second"):
        assert by_name(result, "tier_speed")[rate] > 0
    assert by_name(result, "source_speed")["sampled_bytes"] == 5000
    assert sorted(work.path.rglob("*")) == before
    mounts = Path("/proc/self/mountinfo").read_text()
    assert system.TRIAL_NAME not in mounts, "the trial mount is in a namespace of its own"
    result = doctor(str(src), "--timeout", "0.06")
    assert any("time is up" in check["detail"] for check in result["checks"])


@mounting.needs_mounts
def test_without_libcurl_nothing_shares(
    work: mounting.Bench, src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work.path / "empty").touch()
    (work.path / "mnt").mkdir()
    (work.path / "key").write_bytes(bytes(64))
    (work.path / "key").chmod(0o400)
    import_module("monarchfs.peers._replicas")
    (library,) = set(re.findall(r"/\S+/libcurl\.so\.4\S*", Path("/proc/self/maps").read_text()))
    hidden = f'mount --bind {work.path}/empty {library} && exec "$@"'
    unshare = ["unshare", "--mount", "--propagation", "private", "sh", "-c", hidden, "sh"]
    monkeypatch.setattr("tests.support.mounting.MONARCHFS", [*unshare, *mounting.MONARCHFS])
    tier = ("--tier", f"{work.path}/tier=100M")
    sharing = ("--peers", "a=127.0.0.1,b=127.0.0.1:9467", "--peer-name=a")
    assert mounting.run("plan", str(src), "--json", "--quick", *tier).returncode == 0
    assert by_name(doctor("--quick", *tier), "mount")["state"] == "ok"
    result = doctor("--quick", *tier, *sharing)
    (problem,) = [check for check in result["checks"] if check["state"] == "problem"]
    assert problem["name"] == "libcurl"
    assert "libcurl.so.4: file too short" in problem["detail"]
    words = (str(src), f"{work.path}/mnt", "--state-dir", f"{work.path}/state", *tier, *sharing)
    done = mounting.run("mount", *words, "--peer-key", f"{work.path}/key")
    mounting.assert_one_line(done, 1, "peers need libcurl, which cannot be loaded: ")
    assert "file too short: apt-get install libcurl4" in done.stderr


@mounting.needs_mounts
def test_as_an_ordinary_user(work: mounting.Bench, src: Path) -> None:
    surroundings.skip_unless(NOBODY)
    (work.path / "t").mkdir()
    shutil.chown(work.path / "t", NOBODY)
    arguments = (str(src), "--tier", f"{work.path}/t=10M", "--state-dir", f"{work.path}/t/s")
    with device_mode(0o666):
        result = doctor(*arguments, "--here", user=NOBODY)
    assert result["can_mount"] is result["can_run"] is True, result
    assert cli_doctor._conclusion(result).endswith("write monarchfs run SOURCE -- COMMAND")
    assert by_name(result, "run")["files"] > 0
    assert os.listdir(work.path / "t") == []
    assert by_name(result, "fusermount3")["setuid"] is True
    assert by_name(result, "passthrough")["available"] is False
    assert by_name(result, "tier_speed")["write_bytes_per_second"] > 0
    with device_mode(0o600):
        result = doctor(*arguments, "--quick", "--here", user=NOBODY)
    assert result["can_mount"] is result["can_run"] is False
    assert "ask the administrator" in by_name(result, "device")["remedy"]


@mounting.needs_mounts
def test_mounts_of_ours(work: mounting.Bench, src: Path) -> None:
    mount = work.mount(src)
    tier = ("--tier", f"{work.path}/other=10M")
    result = doctor(f"{mount.path}/f", "--quick", *tier)
    assert by_name(result, "source")["state"] == "problem"
    assert "is itself a monarchfs mount" in by_name(result, "source")["detail"]
    assert by_name(result, "mounts")["alive"] >= 1


def examined(work: mounting.Bench) -> list[Check]:
    me = User("me", os.geteuid(), os.getegid(), tuple(os.getgroups()))
    config = Config("", "", (), f"{work.path}/state", f"{work.path}/run/x", "0" * 16, me)
    places = DefaultPlaces(f"{work.path}/cache", f"{work.path}/run/x")
    steps = examine(config, places, {}, lambda owners: [f"{work.path}/run"], 60)
    return [step for step in steps if isinstance(step, Check)]


def test_sockets_and_caches_from_the_past(work: mounting.Bench) -> None:
    for name in ("run", "cache/state/one", "cache/state/two"):
        (work.path / name).mkdir(parents=True, mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead, socket.socket(socket.AF_UNIX) as alive:
        dead.bind(f"{work.path}/run/dead.sock")
        alive.bind(f"{work.path}/run/alive.sock")
        alive.listen(1)
        dead.close()
        gone = {"pid": 1, "mountpoint": "/m", "source": "/gone", "dataset_id": "ab" * 8}
        lock = work.path / "cache/state/one/lock"
        lock.write_text(json.dumps({**gone, "tiers": ["/t"]}))
        found = examined(work)
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert "orphan" not in states(examined(work)), "it is in use"
    for name, path in (("stale_socket", "run/dead.sock"), ("orphan", "cache/state/one")):
        (check,) = [check for check in found if check.name == name]
        assert (check.numbers["path"], check.state) == (f"{work.path}/{path}", WARNING)


def test_a_check_that_fails_stops_no_other(
    work: mounting.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang() -> list[Check]:
        os.read(os.pipe()[0], 1)
        raise AssertionError

    break_down = Mock(side_effect=ZeroDivisionError)
    probes = (("device", 0.2, hang), ("worker", 5.0, break_down), ("memory", 0.2, hang))
    monkeypatch.setattr(system, "probes", lambda user: probes)
    found = {check.name: check for check in examined(work)}
    assert found["device"].state is PROBLEM
    assert "no answer within" in found["device"].detail
    assert found["worker"].state is PROBLEM
    assert "ZeroDivisionError" in found["worker"].detail
    assert found["memory"].state is WARNING, "that keeps nobody from mounting"
    assert "mounts" in found


def test_a_home_that_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, name, limit in (
        (personal, "_file_of", (cli_doctor, "HOME_SECONDS")),
        (cli_bugreport, "default_places", (cli_bugreport, "_FILE_SECONDS")),
        (cli_mount, "default_places", (cli_mount, "HOME_SECONDS")),
    ):
        monkeypatch.setattr(module, name, lambda *_: time.sleep(60))
        monkeypatch.setattr(*limit, 0.1)
    words, named = build_parser().parse_args(["run", "/s"]), {"MONARCHFS_REQUIRE_FILES": "yes"}
    assert cli_mount.settings_from(words, environ=named).require_files, "the environment counts"
    assert cli_mount.places_for(None, named) == places_without_home(os.geteuid())
    assert capsys.readouterr().err.count("settings in your home do not count\n") == 1
    check, _, places = cli_doctor._asked_at_home(build_parser().parse_args(["doctor"]), "", {})
    assert (check.name, check.state) == ("home", PROBLEM)
    assert cli_bugreport._subject(FoundMount("/m", "/s", None, None), {}).places == places


PROBLEMS = [
    (
        ["{}/nosuch", "--tier", "{}/no/such=1G", "--state-dir", "{}/file"],
        {"source": "does not exist", "tier": "does not exist", "state_dir": "not a directory"},
    ),
    (
        ["{}/file", "--tier", "{}/file=1G", "--state-dir", "{}/no/such"],
        {"source": "not a directory", "tier": "not a directory", "state_dir": "does not exist"},
    ),
    (
        ["{}/a\nb\x1b[0m\udcff", "--tier", "/proc=1G"],
        {"source": "does not exist", "tier": "(proc) has no size"},
    ),
]


@mounting.needs_mounts
@pytest.mark.parametrize(("arguments", "expected"), PROBLEMS)
def test_what_cannot_be_mounted_is_one_problem_each(
    work: mounting.Bench, src: Path, arguments: list[str], expected: dict[str, str]
) -> None:
    before = sorted(work.path.rglob("*"))
    done = mounting.run("doctor", "--quick", *(a.replace("{}", str(work.path)) for a in arguments))
    assert (done.returncode, done.stderr) == (1, "")
    problems = [line.split(maxsplit=2) for line in done.stdout.splitlines() if "problem " in line]
    assert {name for _, name, _ in problems} == expected.keys()
    assert len(problems) == len(expected), done.stdout
    assert all(expected[name] in detail for _, name, detail in problems)
    assert all(line.isprintable() for line in done.stdout.splitlines())
    assert sorted(work.path.rglob("*")) == before


@mounting.needs_mounts
def test_a_bug_report_has_what_answers_and_no_names(
    work: mounting.Bench, faulty: mounting.FaultySource
) -> None:
    mount, file = work.mount(faulty.path, "--profile", "shards"), work.path / "report.tar.gz"
    with open(work.path / "state/worker.log", "a") as log:
        log.write(f"b'd/hidden-name' '{faulty.path}/d/hidden-name': {os.strerror(5)}\n")

    def reported(*words: str) -> tuple[dict[str, str], dict[str, str]]:
        told = mounting.asked("bugreport", str(mount.path), "-o", str(file), *words)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        with tarfile.open(file) as archive:
            files = {Path(name).name: archive.extractfile(name) for name in archive.getnames()}
            texts = {name: text.read().decode() for name, text in files.items() if text}
        file.unlink()
        return texts, {part["name"]: part["trouble"] for part in told["parts"]}

    texts, _ = reported()
    assert "hidden-name" not in "".join(texts.values())
    (names,) = re.findall(r"^b'(#.*/#.*)' '/.*/source0/(.*)': Input", texts["logs.txt"], re.M)
    assert names[0] == names[1]
    for name in ("config.json", "status.json"):
        assert json.loads(texts[name])["profile"] == "shards"
    own, _, all_stacks = texts["python-stacks.txt"].partition("Current thread 0x")
    assert own.startswith("Stack (most recent call first)"), "of other threads only with the GIL"
    assert all("worker/__main__.py" in stacks for stacks in (own, all_stacks))
    with Running(
        [*mounting.MONARCHFS, "bugreport", str(mount.path), "-o", str(file)]
    ) as interrupted:
        mounting.wait_for(file.exists, "the report to begin")
        interrupted.send_signal(signal.SIGINT)
        assert interrupted.wait(30) == -signal.SIGINT
    assert not file.exists()
    # Its daemon is dead, and the source hangs.
    mounting.kill_each(work._processes())
    mounting.wait_for(lambda: not work._processes(), "the daemon to be dead")
    os.kill(faulty.process.pid, signal.SIGSTOP)
    try:
        texts, troubles = reported("--with-names")
    finally:
        os.kill(faulty.process.pid, signal.SIGCONT)
    assert "hidden-name" in texts["logs.txt"]
    assert f"{work.path}/tier: {{'bytes'" in texts["storage.txt"]
    assert "no answer within" in troubles["storage.txt"]
    assert "no daemon" in troubles["metrics.json"]
    checks = json.loads(texts["doctor.json"])["checks"]
    assert [one["state"] for one in checks if one["name"] == "source"] == ["problem"]
    stale = [one for one in checks if one["name"] == "stale_mount"]
    (mine,) = [check for check in stale if check["mountpoint"] == str(mount.path)]
    # Where another test's epilog cleared up what dead daemons registered, it is only not seen.
    remedy = mine["remedy"].removeprefix("if it does not answer: ")
    assert remedy.startswith(f"monarchfs umount {mount.path}")


@mounting.requires_root
def test_root_reports_a_users_mount_with_the_users_rights(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("secret")
    (part,) = [one for one in bugreport.PARTS if one.name == "logs.txt"]
    for uid, said in ((0, b"secret"), (pwd.getpwnam(NOBODY).pw_uid, b"Permission denied")):
        entry = Registration("/m", 0, "/s", uid, 1, 0, "/none", 0)
        found = FoundMount("/m", "/s", None, Registered("/r", 0, entry))
        log, user, places = str(tmp_path / "log"), User("root", 0, 0), DefaultPlaces("/c", "/r")
        config = Config("/s", "/m", (), "/none", "/r", "0" * 16, user, log_file=log)
        subject = bugreport.Subject(found, config, True, dict, places, lambda _: (), {})
        assert said in bugreport.collected(part, subject, None).content.split(b"log <==\n")[-1]


# monarchfs selftest: it finds what is wrong, and leaves nothing behind


STATS = """\
snapshot_time             1764153900.123456789 secs.nsecs
read_bytes                2000 samples [bytes] 100 16384 32768000
open                      2016 samples [usec] 21 3122 99999 1234567
getxattr                  7 samples [reqs]
broken
"""


@pytest.fixture
def directory(work: mounting.Bench, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the file system; ``second`` beside it may become the same one. All is made in ``work``,
    with fewer names."""
    for name in ("site", "second"):
        (work.path / name).mkdir()
    monkeypatch.setattr(dataset, "MANY_NAMES", 40)
    monkeypatch.setattr("monarchfs.doctor.selftest.KILLS", 1)
    monkeypatch.setattr("monarchfs.doctor.selftest.MODES", ("immutable", "open"))
    monkeypatch.setattr("tempfile.tempdir", str(work.path))
    return work.path / "site"


@mounting.needs_mounts
def test_all_is_well(
    work: mounting.Bench, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = work.path / "second"
    subprocess.run(["mount", "--bind", str(directory), str(second)], check=True)
    before = sorted(work.path.rglob("*"))
    try:
        words = ["selftest", str(directory), "--second", str(second), "--files", "40", "--json"]
        code = main(words)
        found = json.loads(capsys.readouterr().out)
    finally:
        subprocess.run(["umount", str(second)], check=True)
    assert [(one["name"], one["state"]) for one in found["checks"]] == [
        ("dataset", "ok"),
        *[("mirror", "ok")] * 2,
        *[(name, "ok") for name in ("epochs", "freshness", "kill")],
    ], found
    assert (code, found["problems"], found["about"]["machine"]) == (0, 0, os.uname().machine)
    epochs = found["checks"][3]
    read = (epochs["first_read_bytes"], epochs["second_operations"])
    assert read == (40 * dataset.SMALL_BYTES, 0)
    assert sorted(work.path.rglob("*")) == before


@mounting.needs_mounts
def test_problems_are_told_and_the_rest_is_tried(
    work: mounting.Bench,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is immutable shows no new name, and of other changes none where a copy is complete; and
    another directory is no second way to the first."""
    monkeypatch.setattr("monarchfs.doctor.selftest._SEEN_SECONDS", 0.1)
    monkeypatch.setattr("monarchfs.doctor.selftest.MODES", ("open", "immutable"))
    command = ["selftest", str(directory), "--files", "4"]
    for modes, words, said in (
        (("open", "immutable"), [], r"immutable: late or never: .*\bnew\n"),
        ((), ["--second", str(work.path / "second")], "--second must be the same directory"),
    ):
        monkeypatch.setattr("monarchfs.doctor.selftest.MODES", modes)
        assert main([*command, *words]) == 1
        shown = capsys.readouterr().out
        assert re.findall(r"^problem +(\w+)", shown, re.M) == ["freshness"]
        assert re.search(said, shown)
        assert "ok       kill " in shown
        assert shown.endswith("\n1 problem\n")
        assert os.listdir(directory) == []


@mounting.needs_mounts
def test_what_is_refused(work: mounting.Bench, directory: Path) -> None:
    mounting.assert_one_line(
        mounting.run("selftest", f"{directory}/no"), 2, f"{directory}/no is no directory"
    )
    mounting.assert_one_line(mounting.run("selftest", "/proc"), 2, "cannot write to /proc: ")
    done = mounting.run("selftest", str(directory), "--tier", "/proc")
    mounting.assert_one_line(done, 2, "cannot write to /proc: ")
    assert os.listdir(directory) == []


CHANGES = {
    "bytes differ at 0": "echo >>d/f; truncate -s -2 d/f; echo >>d/f; touch -r ../source/d/f d/f",
    "st_size": "echo >>d/f",
    "st_mode": "chmod 600 d/f",
    "attributes are": "setfattr -n user.x -v y d/f",
    "only in the source": "rm d/f",
    "only in the mount": "touch d/new",
    "target differs": "ln -sfn elsewhere l",
}


@pytest.mark.parametrize("said", CHANGES)
def test_each_difference_is_found(tmp_path: Path, said: str) -> None:
    source, mirror = tmp_path / "source", tmp_path / "mirror"
    (source / "d").mkdir(parents=True)
    (source / "d" / "f").write_bytes(bytes(100_000))
    (source / "l").symlink_to("somewhere")
    subprocess.run(["cp", "-a", str(source), str(mirror)], check=True)
    same = dataset.differences(source, mirror)  # each copy has a ctime of its own
    subprocess.run(["sh", "-ec", CHANGES[said]], cwd=mirror, check=True, capture_output=True)
    assert not any(said in line for line in same)
    assert any(said in line for line in dataset.differences(source, mirror))


def test_counters_of_the_client() -> None:
    assert selftest.parse_counts(STATS) == {"read_bytes": 32_768_000, "open": 2016, "getxattr": 7}
