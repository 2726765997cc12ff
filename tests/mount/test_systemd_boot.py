"""The units under a systemd that is a first process: started, watched, killed, stopped."""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import trees
from tests.support.fake_mounts import interpreter_for
from tests.support.mounting import MONARCHFS, REPOSITORY, free_port, requires_mounts, wait_for
from tests.support.processes import status_of
from tests.support.systemd import Booted, booted

pytestmark = requires_mounts

FILES = 6
UNIT = "monarchfs@mnt-data.service"
POINT = "/mnt/data"


@pytest.fixture(scope="module")
def system() -> Iterator[Booted]:
    """One for all tests here, with everything installed as an administrator does it."""
    with booted() as running:
        if running.run(*MONARCHFS, "--version", check=False).returncode != 0:
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
    configure(system, "data", "user=nobody,allow_other,prefetch=all")
    system.run("systemctl", "start", UNIT)
    yield system
    system.run("systemctl", "stop", UNIT)
    system.run("systemctl", "reset-failed", UNIT, check=False)
    assert not is_mounted(system, POINT)


def configure(system: Booted, name: str, options: str, source: str = "") -> None:
    """Says what is mounted on /mnt/NAME; ``source`` is quoted already."""
    storage = f"tier={system.work}/tier-{name}=1G,state_dir={system.work}/state-{name}"
    system.write(
        f"/etc/monarchfs/mnt/{name}.conf",
        f'SOURCE={source or system.work / "src"}\nOPTIONS="{storage},{options}"\n',
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
    wait_for(lambda: status(mounted)["files"]["resident"] >= FILES, "everything to be copied")
    same_bytes(mounted)

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
    wait_for(lambda: status(mounted)["worker"]["restarts"] == 1, "another worker")
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
    system.run("systemctl", "start", unit)
    same_bytes(system, point)
    first = main_pid(system, unit)
    os.kill(first, number)
    again = {"NRestarts": "1", "ActiveState": "active"}
    wait_for(lambda: system.show(unit, *again) == again, f"{unit} to be started again")
    assert not Path(f"/proc/{first}").exists()
    assert main_pid(system, unit) != first
    same_bytes(system, point)
    table = system.run("cat", "/proc/self/mountinfo").stdout
    assert table.count(f" {point} ") == 1, "what the dead one left was unmounted"
    system.run("systemctl", "stop", unit)
    assert not is_mounted(system, point)


def test_stopping_unmounts_though_somebody_sits_in_the_mount(mounted: Booted) -> None:
    """And what was copied is there for the next start. To unmount by hand is a clean end, too."""
    wait_for(lambda: status(mounted)["files"]["resident"] >= FILES, "everything to be copied")
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
    wait_for(lambda: mounted.state(UNIT) == "inactive", "the unit to be inactive")
    assert_shown(mounted, UNIT, NRestarts="0", Result="success")


def test_wrong_usage_is_not_tried_again(system: Booted) -> None:
    configure(system, "wrong", "freshness=sometimes")
    unit = "monarchfs@mnt-wrong.service"
    assert system.run("systemctl", "start", unit, check=False).returncode != 0
    assert_shown(system, unit, ActiveState="failed", NRestarts="0", ExecMainStatus="2")
    system.run("systemctl", "reset-failed", unit)


def test_names_that_are_escaped(system: Booted) -> None:
    """`%f` is the path again; spaces, quotation marks, dollars and percent signs are kept."""
    source = system.work / "it's $HOME, 100%"
    source.mkdir()
    (source / "file").write_bytes(b"bytes")
    point = "/mnt/my data-set"
    template = "--template=monarchfs@.service"
    unit = system.run("systemd-escape", template, "--path", point).stdout.strip()
    assert "\\x2d" in unit
    configure(system, "my data-set", "allow_other", '"' + str(source).replace("$", "\\$") + '"')
    system.run("systemctl", "start", unit)
    assert system.run("cat", f"{point}/file").stdout == "bytes"
    system.run("systemctl", "stop", unit)
    assert not is_mounted(system, point)


def test_a_mount_unit_is_what_fstab_says(system: Booted) -> None:
    """mount(8), mount.monarchfs and a daemon in the background, as installed."""
    example = (REPOSITORY / "systemd" / "mnt-imagenet.mount").read_text()
    text = example.replace("/lustre/imagenet", f"{system.work}/src")
    text = text.replace("RequiresMountsFor=/lustre", f"RequiresMountsFor={system.work}")
    text = text.replace("/scratch=80%%", f"{system.work}/tier-unit=10%%")
    text = re.sub(r"^(Options=.*)$", rf"\1,state_dir={system.work}/state-unit", text, flags=re.M)
    system.write("/etc/systemd/system/mnt-imagenet.mount", text)
    system.run("mkdir", "-p", "/mnt/imagenet")
    system.run("systemctl", "daemon-reload")
    system.run("systemctl", "start", "mnt-imagenet.mount")
    assert system.state("mnt-imagenet.mount") == "active"
    same_bytes(system, "/mnt/imagenet")
    there = ("test", "-e", f"/proc/{status(system, '/mnt/imagenet')['worker']['pid']}")
    system.run("systemctl", "stop", "mnt-imagenet.mount")
    assert not is_mounted(system, "/mnt/imagenet")
    wait_for(lambda: system.run(*there, check=False).returncode == 1, "the daemon's end")


def test_the_exporter_sees_what_the_service_mounts(mounted: Booted) -> None:
    """Restricted as it is; and mounts of ordinary users, whose sockets are in /tmp."""
    port = free_port()
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
    wait_for(
        lambda: system.run("ls", "/mnt/dead", check=False).returncode != 0, "the mount to be dead"
    )
    timer, service = "monarchfs-gc.timer", "monarchfs-gc.service"
    system.drop_in(timer, "[Timer]\nOnActiveSec=1ms\nAccuracySec=1ms\nRandomizedDelaySec=0\n")
    system.run("systemctl", "start", timer)
    try:
        wait_for(lambda: not is_mounted(system, "/mnt/dead"), "gc to have unmounted it")
        wait_for(lambda: system.state(service) == "inactive", "gc to have ended")
        assert_shown(system, service, Result="success", ExecMainStatus="0")
        shown = system.run("systemctl", "show", "--property=TimersMonotonic", timer).stdout
        assert "OnUnitInactiveUSec=1h" in shown
        assert system.run("sh", "-c", "ls /run/monarchfs/*.json", check=False).stdout == ""
    finally:
        system.run("systemctl", "stop", timer)


def test_what_a_prolog_mounts_outlives_slurmd(system: Booted) -> None:
    """The daemon is in a scope of its own, not in slurmd's control group."""
    interpreter_for("nobody")
    work = system.work
    system.write(
        "/etc/monarchfs-slurm.toml",
        f'roots = ["{work}"]\ntier = ["{work}/tier-job=100M"]\noptions = "reserve_percent=1"\n'
        f'log = "{work}/slurm.log"\nreport_dir = "{work}/reports"\ncache_dir = "{work}/cache"\n',
    )
    monarchfs = Path(MONARCHFS[0]).parent / "monarchfs"
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
    wait_for(lambda: (work / "prolog-done").exists(), "the prolog's end")
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
    wait_for(lambda: system.state(scope) != "active", "the scope to be gone")
    assert (work / "reports" / "7.here.json").exists()
