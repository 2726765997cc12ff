"""The units: systemd's own word on them, what they allow is what is needed, and sd_notify(3); and
under a systemd that is a first process: started, watched, killed, stopped."""

import json
import os
import pwd
import re
import shlex
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from monarchfs.config.settings import is_known_option, split_options
from monarchfs.supervisor.notify_systemd import ServiceManager
from tests.support import mounting, surroundings, trees
from tests.support.fake_mounts import interpreter_for
from tests.support.mounting import REPOSITORY
from tests.support.processes import status_of
from tests.support.programs import execute
from tests.support.systemd import Booted, booted

UNITS = REPOSITORY / "systemd"
DOCUMENT = (REPOSITORY / "docs" / "SYSTEMD.md").read_text()
COMMAND = "/usr/local/bin/monarchfs"
SERVICES = ("monarchfs@mnt-x.service", "monarchfs-exporter.service", "monarchfs-gc.service")
needs_systemd = surroundings.program("systemd-analyze", "systemd")


def directives(unit: str) -> dict[str, list[str]]:
    """All settings of a unit's file; those that come again are lists longer than one."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / unit).read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units in a directory, with a command that is there."""
    for source in UNITS.iterdir():
        (tmp_path / source.name).write_text(source.read_text().replace(COMMAND, "/bin/true"))
    return tmp_path


def analyze(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return execute(["systemd-analyze", *arguments], cwd=cwd)


@needs_systemd
def test_systemd_has_no_complaints(units: Path) -> None:
    names = [*SERVICES, "monarchfs-gc.timer", "mnt-imagenet.mount"]
    done = analyze("verify", "--man=no", *(f"./{name}" for name in names), cwd=units)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # It does complain of what is wrong.
    text = (units / "monarchfs-gc.service").read_text()
    (units / "wrong.service").write_text(text.replace("LockPersonality", "LockPersonalty"))
    assert "LockPersonalty" in analyze("verify", "--man=no", "./wrong.service", cwd=units).stderr


@needs_systemd
@pytest.mark.parametrize(("unit", "most"), list(zip(SERVICES, (46, 26, 48), strict=True)))
def test_the_exposure_is_what_the_document_says(units: Path, unit: str, most: int) -> None:
    security = ("security", "--offline=true", "--no-pager")
    done = analyze(*security, f"--threshold={most}", f"./{unit}", cwd=units)
    assert done.returncode == 0, done.stdout
    assert f"{most / 10:g}" in DOCUMENT
    if not unit.startswith("monarchfs@"):
        return
    done = analyze(*security, "--json=short", f"./{unit}", cwd=units)
    exposed = [item["name"] for item in json.loads(done.stdout) if item["exposure"]]
    open_points = {name.partition("=")[0] for name in exposed}
    assert len(open_points) > 10
    assert [name for name in open_points if name not in DOCUMENT] == []
    capabilities = [name.partition("~")[2] for name in exposed if "CapabilityBounding" in name]
    assert [name for name in capabilities if name.replace("|", "\\|") not in DOCUMENT] == []


@pytest.mark.parametrize(
    ("exit_code", "removed"), [("exited", False), ("killed", True), ("dumped", True)]
)
def test_only_the_mount_of_a_daemon_that_was_killed_is_removed(
    tmp_path: Path, exit_code: str, removed: bool
) -> None:
    """One that exits, because something is mounted there already, has left nothing to remove."""
    command, said = tmp_path / "monarchfs", tmp_path / "said"
    command.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{said}\n')
    command.chmod(0o755)
    (line,) = directives("monarchfs@.service")["ExecStopPost"]
    words = shlex.split(line.removeprefix("-").replace(COMMAND, str(command)))
    environment = {"EXIT_CODE": exit_code, "MOUNTPOINT": "/mnt/a  b"}
    subprocess.run([word.replace("$$", "$") for word in words], env=environment, check=True)
    assert said.exists() is removed
    if removed:
        assert said.read_text().splitlines() == ["umount", "--timeout", "10", "--", "/mnt/a  b"]


def test_examples_have_known_options() -> None:
    mount = directives("mnt-imagenet.mount")
    example = directives("imagenet.conf")
    for options in (mount["Options"][0].replace("%%", "%"), example["OPTIONS"][0]):
        assert [option for option in split_options(options) if not is_known_option(option)] == []
    assert example["OPTIONS"][0] in DOCUMENT


@mounting.needs_mounts
def test_the_units_command_has_no_empty_word_without_options(tmp_path: Path) -> None:
    values = {"SOURCE": "/nowhere", "MOUNTPOINT": str(tmp_path), "OPTIONS": ""}
    command, *words = shlex.split(directives("monarchfs@.service")["ExecStart"][0])
    assert command == COMMAND
    # ``${NAME}`` is one word, whatever is in it.
    done = execute(
        [*mounting.MONARCHFS, *(values[w[2:-1]] if w.startswith("${") else w for w in words)]
    )
    assert done.returncode == 2
    assert done.stderr == "monarchfs: source /nowhere does not exist: name an existing directory\n"


class Manager:
    """What systemd is to a service: a datagram socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.environment = {"NOTIFY_SOCKET": address}

    def next(self, seconds: float = mounting.WAIT_SECONDS) -> str | None:
        """The next message; None if none comes in time."""
        self.socket.settimeout(seconds)
        try:
            return self.socket.recv(4096).decode()
        except TimeoutError:
            return None

    def drain(self) -> list[str]:
        messages = []
        while (message := self.next(0.001)) is not None:
            messages.append(message)
        return messages


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(str(tmp_path / "notify"))
    yield manager
    manager.socket.close()


@mounting.needs_mounts
def test_a_daemon_says_nothing_to_the_manager_of_who_started_it(
    work: mounting.Bench, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prolog has slurmd's $NOTIFY_SOCKET."""
    monkeypatch.setenv("NOTIFY_SOCKET", manager.environment["NOTIFY_SOCKET"])
    monkeypatch.setenv("WATCHDOG_USEC", "100000")
    (work.path / "src").mkdir()
    mount = work.mount(work.path / "src")
    assert mount.umount().returncode == 0
    assert manager.drain() == []


def test_a_watchdog_of_another_process_is_not_ours(manager: Manager) -> None:
    for given, beats in (
        ({"WATCHDOG_USEC": "2000000"}, 2),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 2),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid() + 1)}, 0),
        ({"WATCHDOG_USEC": "soon"}, 0),
    ):
        told = ServiceManager({**manager.environment, **given})
        for now in (10.0, 10.5, 10.9, 11.0, 11.9):
            told.beat(now)
        assert manager.drain() == ["WATCHDOG=1"] * beats


