"""Scenarios: what is done to a real mount, its source and its tiers, step by step, and what is
expected of it.

A scenario is text. A line has a step, or several with ``;`` between them, with words as a shell
takes them; `Scenario` and `Dataset` have a method for each step. Indented lines belong to the
``check`` before them, and say what was observed between it and the last one
(`tests.support.observation`).

    file small/{0..9} 3000          # in the source, before or after it was mounted
    mount --freshness immutable
    read                            # all, by a process that compares with the source
    check cold
      source.open 10
    kill worker; read small/3

Each ``check``, and the end, wait until nothing is under way. Then no gauge may be above its rest,
no file be open that no reader holds, no worker have died that was not killed, and the status says
that all is well. No reader may have had an error that the scenario does not name, nor other bytes
than the source's. At the end the whole tree has the source's bytes and attributes, the mount goes
when it is told to, ``fsck --checksum`` finds nothing, and `Bench` nothing that was left behind.
"""

import errno
import inspect
import operator
import os
import random
import re
import shlex
import signal
import subprocess
import textwrap
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from monarchfs.cli.main import main
from monarchfs.config.places import OWNER
from monarchfs.control import client
from monarchfs.control.registration import Registered
from monarchfs.exporter import wire
from monarchfs.hints import find_mount
from monarchfs.metrics.names import Values
from tests.support import observation, surroundings
from tests.support.dataset import Dataset, bytes_of
from tests.support.mounting import Bench, Mount, run, wait_for
from tests.support.observation import state
from tests.support.processes import open_slots, state_of
from tests.support.reading import COMMAND, Reader, digest
from tests.support.timing import Late, Stopwatch

FOREIGN = "foreign"
_CHECK = re.compile(r"(?:^|; *)check ([^;#]+)(?:#.*)?$")
"""What the indented lines after a line belong to."""
SERVING = ("serving", "source not responding")
RELATIONS = {"=": operator.eq, ">=": operator.ge, "<=": operator.le}


