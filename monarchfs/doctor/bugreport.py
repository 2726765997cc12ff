"""What a report of a problem needs of a mount and its machine, as the files of an archive.

Each part is made in a child, within a time limit. A mount, a source or a daemon that hangs costs
that time, and what the part had said until then is kept. Nothing is in it of the contents of files
and keys, and names of the source's files only if they are asked for.

Root makes the report of another user's mount. What that user's paths, or daemon, lead to is then
read with the user's rights.
"""

from __future__ import annotations

import errno
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from hashlib import blake2b
from importlib import metadata
from typing import IO, Any

import psutil

from monarchfs import __version__
from monarchfs.config import Config, User
from monarchfs.config.files import SYSTEM_FILE
from monarchfs.config.places import DefaultPlaces, Search, user_of
from monarchfs.control.client import request
from monarchfs.doctor.checks import Check
from monarchfs.doctor.run import examine, summary
from monarchfs.fuse.connection import connection_of_mount
from monarchfs.fuse.mountinfo import parse_mountinfo
from monarchfs.supervisor.directories import (
    LOCK,
    OPEN_FILE,
    SUPERVISOR_LOG,
    WORKER_LOG,
    read_holder,
)
from monarchfs.supervisor.failover import STACKS_SIGNAL
from monarchfs.supervisor.identity import become, regular
from monarchfs.supervisor.launch import describe_threads
from monarchfs.supervisor.recover import FoundMount
from monarchfs.system.bounded import Answer, bounded_call
from monarchfs.system.escaping import printable
from monarchfs.system.limits import explained
from monarchfs.system.process_stat import start_ticks
from monarchfs.types import MonarchError, OperationError

_ANSWER_SECONDS = 5.0
_CONFIG_SECONDS = 2.0
_DOCTOR_SECONDS = 20.0
_BETWEEN_METRICS_SECONDS = 3.0
_STACKS_SECONDS, _STILL_SECONDS = 3.0, 0.2
_LOG_BYTES = 256 << 10
_MOST_OF_A_FILE = 64 << 10
_JOURNAL = ("journalctl", "--quiet", "--no-pager", "--output=short-iso-precise", "--lines=1000")
_KERNEL = re.compile(
    r"fuse|lustre|lnet|monarchfs|hung_task|blocked for more|out of memory|oom|i/o error", re.I
)
_LIBRARIES = ("pyfuse3", "trio", "lmdb", "psutil", "xxhash", "prometheus-client", "rich")
_OF_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_NUM_NODES", "SLURMD_NODENAME")
_ERRORS = frozenset(os.strerror(number) for number in errno.errorcode)
_SALT = os.urandom(16)
"""So that nobody can compare a digest with those of guessed names."""
_QUOTED = re.compile(r"""(?:(?<!\w)|(?<=\bb))(?<!File )(['"])((?:\\.|(?!\1)[^\\\n])+)\1""")


class Needs(Enum):
    """What a part cannot do without; the value says that it is missing."""

    NOTHING = ""
    DAEMON = "no daemon of the mount lives, or can be seen from here"
    ROOT = "only root can read it"


@dataclass(frozen=True, slots=True)
class Subject:
    """The mount, and how it is asked. ``config`` is what its daemon says, if ``told``, else the
    defaults. ``places`` and ``search`` are as for `examine`."""

    found: FoundMount
    config: Config
    told: bool
    status: Callable[[], Mapping[str, Any]]
    places: DefaultPlaces
    search: Search
    environ: Mapping[str, str]

    @property
    def state_dir(self) -> str:
        registered = self.found.registered
        return self.config.state_dir if registered is None else registered.entry.state_dir

    @property
    def owner(self) -> User:
        """Whose mount it is."""
        uid = self.found.mount.user_id if self.found.mount is not None else None
        if uid is None:
            uid = self.found.registered.entry.uid if self.found.registered else os.geteuid()
        return user_of(uid)

    def daemons(self) -> list[int]:
        """The supervisor and its children, the supervisor first; empty where they are not seen."""
        registered = self.found.registered
        if registered is None:
            return []
        pid, ticks = registered.entry.supervisor_pid, registered.entry.start_ticks
        try:
            if start_ticks(pid) != ticks or os.stat(f"/proc/{pid}").st_uid != registered.owner_uid:
                return []
            return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        except (OSError, psutil.Error):
            return []