@pytest.mark.parametrize(
    "address", ["", "relative", "vsock:2:1", "/nowhere/at/all", "@nobody-listens"]
)
def test_a_manager_that_is_not_there_costs_nothing(address: str) -> None:
    told = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"})
    told.ready("x")
    told.beat(1.0)
    told.stopping()


def test_a_status_is_one_line(manager: Manager) -> None:
    abstract = Manager(f"@test-{os.getpid()}")
    for told in (manager, abstract):
        service = ServiceManager(told.environment)
        service.ready("a\nMAINPID=1\udcff")
        assert told.next() == "READY=1\nSTATUS=a MAINPID=1\\udcff"
        service.extend(30)
        assert told.next() == "EXTEND_TIMEOUT_USEC=30000000"
        service.stopping()
        assert told.next() == "STOPPING=1"
    abstract.socket.close()


FILES = 6
UNIT = "monarchfs@mnt-data.service"
POINT = "/mnt/data"


@pytest.fixture(scope="module")
def system() -> Iterator[Booted]:
    """One for all tests here, with everything installed as an administrator does it."""
    with booted() as running:
        if running.run(*mounting.MONARCHFS, "--version", check=False).returncode != 0:
            pytest.skip(
                "needs a Python on the root file system: make setup PYTHON=/usr/bin/python3"
            )
        trees.dataset(running.work / "src", files=FILES)
        running.run("make", "-s", "-C", REPOSITORY, "install-system")
        running.run("systemctl", "daemon-reload")
        yield running


@pytest.fixture
def mounted(system: Booted) -> Iterator[Booted]:
    """A mount as a service, for nobody, with everything copied ahead."""
    interpreter_for("nobody")
    configure(system, "data", "user=nobody,allow_other,prefetch=all,scrub=20M")
    with started(system, UNIT, POINT):
        yield system
    system.run("systemctl", "reset-failed", UNIT, check=False)


@contextmanager
def started(system: Booted, unit: str, point: str) -> Iterator[None]:
    """Nothing is mounted there any more when it is stopped."""
    system.run("systemctl", "start", unit)
    yield
    system.run("systemctl", "stop", unit)
    assert not is_mounted(system, point)


