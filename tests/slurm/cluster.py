"""A Slurm cluster of three nodes on one machine: real daemons, each node in namespaces of its own.

A node is a network, host name, mount and process namespace: it has its own ``/run``, its own
``/var/cache`` and its own "local disk" (``Cluster.local``), and killing its first process is what a
power cut is to a machine.
Nothing of it is seen outside, and nothing is left when the first processes are gone.
"""

import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.fake_mounts import interpreter_for
from tests.support.mounting import REPOSITORY, as_user, fuse_mounts, processes_about
from tests.support.programs import Running, execute, ip
from tests.support.surroundings import no_fuse, no_namespaces
from tests.support.timing import Late, Stopwatch, wait_for

NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter", "unshare", "setpriv")
NODES = ("n1", "n2", "n3")
USERS = ("nobody", "daemon", "games")
"""Accounts that Debian always has; the first is who runs most jobs."""
_NETWORK = "10.77.0"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_QUIET: Mapping[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
_WAIT_SECONDS = 60.0
"""More than the half minute after which srun asks again at the latest for nodes that were busy."""

_CONFIG = """\
ClusterName=test
SlurmctldHost=ctl({network}.1)
AuthType=auth/munge
AuthInfo=socket={base}/munge/socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
PrologFlags=Alloc,Contain
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0,defer
MessageTimeout=30
BatchStartTimeout=60
KillWait=3
StateSaveLocation={base}/ctl/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/ctl/pid
SlurmdPidFile={base}/spool/%n.pid
SlurmctldLogFile={base}/ctl/log
SlurmdLogFile={base}/spool/%n.log
PlugStackConfig={base}/plugstack.conf
Prolog={base}/prolog
Epilog={base}/epilog
TaskProlog={base}/task_prolog
NodeName=n1 NodeAddr={network}.11 CPUs=64 RealMemory=1000
NodeName=n2 NodeAddr={network}.12 CPUs=64 RealMemory=1000
NodeName=n3 NodeAddr={network}.13 CPUs=64 RealMemory=1000
PartitionName=main Nodes=n[1-3] Default=YES OverSubscribe=FORCE:8
PartitionName=gpu Nodes=n[1-3] OverSubscribe=FORCE:8
"""


def cannot_start() -> str:
    """Why a cluster cannot be started here; empty if it can."""
    if os.geteuid() != 0:
        return "needs root: sudo make cluster"
    absent = [name for name in NEEDED if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"needs {', '.join(absent)}: .ci/cluster-packages build/prometheus"
    if not os.path.exists("/etc/hosts"):
        return "needs /etc/hosts, in whose place each node gets its own"
    return no_fuse() or no_namespaces()


@dataclass
class Machine:
    """A set of namespaces, by its first process (``pid``, as seen from outside)."""

    name: str
    outer: Running
    pid: int

    def command(self, *words: str, user: str | None = None) -> list[str]:
        enter = ["nsenter", "--target", str(self.pid), "--all", "--wd=/"]
        if user is not None:
            entry = pwd.getpwnam(user)
            enter += ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}"]
            enter += ["--init-groups"]
        return [*enter, *words]

    def power_cut(self) -> None:
        if self.outer.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.outer.wait(30)


@dataclass
class Cluster:
    """``base`` is a directory that all nodes share (as a parallel file system is shared), ``local``
    one below it that is another one on each node."""

    base: Path
    machines: dict[str, Machine] = field(default_factory=dict)
    munged: subprocess.Popen[bytes] | None = None

    @property
    def local(self) -> Path:
        return self.base / "local"

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": _PATH, "LANG": "C.UTF-8", "SLURM_CONF": f"{self.base}/slurm.conf"}

    @staticmethod
    def address(machine: str) -> str:
        return f"{_NETWORK}.1" + machine[1:] if machine in NODES else f"{_NETWORK}.1"

    def local_of(self, node: str) -> Path:
        return self.base / "disks" / node

    def run(
        self, node: str, *words: str, user: str | None = None, stdin: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        command = self.machines[node].command(*words, user=user)
        env = {**self.environment, **environment}
        return execute(command, input=stdin, timeout=60, env=env, cwd="/")

    # Jobs

    def sbatch(self, script: str, *options: str, user: str = USERS[0]) -> int:
        done = self.run(
            "ctl",
            *("sbatch", "--parsable", "--chdir", str(self.work(user)), "--output=%A_%a.out"),
            *("--open-mode=append", *options),
            user=user,
            stdin="#!/bin/sh\n" + script,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout.strip().split(";")[0])

    def work(self, user: str) -> Path:
        return self.base / "work" / user

    def output(self, job: int, user: str = USERS[0]) -> str:
        """What a job printed so far (of an array, of all its tasks)."""
        found = sorted(self.work(user).glob(f"{job}_*.out"))
        return "".join(path.read_text(errors="replace") for path in found)

    def jobs(self) -> list[str]:
        done = self.run("ctl", "squeue", "--noheader", "--format=%i %T %N %r")
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def wait(self, *ids: int, seconds: float = 60) -> None:
        def gone() -> bool:
            return not {job.split()[0].split("_")[0] for job in self.jobs()} & set(map(str, ids))

        self.wait_for(gone, "the jobs to end", seconds)

    def node_states(self) -> dict[str, str]:
        """Of none, while Slurm does not answer."""
        done = self.run("ctl", "sinfo", "--noheader", "-N", "--partition=main", "--format=%N %T")
        return dict(line.split() for line in done.stdout.splitlines())

    def monarchfs_mounts(self, node: str) -> list[tuple[str, str]]:
        text = Path(f"/proc/{self.machines[node].pid}/mountinfo").read_text()
        parts = [line.partition(" - fuse.monarchfs ") for line in text.splitlines()]
        return [(left.split()[4], right.split()[0]) for left, _, right in parts if right]

    def mount_of(self, node: str, source: Path) -> str | None:
        found = [point for point, of in self.monarchfs_mounts(node) if of == str(source)]
        return found[0] if found else None

    def wait_for(
        self, condition: Callable[[], object], what: str, seconds: float = _WAIT_SECONDS
    ) -> None:
        """Waits for something that happens on the nodes; fails the test, and tells all there is
        to know of them, if it has not after ``seconds``."""
        watch = Stopwatch()
        while not condition():
            if watch.seconds() >= seconds:
                raise Late(f"waited in vain for: {what}\n{self.state()}")
            time.sleep(0.05)

    def state(self) -> str:
        """Jobs, nodes, their processes, and the ends of the logs."""
        ps = ("ps", "-eo", "pid,stat,wchan,args")
        processes = [f"--- {name}\n{self.run(name, *ps).stdout}" for name in self.machines]
        return "\n".join([*self.jobs(), str(self.node_states()), *processes, self.logs()])

    def logs(self) -> str:
        paths = [self.base / "ctl/log", *(self.base / f"spool/{n}.log" for n in NODES)]
        paths += sorted((self.base / "disks").glob("*/log/*"))
        paths += sorted((self.base / "work").glob("*/*.out"))[-4:]
        return "\n".join(
            f"--- {path}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-40:])
            for path in paths
            if path.is_file()
        )

    # Starting and ending

    def start(self) -> None:
        self.base.chmod(0o755)
        for name in ("ctl/state", "spool", "work", "local", "munge", "disks"):
            (self.base / name).mkdir(parents=True)
        for user in USERS:
            self.work(user).mkdir()
            shutil.chown(self.work(user), user)
        for node in NODES:
            self.local_of(node).mkdir()
        (self.base / "plugstack.conf").touch(exist_ok=True)
        (self.base / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{self.address(node)} {node}\n" for node in NODES)
        )
        (self.base / "slurm.conf").write_text(_CONFIG.format(base=self.base, network=_NETWORK))
        self._start_munge()
        self._start_machine("ctl")
        ctl = self.machines["ctl"].pid
        for words in ("link add br0 type bridge", f"addr add {_NETWORK}.1/24 dev br0"):
            ip(ctl, words)
        ip(ctl, "link set br0 up")
        self.daemon("ctl", "slurmctld", "-D")
        for node in NODES:
            self.boot(node)
        self.wait_idle()

    def boot(self, node: str) -> None:
        self._start_machine(node)
        self._network_of(node)
        self.daemon(node, "slurmd", "-D", "-N", node)

    def wait_idle(self) -> None:
        """Until Slurm would run jobs on all nodes."""
        self.wait_for(lambda: self.node_states() == dict.fromkeys(NODES, "idle"), "idle nodes")

    def close(self) -> None:
        for machine in self.machines.values():
            machine.power_cut()
        if self.munged is not None:
            self.munged.kill()
            self.munged.wait(5)

    def _start_munge(self) -> None:
        directory = self.base / "munge"
        (directory / "key").write_bytes(secrets.token_bytes(128))
        (directory / "key").chmod(0o400)
        for path in (directory, directory / "key"):
            shutil.chown(path, "munge", "munge")
        directory.chmod(0o755)
        words = ["setpriv", "--pdeathsig", "KILL", "munged", "--foreground"]
        files = (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"))
        for option, name in (*files, ("seed-file", "seed"), ("log-file", "log")):
            words.append(f"--{option}={directory / name}")
        self.munged = subprocess.Popen(as_user("munge", words), env={"PATH": _PATH}, **_QUIET)
        wait_for((directory / "socket").exists, "munged")

    def _start_machine(self, name: str) -> None:
        setup = (
            # What happens to be mounted outside must not be held here when it is unmounted there.
            "while read -r _ _ _ _ point rest; do case $rest in"
            " *' - fuse'*) umount -l \"$point\" ;; esac; done < /proc/self/mountinfo; "
            f"hostname {name}; for own in /run /var/cache; do"
            " mount -t tmpfs -o mode=755 tmpfs $own; done; "
            f"mount --bind {self.base}/hosts /etc/hosts; "
            + (f"mount --bind {self.base}/disks/{name} {self.local}; " if name in NODES else "")
            # The first process has to take leave of those whose parents are gone.
            + "ip link set lo up; echo ready; exec >/dev/null; sleep infinity & wait"
        )
        outer = Running(
            [
                # Nothing is left either where whoever started this is killed.
                *("setpriv", "--pdeathsig", "KILL"),
                *("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child"),
                *("--mount-proc", "--propagation", "private", "sh", "-c", setup),
            ],
            env={"PATH": _PATH},
            stdin=subprocess.DEVNULL,
            # It complains of a signal that it cannot unblock; what fails does not get to "ready".
            stderr=subprocess.DEVNULL,
        )
        with outer.stdout:
            assert outer.line() == "ready\n", f"{name} does not start"
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        self.machines[name] = Machine(name, outer, int(children[0]))

    def _network_of(self, node: str) -> None:
        ctl, pid = self.machines["ctl"].pid, self.machines[node].pid
        self.run("ctl", "ip", "link", "del", node)
        ip(ctl, f"link add {node} type veth peer name eth0 netns {pid}")
        ip(ctl, f"link set {node} master br0 up")
        # A node that was switched off comes back with the address that others remember (ARP).
        ip(pid, f"link set eth0 address 02:00:00:00:00:1{node[1:]}")
        ip(pid, f"addr add {self.address(node)}/24 dev eth0")
        ip(pid, "link set eth0 up")

    def daemon(self, machine: str, *words: str) -> None:
        subprocess.run(
            self.machines[machine].command("sh", "-c", 'setsid "$@" &', "-", *words),
            env=self.environment,
            cwd="/",
            check=True,
            **_QUIET,
        )


# A cluster as an administrator would set it up: our prolog, epilog, plugin and configuration


DEADLINE_SECONDS = 16
SITE = """\
roots = ["{base}/lustre", "{base}/frozen"]
tier = ["{base}/local/tier=64M"]
options = "reserve_percent=1"
deadline_seconds = {deadline}
cache_dir = "{base}/local/cache"
report_dir = "{base}/local/reports"
log = "{base}/local/log/slurm.log"
{more}

[[dataset]]
path = "{base}/lustre/given"
partitions = ["gpu"]
options = "name=GIVEN"
"""


def configure(base: Path, more: str = "") -> None:
    (base / "site.toml").write_text(SITE.format(base=base, deadline=DEADLINE_SECONDS, more=more))


@contextmanager
def site_cluster() -> Iterator[Cluster]:
    """Three nodes whose prolog and epilog are ours, and a directory ``lustre`` that they share.
    Only where it can be started."""
    interpreter_for("nobody")
    base = Path(tempfile.mkdtemp(prefix="monarchfs-cluster-"))
    running = Cluster(base)
    try:
        _prepare(base)
        running.start()
        yield running
    finally:
        running.close()
        shutil.rmtree(base, ignore_errors=True)
    assert (processes_about(str(base)), fuse_mounts(str(base))) == ([], []), "nothing is to be left"


def _prepare(base: Path) -> None:
    (base / "lustre").mkdir()
    ours, scripts = f"{base}/monarchfs", REPOSITORY / "slurm"
    commands = {
        "monarchfs": f'exec {sys.executable} -m monarchfs "$@"',
        "prolog": f"MONARCHFS={ours} exec {scripts}/prolog --config {base}/site.toml",
        "epilog": f"MONARCHFS={ours} exec {scripts}/epilog --config {base}/site.toml",
        "task_prolog": f"MONARCHFS={ours} exec {scripts}/task_prolog",
    }
    for name, command in commands.items():
        (base / name).write_text(f"#!/bin/sh\n{command}\n")
        (base / name).chmod(0o755)
    configure(base)
    _plugin(base)


def _plugin(base: Path) -> None:
    """Builds the plugin, where Slurm's headers are, and has the cluster load it."""
    if not os.path.exists("/usr/include/slurm/spank.h") or shutil.which("cc") is None:
        return
    subprocess.run(
        ["make", "-s", "-C", str(REPOSITORY / "slurm"), f"BUILD={base}/plugin"], check=True
    )
    (base / "plugstack.conf").write_text(f"required {base}/plugin/monarchfs.so\n")