def allocated(directory: Path) -> int:
    """What copies take: all files but the one that says whose the directory is."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != OWNER]
    return sum(path.stat().st_blocks * 512 for path in files if path.name != FOREIGN)


class Scenario:
    """Its methods are steps, but for `play`, `workers`, `asked`, `finish_all` and `tear_down`.
    ``options`` are given to each mount, after the scenario's own; ``apart``: each command is a
    process of its own.
    Changing: ``observed``, at each check; ``restarts`` and ``deaths``, how many there were of the
    worker as far as the scenario knows."""

    def __init__(self, work: Bench, *options: str, apart: bool = False) -> None:
        self.observed: dict[str, observation.Observed] = {}
        self._work = work
        self._options = options
        self._apart = apart
        backing = work.path / "backing"
        backing.mkdir()
        self._source = work.faulty_source(backing)
        self._dataset = Dataset(self._source)
        self._mount: Mount | None = None
        self._mounted_with: tuple[tuple[str, ...], list[str]] = ((), [])
        self._changes_before = 0
        self.restarts = self.deaths = 0
        self._tells_opens = True
        self._chance = random.Random(7)
        self._paused = 0
        self._base: observation.Observed = {}
        self._readers: dict[str, Reader] = {}
        self._waited_for: dict[str, list[str]] = {}

    def play(self, text: str) -> None:
        """Carry out the steps of a text without expectations."""
        for step in ";".join(line.partition("#")[0] for line in text.splitlines()).split(";"):
            if step.strip():
                watch = Stopwatch()
                print(step.strip(), end="", flush=True)  # shown where it fails
                self._carry_out(step)
                print(f"  [{watch.elapsed():.1f} s]")

    def _carry_out(self, step: str) -> None:
        name, *words = shlex.split(step)
        method = getattr(self if hasattr(self, name) else self._dataset, name)
        keys = inspect.signature(method).parameters
        named = dict(word.split("=", 1) for word in words if word.partition("=")[0] in keys)
        method(*(word for word in words if word.partition("=")[0] not in keys), **named)

    # -- the mount

    def mount(self, *words: str, tier: str = "1G") -> None:
        """With tiers of these sizes (``3M,1G``); without words as before."""
        assert self._mount is None, "it is mounted"
        if words or not self._mounted_with[1]:
            sizes = enumerate(tier.split(","), 1)
            self._mounted_with = words, [f"{self._tier(str(n))}={size}" for n, size in sizes]
        words, specs = self._mounted_with
        before = self._source.counts()
        options = *words, *self._options
        self._mount = self._work.mount(self._source.path, *options, tiers=specs)
        self._tells_opens = "immutable" not in options
        self.restarts = self.deaths = 0
        self._changes_before = self._dataset.changes
        self._base = {f"source.{name}": n for name, n in before["operations"].items()}
        self._base["source.read_bytes"] = before["read_bytes"]

    def umount(self, within: str = "20") -> None:
        watch = Stopwatch()
        self._command("umount", str(self._mnt.path), "--timeout", within)
        watch.check(2 * float(within), "to unmount")
        self._work.mounts.remove(self._mnt)
        self._mount = None

    def kill(self, who: str, *signals: str, times: str = "1", within: str = "20") -> None:
        """The ``worker``, or the ``standby`` worker, once a signal, with pauses; a worker serves
        afterwards. Or a reader, which is gone within so many seconds."""
        if who in self._readers:
            self._kill_reader(who, float(within))
            return
        for name in (signals or ("SIGKILL",)) * int(times):
            time.sleep(self._chance.uniform(0, 0.3) if int(times) > 1 else 0)
            serving = self._mnt.status()["worker"]
            if who == "standby":
                wait_for(lambda: len(self.workers()) > 1, "the worker that is loaded ahead")
            others = [pid for pid in self.workers() if pid != serving["pid"]]
            for pid in others if who == "standby" else [serving["pid"]]:
                with suppress(ProcessLookupError):
                    os.kill(pid, getattr(signal, name))
            if who != "standby":
                self.restarts += 1
                self.deaths += 1
                wait_for(lambda: self._is_replaced(serving["restarts"]), "another worker")  # noqa: B023

    def stop(self, who: str) -> None:
        assert who == "worker"
        os.kill(self._mnt.worker_pid(), signal.SIGSTOP)
        self.restarts += 1
        self.deaths += 1

    def pause(self) -> None:
        """The same until ``resume``, which comes before that is noticed."""
        self._paused = self._mnt.worker_pid()
        os.kill(self._paused, signal.SIGSTOP)

    def resume(self) -> None:
        try:
            os.kill(self._paused, signal.SIGCONT)
        except ProcessLookupError:
            raise Late("the pause was so long that the supervisor noticed it") from None

    def death(self, *words: str) -> None:
        why = self._mnt.status()["worker"]["last_death"]["why"]
        assert " ".join(words) in why, f"{why}\n{self._work.log()[-5000:]}"

    def command(self, *words: str) -> None:
        """``monarchfs COMMAND MOUNTPOINT ARGUMENTS``."""
        self._command(words[0], str(self._mnt.path), *words[1:])
        self.restarts += words[0] == "restart"

    def order(self, *words: str) -> None:
        """Announce in which order files will be read; ``none``: no more of them."""
        found = find_mount(self._mnt.path)
        assert found is not None
        names = [] if words == ("none",) else self._dataset.names(words)
        with found.connect() as connection:
            joined = b"\0".join(name.encode() for name in names)
            connection.send_list({"command": "order", "stream": "test"}, [joined])

    def drop_caches(self) -> None:
        Path("/proc/sys/vm/drop_caches").write_text("3")

    def until(self, key: str, relation: str, value: str) -> None:
        """A value of the status, or ``source.OP`` since the last check, is so: =, >= or <=."""
        is_so = RELATIONS[relation]
        wait_for(lambda: is_so(self._value(key), bytes_of(value)), f"{key} {relation} {value}")

    def idle(self) -> None:
        self._mnt.wait_idle()

    def state(self, expected: str, *words: str) -> None:
        for name in self._dataset.names(words):
            wait_for(lambda: self._xattr(name, "state") == expected, f"{name}: {expected}")  # noqa: B023

    def reason(self, name: str, *words: str) -> None:
        wait_for(lambda: " ".join(words) in self._xattr(name, "reason"), f"{name}: {words}")

    def _command(self, *arguments: str) -> None:
        """In this process, where that may be: that takes half the time."""
        if not self._apart:
            assert main(arguments) == 0, arguments
        else:
            done = run(*arguments)
            assert done.returncode == 0, done.stdout + done.stderr

    @property
    def _mnt(self) -> Mount:
        assert self._mount is not None, "it is not mounted"
        return self._mount

    @property
    def _daemon(self) -> Registered:
        found = find_mount(self._mnt.path)
        assert found is not None
        return found.daemon

    def _metrics(self) -> Values:
        return wire.decode(client.request(self._daemon, {"command": "metrics"}, 30))

    def workers(self) -> list[int]:
        """The one that serves or starts, and the one that waits."""
        pid = self._daemon.entry.supervisor_pid
        found = []
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with suppress(OSError):
                if b"--bootstrap-fd" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found

    def asked(self) -> dict[str, Any]:
        return client.request(self._daemon, {"command": "status"}, 5)

    def _is_replaced(self, restarts: int) -> bool:
        now = self._mnt.status()
        return now["worker"]["restarts"] > restarts and now["state"] in SERVING

    def _value(self, key: str) -> int:
        part, _, name = key.partition(".")
        if part == "source":
            counts = self._source.counts()
            now: int = {"read_bytes": counts["read_bytes"], **counts["operations"]}.get(name, 0)
            return now - self._base.get(key, 0)
        value: Any = self._mnt.status()
        for word in key.split("."):
            value = value[int(word)] if word.isdecimal() else value[word]
        return int(value)

    def _xattr(self, name: str, what: str) -> str:
        return os.getxattr(self._mnt.path / name, f"user.monarchfs.{what}").decode()

    # -- tiers, and what lies beside them

    def small_disk(self, number: str, size: str) -> None:
        """The tier with this number is to be a file system of that size."""
        self._tier(number).mkdir()
        surroundings.mount_tmpfs(self._tier(number), f"size={bytes_of(size)},mode=755")

    def foreign(self, number: str, size: str) -> None:
        """Somebody else's file takes room in a tier's file system."""
        (self._tier(number) / FOREIGN).write_bytes(bytes(bytes_of(size)))

    def _tier(self, number: str) -> Path:
        return self._work.path / f"tier{number}"

    # -- readers

    def read(
        self,
        *words: str,
        by: str = "1",
        way: str = "whole",
        error: str = "",
        old: str = "",
        within: str = "inf",
    ) -> None:
        """So many processes read all of these files, each in an order of its own; ``way``: whole,
        again (from the page cache, if it is there), mapped, or direct."""
        watch = Stopwatch()
        for number in range(int(by)):
            self.begin(f"reader{number}", *words, way=way, seed=str(number))
        for number in range(int(by)):
            self.finish(f"reader{number}", error, old)
        watch.check(float(within), "to read")

    def begin(self, who: str, *words: str, way: str = "whole", seed: str = "0") -> None:
        """The same by a process that is not waited for before ``finish``."""
        self._tell(who, "read", self._root, self._dataset.names(words), way, int(seed))

    def begin_at_once(self, who: str, *words: str, way: str = "whole") -> None:
        self._tell(who, "read at once", self._root, self._dataset.names(words), way)

    def begin_open(self, who: str, *words: str, way: str = "whole") -> None:
        """A reader opens files, and keeps them open; ``mapped``: with a map through which it reads
        them from then on, pages that the kernel has as well."""
        names = self._dataset.names(words)
        self._tell(who, "open", self._root, names, way)
        self._readers[who].held += names

    def begin_list(self, who: str, name: str) -> None:
        self._reader(who).tell("list", f"{self._root}/{name}")

    def finish(self, who: str, error: str = "", old: str = "") -> None:
        """The reader has ended what it began, and has read what the source has now; with ``old=1``
        what it had before the last change. Or it has had an error (one of ``E1|E2``; or ``none``
        is among them)."""
        names = self._waited_for.pop(who)
        try:
            found = self._readers[who].answer()
        except OSError as exc:
            code = errno.errorcode[exc.errno or 0]
            assert code in error.split("|"), f"{who} got {code} of {names[:3]}"
            return
        assert not error or "none" in error.split("|"), f"{who} did not get {error}"
        for name in names if found is not None else ():
            wanted = self._dataset.contents(name)[-2 if old else -1]
            assert found[name] == digest(wanted), f"{name}: wrong bytes, or {found[name]}"

    def open(self, who: str, *words: str, way: str = "whole") -> None:
        self.begin_open(who, *words, way=way)
        self.finish(who)

    def held(self, who: str, *words: str, error: str = "", old: str = "") -> None:
        """A reader reads what it has open, not from the page cache."""
        names = self._dataset.names(words) if words else list(self._readers[who].held)
        self._waited_for[who] = names
        self._readers[who].tell("held", names)
        self.finish(who, error, old)

    def follows(self, who: str) -> None:
        """What a reader has open comes to be what the source has now, and as large."""
        names = self._readers[who].held
        newest = [self._dataset.versions[name][-1] for name in names]
        sums = {name: digest(data) for name, data in zip(names, newest, strict=True)}
        sizes = [len(data) for data in newest]
        wait_for(lambda: self._readers[who].ask("held sizes", names) == sizes, f"{who}: the size")
        wait_for(lambda: self._readers[who].ask("held", names) == sums, f"{who}: the bytes")

    def close(self, who: str, *words: str) -> None:
        reader = self._readers[who]
        names = self._dataset.names(words) if words else list(reader.held)
        reader.ask("close", names)
        reader.held = [name for name in reader.held if name not in names]

    def signal(self, who: str, state: str = "") -> None:
        """A signal that a reader heeds; it is in this state (proc(5)) afterwards."""
        process = self._readers[who].process
        process.send_signal(signal.SIGUSR1)
        if state:
            wait_for(lambda: state_of(process.pid) == state, f"{who}: {state}")

    def part(self, name: str, offset: str, size: str, way: str = "whole") -> None:
        at, count = bytes_of(offset), bytes_of(size)
        found = self._reader("reader0").ask("part", self._root, name, at, count, way)
        wanted = self._dataset.versions[name][-1][at : at + count]
        assert found == digest(wanted), f"{name}: wrong bytes"

    def same(self, *words: str) -> None:
        """Files come to be read as they are in the source now; what it has no more is missing."""
        for name in self._dataset.names(words):
            wait_for(lambda: self._is_same(name), f"{name} to be the source's")  # noqa: B023

    def loop(self, who: str, *words: str) -> None:
        """A process reads here and there until ``end``, and compares."""
        names = self._dataset.names(words)
        seed = zlib.crc32(who.encode())
        truth = str(self._source.backing)
        assert self._reader(who).ask("loop", self._root, names, truth, seed) == "reading"

    def end(self, who: str, within: str = "inf") -> None:
        """No round of its took more than so many seconds."""
        self._readers[who].tell("end")
        rounds, worst = self._readers[who].answer()
        self._readers[who].answer()
        print(f" {rounds} rounds, the worst {worst:.2f} s", end="")
        assert rounds >= 10
        if worst >= float(within):
            raise Late(f"{who} took {worst:.1f} s for a round, the limit is {within} s")

    def list(self, *words: str) -> None:
        """Directories have the source's names."""
        for name in words or (".",):
            found = self._reader("reader0").ask("list", f"{self._root}/{name}")
            assert found == self._listing(name), name

    def listed(self, *words: str) -> None:
        for name in words or (".",):
            ask = partial(self._reader("reader0").ask, "list", f"{self._root}/{name}")
            wait_for(lambda: ask() == self._listing(name), f"the names of {name}")  # noqa: B023

    def list_some(self, who: str, name: str = ".") -> None:
        """A reader gets the first name of a directory; ``list_rest``: then all names, once each."""
        self._reader(who).ask("list some", f"{self._root}/{name}")

    def list_rest(self, who: str, name: str = ".") -> None:
        assert self._reader(who).ask("list rest", f"{self._root}/{name}") == self._listing(name)

    def _listing(self, name: str) -> Sequence[str]:
        return sorted(os.listdir(self._source.backing / name))

    def size(self, *words: str) -> None:
        for name in self._dataset.names(words):
            found = self._reader("reader0").ask("stat", f"{self._root}/{name}")
            assert found == len(self._dataset.versions[name][-1]), name

    def missing(self, *words: str, error: str = "ENOENT") -> None:
        for name in self._dataset.names(words):
            try:
                found = self._reader("reader0").ask("stat", f"{self._root}/{name}")
            except OSError as exc:
                found = errno.errorcode[exc.errno or 0]
            assert found == error, f"{name}: {found}"

    @property
    def _root(self) -> str:
        return str(self._mnt.path)

    def _reader(self, name: str) -> Reader:
        if name not in self._readers:
            self._readers[name] = Reader(COMMAND)
        return self._readers[name]

    def _tell(self, who: str, call: str, root: str, names: Sequence[str], *more: object) -> None:
        assert who not in self._waited_for
        self._waited_for[who] = list(names)
        self._reader(who).tell(call, root, names, *more)

    def _kill_reader(self, who: str, seconds: float) -> None:
        process, watch = self._readers[who].process, Stopwatch()
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        watch.check(seconds, f"{who} was killed")
        self._readers.pop(who).close()
        self._waited_for.pop(who, None)

    def _is_same(self, name: str) -> bool:
        is_there = name in self._dataset.versions
        try:
            found = self._reader("reader0").ask("read", self._root, [name], "whole", 0)[name]
        except FileNotFoundError:
            return not is_there
        except OSError as exc:
            if exc.errno != errno.ESTALE:
                raise
            return False
        versions = [digest(data) for data in self._dataset.contents(name)]
        assert found in versions, f"{name}: bytes that it never had"
        return is_there and found == versions[-1]

    # -- what is always so

    def check(self, *label: str) -> None:
        """Wait until nothing is under way, and note what happened since the last check."""
        self._rest()
        now = observation.counters(self._source.counts(), self._mnt.status(), self._metrics())
        found = {key: value - self._base.get(key, 0) for key, value in now.items()}
        found |= state(self._mnt.status())
        self._base = now
        self.observed[" ".join(label)] = {k: v for k, v in sorted(found.items()) if v}

    def _rest(self) -> None:
        assert not self._waited_for, f"nobody waited for {list(self._waited_for)}"
        self._mnt.wait_idle()
        left: dict[str, float] = {}

        def at_rest() -> bool:
            left.clear()
            left.update(observation.under_way(self._metrics()))
            return not left

        try:
            wait_for(at_rest, "all gauges to be at rest")
        except AssertionError as late:
            raise type(late)(f"{late}, which are {left}") from None
        held = sum(len(reader.held) for reader in self._readers.values() if self._tells_opens)
        wait_for(lambda: open_slots(self._mnt) == held, f"{held} files to be open")
        report = self._mnt.status()
        worker = report["worker"]
        assert report["state"] == "serving", report["state"]
        assert worker["restarts"] == self.restarts, worker
        assert (worker["error"], worker["not_understood"]) == (None, 0)
        assert (worker["last_death"] is None) == (self.deaths == 0), worker["last_death"]
        for tier in report["tiers"]:
            assert tier["out_of_service"] is None, tier
            assert allocated(Path(tier["path"])) <= tier["capacity_bytes"], tier
            assert tier["used_bytes"] <= tier["peak_used_bytes"] <= tier["capacity_bytes"], tier
        assert report["index"]["frozen"] is None
        log = self._work.log()
        assert "Traceback" not in log, log

    def finish_all(self) -> None:
        assert not self._waited_for, f"nobody waited for {list(self._waited_for)}"
        for name in list(self._readers):
            self._readers.pop(name).close()
        if self._mount is None:
            return
        self._dataset.heal()
        changed = self._dataset.changes > self._changes_before
        if changed and "immutable" in (*self._mounted_with[0], *self._options):
            self.command("refresh")
        found: list[str] = []

        def equal() -> bool:
            reader = self._reader("compares")
            found[:] = reader.ask("differences", str(self._source.path), self._root)
            return not found

        if not equal():
            assert changed, found
            wait_for(equal, f"the tree to be the source's: {found}")
        self._rest()
        self.umount()
        self._command("fsck", f"{self._work.path}/state", "--checksum")

    def tear_down(self) -> None:
        """The same of one that did not; whatever happened, nobody waits, and no disk is left."""
        if self._source.process.poll() is None:
            self._source.faults()
        for reader in self._readers.values():
            reader.close()
        for path in self._work.path.glob("tier*"):
            if path.is_mount():
                if self._mount is not None:
                    self.umount()
                subprocess.run(["umount", str(path)], check=True)


