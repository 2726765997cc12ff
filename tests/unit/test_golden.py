"""What commands print, as text, with their exit code: a file of tests/golden for each command.

``pytest tests/unit/test_golden.py --update-golden`` writes the files anew: review the difference.
Times that pass are masked here; everything else is fixed by the daemon that answers.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from monarchfs.cli import cache as cache_module
from monarchfs.cli import doctor as doctor_module
from monarchfs.cli import gc as gc_module
from monarchfs.cli.main import main
from monarchfs.cli.plan import combine, lines, shared
from monarchfs.cli.rates import History, MountView
from monarchfs.cli.screen import draw, draw_list
from monarchfs.cli.top import Usage, _Shown
from monarchfs.cli.watch import Moment
from monarchfs.cli.watch import lines as watch_lines
from monarchfs.config import User
from monarchfs.config.model import ShareMode
from monarchfs.control.messages import encode_error, encode_progress, encode_result
from monarchfs.doctor.checks import ok, problem, warning
from monarchfs.insight.live import LiveRates
from monarchfs.insight.recording import AnsweredBy
from monarchfs.inventory.discovery import OTHER_TIER, UNCLAIMED, LocalCache, TierDirectory
from monarchfs.inventory.trees import Size
from monarchfs.plan.fitting import PlannedTier
from monarchfs.plan.times import SourceSpeed, TierSpeed
from monarchfs.slurm.leftovers import Leftover
from monarchfs.types import Space
from tests.support.fake_daemon import Daemon, changed, healthy, only_these, states
from tests.support.golden import Golden

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

CLOCK = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
ALSO_REQUIRED = "required: MOUNTPOINT, PATH"
"""Python 3.13 names only the first."""


def shortened(line: str) -> str:
    return line if len(line) < 4500 else f"{line[:80]}... ({len(line)} letters)"


def unfolded(out: str) -> list[str]:
    """Lines; of an object that is printed on one, a line for each of its keys."""
    if not out.startswith("{"):
        return out.splitlines()
    assert out.count("\n") == 1
    return ["{", *(f"  {key}: {json.dumps(value)}" for key, value in json.loads(out).items()), "}"]


class Shown:
    """What commands print, one after the other."""

    def __init__(self, capsys: pytest.CaptureFixture[str], daemon: Daemon) -> None:
        self.daemon = daemon
        self.hidden: dict[str, str] = {}
        self._capsys = capsys
        self.parts: list[str] = []

    def run(self, line: str | list[str], state: str = "", **replies: bytes) -> None:
        """A command line in this process, and what it asked. ``replies`` by the command asked."""
        self.daemon.answer, self.daemon.requests = replies, []
        words = shlex.split(line) if isinstance(line, str) else line
        code = main(words)
        captured = self._capsys.readouterr()
        assert all(text.isprintable() for text in (captured.out + captured.err).splitlines())
        self.put(
            f"$ monarchfs {line if isinstance(line, str) else ascii(words)[1:-1]}"
            + (f"    # {state}" if state else ""),
            *unfolded(captured.out),
            *(f"stderr: {line}" for line in captured.err.splitlines()),
            *(f"asked: {json.dumps(request)}" for request in self.daemon.requests),
            *([f"exit code {code}"] if code else []),
        )

    def put(self, *lines: str) -> None:
        """One block of text. What is in ``hidden``, and the time, is told in other words."""
        text = CLOCK.sub("<now>", "\n".join(lines))
        text = text.replace(ALSO_REQUIRED, ALSO_REQUIRED.removesuffix(", PATH"))
        for word, other in self.hidden.items():
            text = text.replace(word, other)
        self.parts.append("\n".join(map(shortened, text.splitlines())) + "\n")

    def __str__(self) -> str:
        return "\n".join(self.parts)


@pytest.fixture
def shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Shown]:
    for name in ("COLUMNS", "NO_COLOR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    (tmp_path / "run").mkdir()
    with only_these(tmp_path / "run", monkeypatch) as start:
        yield Shown(capsys, start({}))
        monkeypatch.undo()
        time.tzset()


def test_status(shown: Shown, golden: Golden) -> None:
    for state, report in states().items():
        shown.run("status /mnt/photos", state, status=encode_result(report))
    shown.run("status /mnt/photos --json", status=encode_result(healthy()))
    shown.run("status", status=encode_result(healthy()))
    shown.run("status", "odd names", status=encode_result(states()["odd names"]))
    shown.run("status --json", "it refuses", status=encode_error("it is not ready"))
    shown.run("status /mnt/photos", "it refuses", status=encode_error("it is not ready"))
    golden("status.txt", str(shown))


# The live screen, and its lines.


def busy() -> MountView:
    """The last of five looks, a second apart, at a mount that copies."""
    history, well = History(), states()["full"]
    for second in range(5):
        report = changed(
            well,
            served={"local_opens": 10 + 9 * second, "source_opens": 10 + second},
            source_io={"prefetch_read_bytes": second << 20, "read_bytes": second << 20},
            prefetch={"queued": 40, "active": 10, "left_bytes": 5 << 20, "completed": 5 * second},
            requests={"waiting": 3},
            uptime_seconds=100.0 + second,
        )
        view = history.add(second, report)
    return view


def on_screen(drawn: Any, width: int, encoding: str = "utf-8") -> str:
    binary = io.BytesIO()
    file = io.TextIOWrapper(binary, encoding=encoding)
    Console(file=file, width=width, no_color=True, force_terminal=False).print(drawn)
    file.flush()
    text = binary.getvalue().decode(encoding)
    assert all(len(line) <= width for line in text.splitlines())
    assert "\x1b" not in text
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_the_screen(shown: Shown, golden: Golden) -> None:
    every = states()
    for width in (40, 60, 80, 120):
        shown.put(f"# {width} columns", on_screen(draw(busy(), footer="q quits"), width))
    shown.put("# ASCII", on_screen(draw(busy()), 80, "ascii"))
    for state in ("healthy", "worker not answering", "safe mode", "odd names", "nothing is said"):
        shown.put(f"# {state}", on_screen(draw(History().add(0.0, every[state])), 80))
    gone = {"source": "/s", "mountpoint": "/mnt/gone", "state": "dead"}
    for width in (60, 120):
        shown.put(f"# the list, {width}", on_screen(draw_list([every["odd names"], gone]), width))
    shown.put("# no mounts", on_screen(draw_list([]), 80))
    golden("status-screen.txt", str(shown))


def test_the_lines_of_status_watch(shown: Shown, golden: Golden) -> None:
    well, history = healthy(), History()
    later = changed(well, uptime_seconds=3702.0, served={"local_opens": 13, "source_opens": 11})
    gone = {"mountpoint": "/mnt/photos", "state": "silent", "error": "no\nanswer"}
    for at, seen in enumerate([well, later, gone, [well, gone], []]):
        shown.put(*watch_lines(Moment(2.0 * at, seen), history))
    golden("status-watch.txt", str(shown))


def test_top(shown: Shown, golden: Golden) -> None:
    read = LiveRates(
        1234.5, 12.0, 0.4, 5e8, 0.62, 0.62, {AnsweredBy.TIER: 0.75, AnsweredBy.PEER: 0.25}
    )
    idle = LiveRates(0.0, 0.0, 0.0, 0.0, 0.04, 0.04, {AnsweredBy.WAITED: 1.0})
    feeds = {
        "both hidden": SimpleNamespace(connected=True, hidden=["reads", "opens"]),
        "no worker": SimpleNamespace(connected=False, hidden=["reads"]),
    }
    processes = [(71, "python\x1b[2J", read), (0, "(kernel)", idle)]
    several = Usage(0.0, 2.0, 8, 3, [*processes, *((100 + n, "cat", idle) for n in range(25))])
    nothing = Usage(0.0, 2.0, 1, 0, [])
    directories = Usage(0.0, 2.0, 1, 0, [("train/a\nb", "", read), (".", "", idle)])
    for name, feed in feeds.items():
        by_process, by_directory = (
            _Shown("/mnt/photos", feed, who)  # type: ignore[arg-type]
            for who in ("process", "directory")
        )
        shown.put(f"# {name}", *by_process.lines(Moment(0.0, nothing)))
        if feed.connected:
            shown.put("# processes", *by_process.lines(Moment(0.0, several)))
            shown.put("# directories", *by_directory.lines(Moment(0.0, directories)))
            drawn = by_process.draw(Moment(0.0, several), 10, "q quits")
            shown.put("# a screen of 10 lines", on_screen(drawn, 100))
            told = json.dumps(by_directory.to_json(directories))
            shown.put("# as an object", *unfolded(told + "\n"))
    golden("top.txt", str(shown))


# Questions to a mount about paths.


def result(**values: Any) -> bytes:
    return encode_result(values)


def test_refresh_pin_unpin_evict(shown: Shown, golden: Golden) -> None:
    refreshed = result(checked=9, changed=2, appeared=1, gone=0)
    shown.run("refresh /mnt/photos", refresh=encode_progress({"checked": 1}) * 2 + refreshed)
    shown.run("refresh /mnt/photos --json", refresh=refreshed)
    failed = result(checked=4, failed=2, error="a: Input/output error")
    shown.run("refresh /mnt/photos", "some fail", refresh=failed)
    shown.run("refresh /mnt/photos --json", "some fail", refresh=failed)
    shown.run("refresh /mnt/photos", "refused", refresh=encode_error("the source does not answer"))
    shown.run("refresh /mnt/photos", "no end", refresh=b"junk\n")
    shown.run("pin /mnt/photos a", pin=result(files=1, bytes=1536))
    unseen = result(files=0, bytes=0, kept=0, not_listed=2, not_looked_at=1)
    shown.run("pin /mnt/photos a", pin=unseen)
    shown.run("pin /mnt/photos")
    shown.run("unpin /mnt/photos a", unpin=result(files=0, bytes=0, not_listed=1))
    shown.run("unpin /mnt/photos a", unpin=result(files=0, bytes=0, kept=1))
    shown.run("evict /mnt/photos", evict=result(files=2, bytes=5 << 20))
    shown.run("evict /mnt/photos/a /mnt/photos/b", evict=result(files=2, bytes=0, kept=3))
    shown.run("evict /mnt/other")
    shown.run("evict /mnt/photos ../x")
    shown.run("evict /mnt/photos/a /mnt/b")
    golden("paths.txt", str(shown))


FILE = {
    "path": "f",
    "type": "file",
    "state": "resident",
    "tier": "/scratch",
    "reason": None,
    "since_unix_seconds": 1.7e9,
    "since_seconds_ago": 400.0,
    "size_bytes": 100_000,
    "allocated_bytes": 102_400,
    "mtime_unix_seconds": 0.0,
    "pinned": False,
    "freshness": "ttl",
    "checked_seconds_ago": 3.2,
    "source_responding": True,
}
DIRECTORY = {
    **{"path": "", "type": "directory", "files": 1200, "bytes": 2 << 20, "resident": 3},
    **{"resident_bytes": 1 << 20, "not_listed": 5, "not_looked_at": 1000, "pinned": False},
    "causes": {"not opened yet": 1195, "no room": 2},
}
ABSENT = {"path": "nope", "error": "/nope: no such file or directory in the mount"}


def test_why(shown: Shown, golden: Golden) -> None:
    why = "no room: it needs 64K, 24K short when it was wanted"
    remote = {**FILE, "state": "remote", "tier": None, "reason": why, "since_unix_seconds": None}
    part = {**FILE, "path": "x\udcff", "state": "partial", "reason": "no room", "pinned": True}
    part |= {"since_unix_seconds": 1e30, "source_responding": False, "renumbered_files": 12}
    fifo = {"path": "fifo", "type": "other", "state": "remote", "reason": "it is no regular file"}
    shown.run("why /mnt/photos/f", why=result(paths=[FILE]))
    shown.run("why /mnt/photos/f --json", why=result(paths=[FILE]))
    shown.run("why /mnt/photos/f /mnt/photos/g", "no room", why=result(paths=[remote, part]))
    shown.run("why /mnt/photos", why=result(paths=[DIRECTORY]))
    shown.run("why /mnt/photos/fifo", why=result(paths=[fifo]))
    shown.run("why /mnt/photos/nope /mnt/photos/f", why=result(paths=[ABSENT, ABSENT, FILE]))
    shown.run("why /mnt/photos/nope --json", why=result(paths=[ABSENT]))
    shown.run("why /etc/passwd")
    golden("why.txt", str(shown))


def test_warm(shown: Shown, golden: Golden) -> None:
    all_there = {"files": 1200, "bytes": 5 << 30, "resident": 1200, "resident_bytes": 5 << 30}
    copied = {**all_there, "copied": 1, "copied_bytes": 9}
    short = {
        **{**all_there, "resident": 1000, "resident_bytes": 4 << 30, "partial": 1, "remote": 199},
        **{"refused": 199, "refused_bytes": 1 << 30, "short_bytes": 1 << 29},
        **{"archived": 1, "archived_bytes": 512},
    }
    failed = {**short, "failed": 1, "error": "d/f: copying failed: Permission denied"}
    names = {"files": 2, "bytes": 5, "directories": 1}
    shown.run("warm /mnt/photos", warm=result())
    shown.run("warm /mnt/photos a", warm=result())
    shown.run("warm /mnt/photos a b", warm=result())
    shown.run("warm /mnt/photos --json", warm=result())
    shown.run("warm /mnt/photos --wait", warm=result(**copied))
    shown.run("warm /mnt/photos --wait", "no room", warm=result(**short))
    shown.run("warm /mnt/photos --wait", "one fails", warm=result(**failed))
    shown.run("warm /mnt/photos --wait --json", "one fails", warm=result(**failed))
    shown.run("warm /mnt/photos --check", warm=result(**all_there))
    shown.run("warm /mnt/photos --check", "no room", warm=result(**short))
    shown.run("warm /mnt/photos --metadata --wait", warm=result(**names))
    shown.run("warm /mnt/photos --check --wait")
    golden("warm.txt", str(shown))


def test_peers_order_weigh_restart(shown: Shown, golden: Golden, tmp_path: Path) -> None:
    peer = {
        **{"name": "b", "address": "b", "port": 9470, "error": None, "avoided": False},
        **{"answered": True, "answer_age_seconds": 3.0, "has_files": 1234, "failed": 1, "wrong": 2},
        **{"read_files": 3, "read_bytes": 1536, "read_seconds": 0.006},
    }
    new = {**peer, "answered": False, "read_files": 0, "address": "fd00::1"}
    known = {
        **{"name": "a", "address": "10.0.0.1", "port": 9470},
        "peers": [peer, new, {**new, "error": "status\n403"}, {**new, "avoided": True}],
    }
    for server in ({"pid": 71}, None):
        status = result(peer_server=server)
        shown.run("peers /mnt/photos", peers=result(**known), status=status)
    shown.run("peers /mnt/photos --json", peers=result(**known), status=status)
    shown.run("peers /mnt/photos add c", change_peers=result(nodes=["b:9470", "c:9470"]))
    shown.run("peers /mnt/photos add")
    ready = encode_progress({"ready": True})
    (tmp_path / "list").write_text("a\n/mnt/photos/b\n")
    place = str(tmp_path)
    shown.hidden[place] = "<dir>"
    for files in (1, 2000):
        shown.run(f"order /mnt/photos {place}/list", order=ready + result(files=files))
    shown.run(f"order /mnt/photos {place}/list --json", order=ready + result(files=2))
    shown.run(f"order /mnt/photos {place}/list --inodes", order=ready)
    shown.run("order /mnt/photos - -")
    (tmp_path / "weights").write_text("1.5\ta\n2\t/mnt/photos/b\n")
    weighed = {"files": 1, "unknown": 0, "first_unknown": ""}
    unknown = {"files": 1, "unknown": 2, "first_unknown": "b"}
    for answer in (weighed, unknown):
        shown.run(f"weigh /mnt/photos {place}/weights", weigh=result(**answer))
    shown.run(f"weigh /mnt/photos {place}/weights --json", weigh=result(**unknown))
    for wrong in ("1", "x\ta", "nan\ta"):
        (tmp_path / "weights").write_text(wrong)
        shown.run(f"weigh /mnt/photos {place}/weights")
    shown.run("restart /mnt/photos --json", restart=result(pid=8, restarts=1))
    shown.run("restart /mnt/photos", restart=encode_error("the new worker did not serve in time"))
    golden("peers-order-weigh-restart.txt", str(shown))


# This machine.


def test_doctor(shown: Shown, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = ok("kernel", "6.18", "", release="6.18")
    slow = warning("tier", "/scratch\n: 40 MB/s", "name another disk", path="/scratch")
    bad = problem("mount", "/dev/fuse is missing", "modprobe fuse")
    advice = ok("memory", "enough", "more would not hurt")
    monkeypatch.setattr(doctor_module, "configuration", lambda *_: ok("configuration", "defaults"))
    for checks in ([fine, advice], [fine, slow, slow], [slow, bad]):
        monkeypatch.setattr(doctor_module, "examine", lambda *_, checks=checks: iter(checks))
        shown.run("doctor /lustre/photos --quick")
        shown.run("doctor /lustre/photos --quick --json")
    golden("doctor.txt", str(shown))


def test_cache_and_gc(shown: Shown, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    now, me = time.time(), User("root", 0, 0)

    def directory(name: str, size: Size, **more: Any) -> TierDirectory:
        return TierDirectory("/scratch", f"/scratch/{name}", size, False, now, **more)

    used = directory("a", Size(5 << 30, 1200))
    caches = [
        LocalCache("/lustre/a", me, "/state/a", (used,), True, now - 90_000, "/mnt/a"),
        LocalCache(
            *("/lustre/b\x1b", User("ann", 1000, 1000), "/state/b"),
            (
                directory("b", Size(9000, 1, whole=False)),
                directory("c", Size(100, 2), stranded=OTHER_TIER),
            ),
            *(False, now - 500_000),
        ),
        LocalCache(
            *("unknown", me, "", (directory("d", Size(), stranded=UNCLAIMED, former=True),)),
            *(False, now - 500_000),
            claimed=False,
        ),
    ]
    inventory = SimpleNamespace(caches=lambda: caches, notes=["the home of bob hangs"])
    monkeypatch.setattr(cache_module, "take_inventory", lambda *_, **__: inventory)
    monkeypatch.setattr(cache_module, "read_site", lambda _: None)
    shown.run("cache list")
    shown.run("cache show /lustre/a /scratch/c")
    shown.run("cache show /nowhere")
    shown.run("cache remove /lustre/a --yes")
    shown.run("cache remove /state/b --dry-run")
    shown.run("cache prune --dry-run")
    shown.run("cache prune --dry-run --older-than 2d")
    shown.run("cache prune --dry-run --older-than 2d --json")
    caches.clear()
    for line in ("list", "list x", "show", "remove", "prune --dry-run", "list --older-than 1d"):
        shown.run(f"cache {line}")

    sweeper = SimpleNamespace(
        remove=False,
        found=[],
        notes=[],
        **dict.fromkeys(("registrations", "sockets", "mounts"), id),
    )
    monkeypatch.setattr(gc_module, "Sweeper", lambda **_: sweeper)
    monkeypatch.setattr(gc_module, "read_site", lambda _: None)
    monkeypatch.setattr(gc_module, "take_inventory", lambda *_, **__: inventory)
    shown.run("gc --dry-run")
    sweeper.found = [
        Leftover("socket", "/run/a\n", "nobody listens"),
        Leftover("mount", "/mnt/a", "its daemon is dead", removed=True),
        Leftover("cache", "/c", "its user is gone", error="Permission denied"),
    ]
    sweeper.notes = ["jobs were not looked at: no squeue"]
    shown.run("gc")
    shown.run("gc --json")
    golden("cache-gc.txt", re.sub(r'("last_used_unix_seconds": )[0-9.]+', r"\1<then>", str(shown)))


def test_plan(shown: Shown, golden: Golden) -> None:
    def amount(files: int, size: int) -> dict[str, int]:
        return {"files": files, "bytes": size}

    space = Space(200 * GIB, 100 * GIB, 1000, 1000)
    fast = PlannedTier("/dev/shm", 2 * GIB, space, 2 * GIB, 2 * GIB, "")
    disk = PlannedTier("/t\x1b", 202 * GIB, space, 202 * GIB, 40 * GIB, "its file system")
    sizes = [{"up_to_bytes": KIB, "files": 5}, {"up_to_bytes": MIB, "files": 0}]
    sizes += [{"up_to_bytes": GIB, "files": 100_007}]
    whole = {
        **{"complete": True, **amount(100_012, 53 * GIB), "directories": 7, "others": 0},
        **{"unreadable": 0, "hard_links": 0, "sizes": sizes},
        "cached": [amount(0, 0), amount(1, 5 * GIB)],
        "placed": [amount(1000, 2 * GIB), amount(90_000, 38 * GIB)],
        "whole": amount(91_000, 39 * GIB),
        "partial": amount(1, GIB),
        "remote": amount(9010, 8 * GIB),
    }
    fits = {**whole, **amount(91_001, 45 * GIB), "whole": amount(91_000, 40 * GIB)}
    fits |= {"partial": amount(0, 0), "remote": amount(0, 0)}
    hurried = {**whole, "complete": False, "unreadable": 2}
    rates = SourceSpeed(100e6, 0.001, 4), [TierSpeed(5e9, 9e9), TierSpeed(1e9, 2e9)]
    quick = SourceSpeed(9e9, 0.00001, 4), rates[1]
    for name, report, measured in (
        ("too large", whole, rates),
        ("fits", fits, rates),
        ("a quick source", fits, quick),
        ("not all was seen", hurried, None),
    ):
        plan = combine("/lustre/p\n", report, [fast, disk], measured, 10)
        shown.put(f"# {name}", *lines(plan))
        for share in ShareMode if name == "too large" else ():
            plan["sharing"] = shared(plan, 2, share)
            shown.put(f"# {name}, of 2 nodes: {share.value}", *lines(plan))
    told = json.dumps(combine("/s", whole, [fast, disk], rates, 10))
    shown.put("# as an object", *unfolded(told + "\n"))
    golden("plan.txt", str(shown))


def test_help(shown: Shown, golden: Golden) -> None:
    shown.run("")
    for line in ("muont a b", "help unmont", "mount a b --teir t=1G", "status --jsno"):
        shown.run(line)
    golden("help.txt", str(shown))


# Wrong usage, and names that are no mount. It is found out before anything is done.

ODD_PATHS = [
    *("nosuch", "/proc/self/fd/0", "..", "~/x", "file", "file/x", "dir", "loop", "dangling"),
    *("fifo", "x" * 5000, "a/" * 3000, "two\nlines", "\x1b[2J", "\r\x08", "\udcff", "\u202e", " "),
]
TIMES = ("soon", "5x", "", " ", "0x9", "-1", "nan", "inf", "1e400", "0", "1e300")

WRONG: dict[str, list[list[str]]] = {
    "status": [
        *([word] for word in ("", "a\0b", "--yaml", "--js", "--json=yes", "--jsno")),
        *(["--watch", time] for time in (*TIMES, "100000", "0.01")),
        *(["--watch=-1"], ["--watch="], ["dir", "--watch", "soon"], ["dir", "dir"]),
        *(["dir", "--watch", "2", "--watch", "x"], ["--watch", "dir"], ["--watch", "./5"]),
        *(["--watch", "2", "dir"], ["--watch", "2", "3"], ["--watch", "--json", "dir"]),
        *([path] for path in ("/", "/proc", "/dev/null", *ODD_PATHS)),
    ],
    "umount": [
        *(
            [],
            [""],
            ["a\0b"],
            ["dir", "dir"],
            ["--force", "dir"],
            ["dir", "--time", "3"],
            ["/proc"],
        ),
        *(["dir", "--timeout"], ["nosuch", "--timeout", "0"]),
        *(["dir", "--timeout", time] for time in TIMES),
        *([path] for path in ODD_PATHS),
    ],
    "mount": [
        *([], ["src"], ["", "mnt"]),
        *(
            ["src", "mnt", *options.split(" ")]
            for options in (
                *(
                    "--teir t=1G",
                    "--teir=t=1G",
                    "-o teir=t",
                    "--colour",
                    "-o colour=red",
                    "-o ro,rw",
                ),
                *("--user nosuch", "--freshness soon", "--freshness ttl=x", "--evict mru"),
                *("--scrub fast", "-o scrub", "--metrics-port 0", "--metrics-port \u0663"),
                *(f"--metrics-port {'9' * 5000}", "--log-level loud", "--config no.toml"),
                "--log-file no/dir/log",
                *("--tier t=0G", "--tier t=101%", "--tier t=-5G", "--tier t", "--tier t=16"),
            )
        ),
    ],
    "exporter": [
        ["--listen", place]
        for place in (
            *("9465", "localhost:9465", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.300:80"),
            *("::1:9465", "[::1%lo]:9465"),
        )
    ],
    "top": [
        *(["/"], ["dir", "--interval", "0.01"], ["dir", "--interval", "2x"]),
        *(["dir", "--count", "0"], ["dir", "--by", "file"], ["dir", "--sort", "pid"]),
    ],
    "analyze": [
        *(["--darshan", "file"], ["--darshan", "nosuch"], ["--darshan", "file", "--html", "x"]),
        *(["--darshan", "file", "--source", "data"], ["file", "--list", "x"], ["file", "file"]),
        *(["nosuch"], ["dir"], ["file"]),
    ],
    "fsck": [[], ["nosuch"], ["dir"]],
    "why": [[], ["nosuch"], ["/"], [""]],
    "unpin": [[]],
    "refresh": [[], ["dir"]],
    "completion": [["csh"]],
}


@pytest.mark.parametrize("command", WRONG)
def test_wrong_usage(
    command: str, shown: Shown, golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line each, on standard error if it is an error; nothing is left, nothing is made."""
    place = tmp_path / "place"
    place.mkdir()
    for name in ("dir", "src", "mnt"):
        (place / name).mkdir()
    (place / "file").write_bytes(b"nothing")
    (place / "loop").symlink_to("loop")
    (place / "dangling").symlink_to("nosuch")
    os.mkfifo(place / "fifo")
    monkeypatch.chdir(place)
    shown.hidden |= {str(place): "<dir>", str(tmp_path): "<above>"}
    before = sorted(place.rglob("*"))
    for words in WRONG[command]:
        shown.run([command, *words])
    assert sorted(place.rglob("*")) == before
    for part in shown.parts:
        assert len(part.splitlines()) == (3 if "\nexit code " in part else 2), part
        assert "\nstderr: monarchfs: " in part or "\nexit code " not in part, part
    golden(f"wrong-{command}.txt", str(shown))