Said = str | Mapping[str, Any]
"""Text, or what JSON can carry."""


@dataclass(frozen=True, slots=True)
class ReportPart:
    """A file of the archive. ``collect`` may hang, and raises MonarchError or OSError. With
    ``as_owner`` it has the rights of the mount's user. ``quotes``: what its text quotes may be
    names of files."""

    name: str
    about: str
    collect: Callable[[Subject], Iterable[Said]]
    seconds: float = _ANSWER_SECONDS
    needs: Needs = Needs.NOTHING
    as_owner: bool = False
    quotes: bool = False


@dataclass(frozen=True, slots=True)
class CollectedPart:
    """``trouble``: why it is missing, or not complete; empty if it is."""

    part: ReportPart
    content: bytes
    trouble: str


def told_config(found: FoundMount) -> Config | None:
    """The mount's configuration as its daemon says it; None if it does not."""
    try:
        said = request(found.daemon, {"command": "config"}, _CONFIG_SECONDS)
        return Config.from_json(json.dumps(said))
    except (OperationError, AttributeError, KeyError, TypeError, ValueError):
        return None  # dead, silent, or of another release


class NameDigests:
    """Replaces names of files below ``roots`` by digests, in which equal names are equal."""

    def __init__(self, roots: Iterable[str]) -> None:
        spellings = {way.rstrip("/") for root in roots for way in (root, printable(root))}
        self._roots = tuple(spellings)
        known = "|".join(map(re.escape, sorted(spellings, key=len, reverse=True)))
        # Names may hold anything: without a quotation mark one may go on to the end of the line.
        behind = r"(?(quote)(?:\\.|(?!(?P=quote))[^\t\n])+|[^\t\n]+)"
        self._below = re.compile(
            rf"(?P<quote>['\"])?(?<![\w./-])(?P<root>{known})/(?P<rest>{behind})"
        )

    def hidden(self, said: Any, *, quotes: bool) -> Any:
        """``said`` without names; with ``quotes`` also without what stands in quotation marks."""
        match said:
            case str():
                text = self._below.sub(_without_names, said)
                return _QUOTED.sub(self._without_quoted, text) if quotes else text
            case Mapping():
                return {key: self.hidden(value, quotes=quotes) for key, value in said.items()}
            case list() | tuple():
                return [self.hidden(value, quotes=quotes) for value in said]
        return said

    def _without_quoted(self, found: re.Match[str]) -> str:
        # What begins with a root has no names any more.
        is_done = found[2].startswith(self._roots)
        return found[0] if is_done else f"{found[1]}{_digests(found[2])}{found[1]}"


def _without_names(found: re.Match[str]) -> str:
    rest, colon, error = found["rest"].rpartition(": ")
    if error not in _ERRORS:
        rest, colon, error = found["rest"], "", ""
    return f"{found['quote'] or ''}{found['root']}/{_digests(rest)}{colon}{error}"


def _digests(path: str) -> str:
    """One for each component."""
    parts = (os.fsencode(printable(part)) for part in path.split("/"))
    return "/".join(
        f"#{blake2b(part, digest_size=4, key=_SALT).hexdigest()}" if part else "" for part in parts
    )


def collect(subject: Subject, names: NameDigests | None) -> Iterator[str | CollectedPart]:
    """The name of each part before it is made, then the part. ``names`` hides those of files; None
    keeps them. For processes of one thread, because it forks."""
    for part in PARTS:
        yield part.name
        yield collected(part, subject, names)


def collected(part: ReportPart, subject: Subject, names: NameDigests | None) -> CollectedPart:
    """One of them."""
    lacks = part.needs is Needs.DAEMON and not subject.found.supervisor_alive
    if lacks or (part.needs is Needs.ROOT and os.geteuid() != 0):
        return CollectedPart(part, b"", part.needs.value)
    memory, trouble = os.memfd_create("monarchfs-bugreport"), ""
    with open(memory, "rb") as file:
        try:
            bounded_call(
                partial(_write, part, subject, names, memory),
                timeout=part.seconds,
                overdue=f"no answer within {part.seconds:g} s",
                keep=(memory,),
            )
        except MonarchError as error:
            trouble = names.hidden(str(error), quotes=True) if names else str(error)
        file.seek(0)
        content = file.read()
    return CollectedPart(part, content, trouble or ("" if content else "nothing was there"))