class Script:
    def __init__(self, text: str) -> None:
        self.lines: list[str] = []
        self.expected: dict[str, list[observation.Expected]] = {}
        label = ""
        for line in textwrap.dedent(text).strip("\n").splitlines():
            if line.startswith(" "):
                self.expected[label].append(observation.Expected.parse(line))
                continue
            self.lines.append(line)
            if found := _CHECK.search(line):
                label = found[1].strip()
                assert label not in self.expected, f"two checks are called {label}"
                self.expected[label] = []

    def text(self) -> str:
        found = []
        for line in self.lines:
            found.append(line)
            if label := _CHECK.search(line):
                found += [f"  {expected.text()}" for expected in self.expected[label[1].strip()]]
        return "\n".join(found) + "\n"

    def record(self, observed: Mapping[str, observation.Observed]) -> None:
        for label, lines in self.expected.items():
            self.expected[label] = observation.recorded(lines, observed[label])


def play(work: Bench, text: str, *options: str) -> dict[str, observation.Observed]:
    """Carry out a scenario, and see that what its checks name was observed; all that was."""
    script = Script(text)
    observed = perform(work, script, *options)
    differing = differences(script, observed, complete=False)
    assert not differing, "\n".join(differing)
    return observed


def perform(work: Bench, script: Script, *options: str) -> dict[str, observation.Observed]:
    with playing(work, *options) as scenario:
        for line in script.lines:
            scenario.play(line)
    return scenario.observed


@contextmanager
def playing(work: Bench, *options: str, apart: bool = False) -> Iterator[Scenario]:
    """A scenario that goes on as its caller says; at the end all that is always so is checked."""
    scenario = Scenario(work, *options, apart=apart)
    try:
        yield scenario
        scenario.finish_all()
    finally:
        scenario.tear_down()


def differences(
    script: Script, observed: Mapping[str, observation.Observed], *, complete: bool
) -> list[str]:
    return [
        f"{label}: {words}"
        for label, lines in script.expected.items()
        for words in observation.unmet(lines, observed[label], complete=complete)
    ]