def configure(system: Booted, name: str, options: str, source: str = "") -> None:
    """Says what is mounted on /mnt/NAME; ``source`` is quoted already."""
    options += f",tier={system.work}/tier-{name}=1G,state_dir={system.work}/state-{name}"
    system.write(
        f"/etc/monarchfs/mnt/{name}.conf",
        f'SOURCE={source or system.work / "src"}\nOPTIONS="reserve_percent=1,{options}"\n',
    )


def assert_shown(system: Booted, unit: str, **properties: str) -> None:
    assert system.show(unit, *properties) == properties


def is_mounted(system: Booted, point: str) -> bool:
    return system.run("mountpoint", "-q", point, check=False).returncode == 0


def same_bytes(system: Booted, point: str = POINT) -> None:
    """What is read through the mount is what the source has, for a process of no unit."""
    system.run("diff", "-r", system.work / "src", point)


def status(system: Booted, point: str = POINT) -> Any:
    return json.loads(system.monarchfs("status", point, "--json").stdout)


def main_pid(system: Booted, unit: str = UNIT) -> int:
    """The number here of a unit's main process."""
    return system.outside(system.show(unit, "MainPID")["MainPID"])


def test_a_unit_is_active_when_its_mount_answers(mounted: Booted) -> None:
    serving = {"StatusText": f"serving {mounted.work}/src on {POINT}", "SubState": "running"}
    assert_shown(mounted, UNIT, ActiveState="active", NRestarts="0", **serving)
    same_bytes(mounted)
    mounting.wait_for(lambda: status(mounted)["files"]["resident"] >= FILES, "all to be copied")
    same_bytes(mounted)
    mounted.monarchfs("evict", POINT)

    # It is restricted, and its worker more.
    def worker() -> int:
        return mounted.outside(str(status(mounted)["worker"]["pid"]))

    for pid in (main_pid(mounted), worker()):
        limits = status_of(pid)
        assert (limits["NoNewPrivs"], limits["Seccomp"]) == ("1", "2")
        assert int(limits["CapBnd"], 16).bit_count() <= 7
    assert set(limits["Uid"].split()) == {str(pwd.getpwnam("nobody").pw_uid)}
    assert {int(limits[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}

    # A worker that dies is the supervisor's matter.
    os.kill(worker(), signal.SIGKILL)
    same_bytes(mounted)
    mounting.wait_for(lambda: status(mounted)["worker"]["restarts"] == 1, "another worker")
    assert_shown(mounted, UNIT, NRestarts="0", ActiveState="active")
    # And one that hangs: whoever stops the unit has it killed.
    os.kill(worker(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("number", "result"), [(signal.SIGSTOP, "watchdog"), (signal.SIGKILL, "signal")]
)
def test_a_supervisor_that_hangs_or_dies_is_started_again(
    system: Booted, number: signal.Signals, result: str
) -> None:
    """The watchdog's time is shorter than the unit's, so that the test is."""
    unit, point = f"monarchfs@mnt-{result}.service", f"/mnt/{result}"
    system.drop_in(unit, "[Service]\nWatchdogSec=1\nRestartSec=0\n")
    configure(system, result, "allow_other")
    with started(system, unit, point):
        same_bytes(system, point)
        first = main_pid(system, unit)
        os.kill(first, number)
        again = {"NRestarts": "1", "ActiveState": "active"}
        mounting.wait_for(lambda: system.show(unit, *again) == again, f"{unit} to be started again")
        assert not Path(f"/proc/{first}").exists()
        assert main_pid(system, unit) != first
        same_bytes(system, point)
        table = system.run("cat", "/proc/self/mountinfo").stdout
        assert table.count(f" {point} ") == 1, "what the dead one left was unmounted"


def test_stopping_unmounts_though_somebody_sits_in_the_mount(mounted: Booted) -> None:
    """And what was copied is there for the next start. To unmount by hand is a clean end, too."""
    mounting.wait_for(lambda: status(mounted)["files"]["resident"] >= FILES, "all to be copied")
    holder = "monarchfs-test-holder.service"
    mounted.run("systemd-run", f"--unit={holder}", "--working-directory=/mnt/data", "sleep", "600")
    try:
        mounted.run("systemctl", "stop", UNIT)
        assert_shown(mounted, UNIT, Result="success", ActiveState="inactive")
        assert not is_mounted(mounted, POINT)
    finally:
        mounted.run("systemctl", "stop", holder)
    mounted.run("systemctl", "start", UNIT)
    assert status(mounted)["files"]["resident"] >= FILES
    same_bytes(mounted)
    assert status(mounted)["source_io"]["read_bytes"] == 0
    mounted.monarchfs("umount", POINT)
    mounting.wait_for(lambda: mounted.state(UNIT) == "inactive", "the unit to be inactive")
    assert_shown(mounted, UNIT, NRestarts="0", Result="success")


def test_wrong_usage_is_not_tried_again(system: Booted) -> None:
    configure(system, "wrong", "freshness=sometimes")
    unit = "monarchfs@mnt-wrong.service"
    assert system.run("systemctl", "start", unit, check=False).returncode != 0
    assert_shown(system, unit, ActiveState="failed", NRestarts="0", ExecMainStatus="2")
    system.run("systemctl", "reset-failed", unit)
    # `%f` is the path again; spaces, quotation marks, dollars and percent signs are kept.
    source = system.work / "it's $HOME, 100%"
    source.mkdir()
    (source / "file").write_bytes(b"bytes")
    point = "/mnt/my data-set"
    template = "--template=monarchfs@.service"
    unit = system.run("systemd-escape", template, "--path", point).stdout.strip()
    assert "\\x2d" in unit
    configure(system, "my data-set", "allow_other", '"' + str(source).replace("$", "\\$") + '"')
    with started(system, unit, point):
        assert system.run("cat", f"{point}/file").stdout == "bytes"


def test_a_mount_unit_is_what_fstab_says(system: Booted) -> None:
    """mount(8), mount.monarchfs and a daemon in the background, as installed."""
    example = (REPOSITORY / "systemd" / "mnt-imagenet.mount").read_text()
    text = example.replace("/lustre/imagenet", f"{system.work}/src")
    text = text.replace("RequiresMountsFor=/lustre", f"RequiresMountsFor={system.work}")
    text = text.replace("/scratch=80%%", f"{system.work}/tier-unit=10%%,reserve_percent=1")
    text = re.sub(r"^(Options=.*)$", rf"\1,state_dir={system.work}/state-unit", text, flags=re.M)
    system.write("/etc/systemd/system/mnt-imagenet.mount", text)
    system.run("mkdir", "-p", "/mnt/imagenet")
    system.run("systemctl", "daemon-reload")
    with started(system, "mnt-imagenet.mount", "/mnt/imagenet"):
        assert system.state("mnt-imagenet.mount") == "active"
        same_bytes(system, "/mnt/imagenet")
        there = ("test", "-e", f"/proc/{status(system, '/mnt/imagenet')['worker']['pid']}")
    mounting.wait_for(lambda: system.run(*there, check=False).returncode == 1, "the daemon's end")


def test_the_exporter_sees_what_the_service_mounts(mounted: Booted) -> None:
    """Restricted as it is; and mounts of ordinary users, whose sockets are in /tmp."""
    port = mounting.free_port()
    unit = "monarchfs-exporter.service"
    mounted.drop_in(unit, f"[Service]\nEnvironment=LISTEN=127.0.0.1:{port}\n")
    mounted.run("systemctl", "start", unit)
    try:
        assert mounted.state(unit) == "active"
        assert status_of(main_pid(mounted, unit))["Seccomp"] == "2"

        def page() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return str(answer.read().decode())

        wanted = re.compile(rf'^monarchfs_\w+{{[^}}]*mount="{POINT}"[^}}]*}} \S+$', re.M)
        assert len(wanted.findall(page())) > 20
        assert 'user="nobody"' in page()
        mounted.run("systemctl", "stop", UNIT)
        assert not wanted.findall(page())
    finally:
        mounted.run("systemctl", "stop", unit)


def test_the_timer_clears_a_dead_mount(system: Booted) -> None:
    """For everybody, though it is restricted."""
    system.run("mkdir", "-p", "/mnt/dead")
    storage = ("--tier", f"{system.work}/tier-dead=1G", "--state-dir", f"{system.work}/state-dead")
    system.monarchfs("mount", f"{system.work}/src", "/mnt/dead", *storage)
    pid = json.loads(system.run("sh", "-c", "cat /run/monarchfs/*.json").stdout)["supervisor_pid"]
    os.kill(system.outside(str(pid)), signal.SIGKILL)
    mounting.wait_for(
        lambda: system.run("ls", "/mnt/dead", check=False).returncode != 0, "the mount to be dead"
    )
    # Its squeue asks a controller.
    controller = socket.create_server(("127.0.0.1", 0))
    script = f"#!/bin/bash\n>/dev/tcp/127.0.0.1/{controller.getsockname()[1]} && >/run/asked\n"
    system.write("/usr/local/bin/squeue", script)
    system.run("chmod", "755", "/usr/local/bin/squeue")
    system.run("mkdir", "-p", "/run/monarchfs/slurm/shares")
    # What a user's cache was, as an epilog leaves it.
    trash = system.work / "tier-gc" / f".trash-{'a' * 20}-01020304"
    system.run("install", "-d", "-o", "nobody", "-m", "700", trash, trash / "sub")
    system.write("/etc/monarchfs-slurm.toml", f'roots = ["/mnt"]\ntier = ["{trash.parent}=1M"]\n')
    timer, service = "monarchfs-gc.timer", "monarchfs-gc.service"
    system.drop_in(timer, "[Timer]\nOnActiveSec=1ms\nAccuracySec=1ms\nRandomizedDelaySec=0\n")
    system.run("systemctl", "start", timer)
    try:
        mounting.wait_for(lambda: not is_mounted(system, "/mnt/dead"), "gc to have unmounted it")
        mounting.wait_for(lambda: system.state(service) == "inactive", "gc to have ended")
        assert_shown(system, service, Result="success", ExecMainStatus="0")
        assert not trash.exists()
        shown = system.run("systemctl", "show", "--property=TimersMonotonic", timer).stdout
        assert "OnUnitInactiveUSec=1h" in shown
        system.run("test", "-e", "/run/asked")
        assert system.run("sh", "-c", "ls /run/monarchfs/*.json", check=False).stdout == ""
    finally:
        system.run("systemctl", "stop", timer)
        system.run("rm", "/usr/local/bin/squeue")
        controller.close()


def test_what_a_prolog_mounts_outlives_slurmd(system: Booted) -> None:
    """The daemon is in a scope of its own, not in slurmd's control group."""
    interpreter_for("nobody")
    work = system.work
    system.write(
        "/etc/monarchfs-slurm.toml",
        f'roots = ["{work}"]\ntier = ["{work}/tier-job=100M"]\noptions = "reserve_percent=1"\n'
        f'log = "{work}/slurm.log"\nreport_dir = "{work}/reports"\ncache_dir = "{work}/cache"\n',
    )
    monarchfs = Path(mounting.MONARCHFS[0]).parent / "monarchfs"
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_UID": str(pwd.getpwnam("nobody").pw_uid),
        "SLURM_JOB_USER": "nobody",
        "SLURM_JOB_COMMENT": f"monarchfs={work}/src",
        "SLURMD_NODENAME": "here",
        "MONARCHFS": str(monarchfs),
    }
    settings = [f"--setenv={name}={value}" for name, value in job.items()]
    # A service that runs a prolog and stays, as slurmd.service would.
    script = f"{REPOSITORY}/slurm/prolog; touch {work}/prolog-done; exec sleep 600"
    system.run("systemd-run", "--unit=slurmd", *settings, "sh", "-c", script)
    mounting.wait_for(lambda: (work / "prolog-done").exists(), "the prolog's end")
    scopes = system.run("systemctl", "list-units", "--plain", "--no-legend", "--type=scope").stdout
    (scope,) = re.findall(r"^(monarchfs-\S+\.scope) +loaded active running", scopes, re.M)
    assert_shown(system, scope, Slice="monarchfs.slice")
    system.run("systemctl", "stop", "slurmd")
    (point,) = re.findall(
        r"^export MONARCHFS_ROOT=(/run/monarchfs/\S+)$",
        system.run("cat", "/run/monarchfs/slurm/env/7").stdout,
        re.M,
    )
    user = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
    system.run(*user, "diff", "-r", f"{work}/src", point)
    words = [f"{name}={value}" for name, value in job.items()]
    system.run("env", *words, f"{REPOSITORY}/slurm/epilog")
    assert not is_mounted(system, point)
    mounting.wait_for(lambda: system.state(scope) != "active", "the scope to be gone")
    assert (work / "reports" / "7.here.json").exists()
