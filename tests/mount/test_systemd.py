"""The units: systemd's own word on them, what they allow is what is needed, and sd_notify(3)."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs.config.settings import is_known_option, split_options
from monarchfs.supervisor.notify_systemd import ServiceManager
from tests.support import surroundings, trees
from tests.support.mounting import (
    MONARCHFS,
    REPOSITORY,
    WAIT_SECONDS,
    Bench,
    Mount,
    needs_mounts,
    run,
    wait_for,
)
from tests.support.programs import execute

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
        text = source.read_text().replace(COMMAND, "/bin/true")
        (tmp_path / source.name).write_text(text)
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
@pytest.mark.parametrize(("unit", "most"), list(zip(SERVICES, (46, 26, 41), strict=True)))
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


# The daemon, as the unit starts it


def command_of(source: Path, mountpoint: Path, options: str) -> list[str]:
    """The command line of a mount's unit: ``${NAME}`` is one word, whatever is in it."""
    values = {"SOURCE": str(source), "MOUNTPOINT": str(mountpoint), "OPTIONS": options}
    words = shlex.split(directives("monarchfs@.service")["ExecStart"][0])
    assert words[0] == COMMAND
    return [*MONARCHFS, *(values[w[2:-1]] if w.startswith("${") else w for w in words[1:])]


def read_all(mount: Mount) -> None:
    command = ["diff", "-r", str(mount.source), str(mount.path)]
    subprocess.run(command, check=True, timeout=WAIT_SECONDS)


@needs_mounts
def test_the_units_command_has_no_empty_word_without_options(tmp_path: Path) -> None:
    done = execute(command_of(Path("/nowhere"), tmp_path, ""))
    assert done.returncode == 2
    assert done.stderr == "monarchfs: source /nowhere does not exist: name an existing directory\n"


def system_calls(name: str, known: dict[str, list[str]]) -> set[str]:
    """All calls of a set of systemd's, with those of the sets in it."""
    if not name.startswith("@"):
        return {name}
    return set().union(*(system_calls(part, known) for part in known[name]))


@needs_systemd
@needs_mounts
@surroundings.program("strace")
def test_the_system_calls_of_the_unit_are_enough(work: Bench) -> None:
    known: dict[str, list[str]] = {}
    for line in analyze("syscall-filter", cwd=work.path).stdout.splitlines():
        if line.startswith("@"):
            members = known[line.strip()] = []
        elif known and line.strip() and not line.strip().startswith("#"):
            members.append(line.strip())
    (filtered,) = directives("monarchfs@.service")["SystemCallFilter"]
    allowed = system_calls("@default", known).union(
        *(system_calls(s, known) for s in filtered.split())
    )
    trace = work.path / "trace"
    before = ["strace", "-f", "-qq", "-e", "signal=none", "-o", str(trace)]
    source, point = work.path / "src", work.path / "mount point"
    trees.dataset(source, files=8)
    point.mkdir()
    storage = f"tier={work.path}/tier=1G,state_dir={work.path}/state"
    options = f"{storage},user=nobody,allow_other,prefetch=all,scrub=20M"
    with subprocess.Popen([*before, *command_of(source, point, options)]) as process:
        try:
            mount = Mount(source, point)
            work.mounts.append(mount)
            wait_for(lambda: run("status", str(point)).returncode == 0, "the mount")
            read_all(mount)
            mount.wait_idle()
            read_all(mount)
            assert run("evict", str(mount.path)).returncode == 0
            assert mount.umount().returncode == 0
            process.wait(30)
        finally:
            process.terminate()
    lines = trace.read_text(errors="replace").splitlines()
    used = set(re.findall(r"^\d+ +(\w+)\(", "\n".join(lines), re.M))
    assert {"mount", "umount2", "setresuid", "capset", "ioctl"} & used
    assert used - allowed == set()
    both = [line for line in lines if "PROT_WRITE" in line and "PROT_EXEC" in line]
    assert both == [], "MemoryDenyWriteExecute= forbids it"
    (families,) = directives("monarchfs@.service")["RestrictAddressFamilies"]
    asked = set(re.findall(r" socket(?:pair)?\((AF_\w+)", "\n".join(lines)))
    assert asked <= set(families.split())


# sd_notify


class Manager:
    """What systemd is to a service: a datagram socket."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.environment = {"NOTIFY_SOCKET": address}

    def next(self, seconds: float = WAIT_SECONDS) -> str | None:
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


@needs_mounts
def test_a_daemon_says_nothing_to_the_manager_of_who_started_it(
    work: Bench, manager: Manager, monkeypatch: pytest.MonkeyPatch
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
        ({"WATCHDOG_USEC": "0"}, 0),
        ({"WATCHDOG_USEC": "soon"}, 0),
        ({}, 0),
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
        service.stopping()
        assert told.next() == "STOPPING=1"
    abstract.socket.close()