def _write(part: ReportPart, subject: Subject, names: NameDigests | None, memory: int) -> Answer:
    """In the child. Each piece is written when it comes, because the next one may hang."""
    if part.as_owner and os.geteuid() == 0:
        become(subject.owner)
    with open(memory, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as file:
        for said in part.collect(subject):
            shown = said if names is None else names.hidden(said, quotes=part.quotes)
            file.write(shown if isinstance(shown, str) else json.dumps(shown, indent=1) + "\n")
            file.flush()
    return None, ()


def write_archive(file: IO[bytes], top: str, parts: Sequence[CollectedPart], readme: str) -> None:
    """A tar archive of the directory ``top``, compressed by gzip. Raises OSError."""
    contents = [("README.txt", os.fsencode(readme))]
    contents += [(one.part.name, one.content) for one in parts if one.content]
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, content in contents:
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size, member.mode, member.mtime = len(content), 0o600, int(time.time())
            archive.addfile(member, io.BytesIO(content))


def readme_of(subject: Subject, parts: Sequence[CollectedPart], *, with_names: bool) -> str:
    """What is in the archive, what is not, and why."""
    found, root = subject.found, os.geteuid() == 0
    told = (
        "Names of files below them are in it."
        if with_names
        else "Names of files below them are replaced by digests (#0123abcd), equal names by equal"
        "\nones. In logs, all that stands in quotation marks is replaced, and behind a name perhaps"
        "\nthe rest of the line. Other paths are as they are: home, tiers, options, other mounts."
    )
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    lines = [
        f"monarchfs {__version__}: report of a problem, made {now}"
        f" {'by root' if root else 'without root'}.",
        f"Mount point {printable(found.mountpoint)}, source {printable(found.source)}.",
        *(
            "",
            told,
            "Contents of files and of keys are not in it. Names of machines and users are.",
        ),
        "",
        *(f"{one.part.name:<20} {one.part.about}" for one in parts if one.content),
        "",
        "Missing, or not complete:",
        *(f"{one.part.name:<20} {printable(one.trouble)}" for one in parts if one.trouble),
    ]
    return "\n".join(lines if any(one.trouble for one in parts) else lines[:-2]) + "\n"


# The parts


def _mount(subject: Subject) -> Iterator[Said]:
    found, registered = subject.found, subject.found.registered
    yield {
        "mountpoint": found.mountpoint,
        "source": found.source,
        "mounted_here": found.mount is not None,
        "made_elsewhere": found.made_elsewhere,
        "bind_mount": found.is_copy,
        "daemon_lives": found.supervisor_alive,
        "registration": registered and asdict(registered.entry),
        "owner": asdict(subject.owner),
    }
    if found.mount is not None:
        with closing(connection_of_mount(found.mount)) as connection:
            yield f"requests that wait in the kernel: {connection.waiting}\n"


def _config(subject: Subject) -> Iterator[Said]:
    if not subject.told:
        yield "# The daemon did not say them: these are the defaults.\n"
    yield json.loads(subject.config.to_json())


def _status(subject: Subject) -> Iterator[Said]:
    yield subject.status()


def _versions(_subject: Subject) -> Iterator[Said]:
    yield f"monarchfs {__version__}\nPython {platform.python_version()}\n"
    installed = {one.metadata["Name"].lower(): one.version for one in metadata.distributions()}
    yield "".join(f"{name} {installed.get(name, 'unknown')}\n" for name in _LIBRARIES)
    yield f"{' '.join(platform.uname())}\n{' '.join(platform.libc_ver())}\n"
    for path in ("/etc/os-release", "/sys/fs/lustre/version", "/proc/meminfo", "/proc/loadavg"):
        yield _headed(path)


def _processes(subject: Subject) -> Iterator[Said]:
    for pid in subject.daemons():
        words = _content(f"/proc/{pid}/cmdline").split("\0")
        # What `monarchfs run` runs is its user's matter.
        yield f"==> process {pid} <==\n" + "\n".join(words[: (*words, "--").index("--")]) + "\n"
        yield "".join(f"{line}\n" for line in describe_threads(pid))
        try:
            yield f"open descriptors: {len(os.listdir(f'/proc/{pid}/fd'))}\n"
        except OSError as error:
            yield f"open descriptors: {error.strerror}\n"
        yield from (_headed(f"/proc/{pid}/{name}") for name in ("status", "limits", "cgroup"))
        group = re.search(r"^0::(/.*)$", _content(f"/proc/{pid}/cgroup"), re.MULTILINE)
        for name in ("memory.max", "memory.current", "memory.events", "pids.max"):
            yield _headed(f"/sys/fs/cgroup{group[1]}/{name}") if group else ""


def _python_stacks(subject: Subject) -> Iterator[Said]:
    """faulthandler writes them into the worker's log (``worker.__main__``)."""
    log = os.path.join(subject.state_dir, WORKER_LOG)
    before = os.stat(log).st_size
    if not sum(map(_ask_for_stacks, subject.daemons())):
        raise OperationError("there is no worker that can be asked")
    deadline, size, grew = time.monotonic() + _STACKS_SECONDS, before, time.monotonic()
    while time.monotonic() < deadline and (
        size == before or time.monotonic() - grew < _STILL_SECONDS
    ):
        time.sleep(_STILL_SECONDS / 4)
        if (now := os.stat(log).st_size) != size:
            size, grew = now, time.monotonic()
    if size == before:
        raise OperationError("they are not in the worker's log; in the foreground, see its output")
    yield _tail(log, size - before)


def _ask_for_stacks(pid: int) -> bool:
    """Sends the signal to a worker that catches it; whether it is one. Raises OSError."""
    place = os.pidfd_open(pid)
    try:
        caught = re.search(
            r"^SigCgt:\s*([0-9a-f]+)$", _content(f"/proc/{pid}/status"), re.MULTILINE
        )
        is_worker = "monarchfs.worker" in _content(f"/proc/{pid}/cmdline").split("\0")
        if not is_worker or caught is None or not int(caught[1], 16) >> (STACKS_SIGNAL - 1) & 1:
            return False
        signal.pidfd_send_signal(place, STACKS_SIGNAL)
        return True
    finally:
        os.close(place)


def _metrics(subject: Subject) -> Iterator[Said]:
    for again in (False, True):
        if again:
            time.sleep(_BETWEEN_METRICS_SECONDS)
        values = request(subject.found.daemon, {"command": "metrics"}, _ANSWER_SECONDS)
        yield {"unix_seconds": round(time.time(), 3), **values}


def _mounts(subject: Subject) -> Iterator[Said]:
    tables = ["self", *(map(str, subject.daemons()[:1]) if subject.found.made_elsewhere else ())]
    for process in tables:
        with open(f"/proc/{process}/mountinfo", "rb") as file:
            for mount in parse_mountinfo(file.read()):
                yield "\t".join(map(str, mount)) + "\n"


def _storage(subject: Subject) -> Iterator[Said]:
    """The source last, because it may hang."""
    for name in sorted(os.listdir(subject.state_dir)):
        path = os.path.join(subject.state_dir, name)
        for file in [os.path.join(path, "data.mdb")] if name == "index" else [path]:
            of_file = os.lstat(file)
            yield f"{file}: {of_file.st_size} bytes, {of_file.st_blocks * 512} allocated\n"
    for path in (subject.state_dir, *_tiers(subject), subject.found.source):
        try:
            st = os.statvfs(path)
        except OSError as error:
            yield f"{path}: {error.strerror}\n"
            continue
        numbers = {"bytes": st.f_blocks * st.f_frsize, "free_bytes": st.f_bavail * st.f_frsize}
        yield f"{path}: {numbers | {'inodes': st.f_files, 'free_inodes': st.f_favail}}\n"


def _tiers(subject: Subject) -> Sequence[str]:
    """Also of a mount whose daemon is dead: the lock says what it had. Raises OSError."""
    if subject.told:
        return [tier.path for tier in subject.config.tiers]
    with open(os.open(os.path.join(subject.state_dir, LOCK), os.O_RDONLY | OPEN_FILE)) as lock:
        holder = read_holder(lock.fileno())
    return () if holder is None else holder.tiers


def _logs(subject: Subject) -> Iterator[Said]:
    names = [WORKER_LOG, f"{WORKER_LOG}.1", SUPERVISOR_LOG]
    paths = [os.path.join(subject.state_dir, name) for name in names]
    for path in (*paths, *([subject.config.log_file] if subject.config.log_file else [])):
        try:
            yield f"==> {path} <==\n{_tail(path, _LOG_BYTES)}\n"
        except OSError as error:
            yield f"==> {path} <==\n({error.strerror})\n"


def _journal(subject: Subject) -> Iterator[Said]:
    """What the supervisor said to syslog, or on standard error under systemd."""
    registered = subject.found.registered
    if registered is None or shutil.which(_JOURNAL[0]) is None:
        raise OperationError("there is no journal, or no daemon registered this mount")
    words = [*_JOURNAL, f"_PID={registered.entry.supervisor_pid}"]
    yield subprocess.run(words, capture_output=True, check=True).stdout.decode(errors="replace")


def _kernel(_subject: Subject) -> Iterator[Said]:
    """Lines of the kernel's log about file systems and memory, and processes that hang."""
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    while True:
        try:
            record = os.read(log, 8192).decode(errors="replace")
        except BlockingIOError:
            return
        except BrokenPipeError:
            continue  # overwritten meanwhile
        if _KERNEL.search(record):
            yield record


def _environment(subject: Subject) -> Iterator[Said]:
    for name, value in sorted(subject.environ.items()):
        if name.startswith("MONARCHFS_") or name in _OF_SLURM:
            yield f"{name}={value}\n"
    yield f"systemd runs: {os.path.isdir('/run/systemd/system')}\n"
    yield from map(_headed, (SYSTEM_FILE, "/etc/monarchfs-slurm.toml"))
    yield from (_headed(f"/proc/self/{name}") for name in ("cgroup", "limits", "uid_map"))


def _doctor(subject: Subject) -> Iterator[Said]:
    config = replace(subject.config, user=subject.owner, state_dir=subject.state_dir)
    steps = examine(config, subject.places, subject.environ, subject.search, _DOCTOR_SECONDS)
    yield summary([step for step in steps if isinstance(step, Check)])


PARTS = (
    ReportPart("mount.txt", "which mount it is, and whether its daemon lives", _mount),
    ReportPart("config.json", "its options", _config),
    ReportPart("status.json", "what it says of itself", _status, 2 * _ANSWER_SECONDS, quotes=True),
    ReportPart("versions.txt", "the program, its libraries, the system", _versions),
    ReportPart(
        "processes.txt", "its daemons: threads, limits, memory", _processes, 10.0, Needs.DAEMON
    ),
    ReportPart(
        "python-stacks.txt",
        "what the worker's threads do in Python",
        _python_stacks,
        2 * _STACKS_SECONDS,
        Needs.DAEMON,
        as_owner=True,
    ),
    ReportPart("metrics.json", "all counts, twice", _metrics, 15.0, Needs.DAEMON),
    ReportPart("mounts.txt", "the mount table", _mounts),
    ReportPart("storage.txt", "index, tiers and source: sizes and room", _storage, as_owner=True),
    ReportPart("logs.txt", "the ends of its logs", _logs, 10.0, as_owner=True, quotes=True),
    ReportPart("journal.txt", "what it said to syslog", _journal, 10.0, quotes=True),
    ReportPart(
        "kernel.txt", "what the kernel logged about it", _kernel, needs=Needs.ROOT, quotes=True
    ),
    ReportPart("environment.txt", "variables, batch system, limits of who made this", _environment),
    ReportPart("doctor.json", "monarchfs doctor --quick", _doctor, 25.0, as_owner=True),
)
"""All parts, in the order in which they are made: stacks and counts before what takes longer."""


def _headed(path: str) -> str:
    return f"==> {path} <==\n{_content(path)}\n"


def _content(path: str) -> str:
    """A small file of the system's; why not, in parentheses, if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_OF_A_FILE)
    except OSError as error:
        return f"({explained(error)})"


def _tail(path: str, most: int) -> str:
    """The end of a regular file that is no link. Raises OSError."""
    with open(regular(os.open(path, os.O_RDONLY | OPEN_FILE)), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most).decode(errors="replace")
