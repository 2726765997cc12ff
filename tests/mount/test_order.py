"""What a job announces: files that are fetched ahead of their readers in its order, and weights of
files, on a real mount."""

import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from monarchfs import hints
from monarchfs.cli.main import main
from monarchfs.control.client import Connection
from monarchfs.hints import find_mount
from monarchfs.types import OperationError
from tests.support import mounting, trees
from tests.support.reading import Reader
from tests.support.scenario import play, playing

pytestmark = mounting.requires_mounts

SIZE = 20_000

JOB = """
import json, sys
from monarchfs import hints
hints.announce_files(json.loads(sys.stdin.readline()))
for line in sys.stdin:
    with open(json.loads(line)[0], "rb") as file:
        print(json.dumps({"result": len(file.read())}), flush=True)
"""
"""Announces the files of its first line, and reads those of the others."""


@contextmanager
def job(*paths: str) -> Iterator[Reader]:
    """It may be killed before the end."""
    with closing(Reader([sys.executable, "-c", JOB])) as process:
        process.tell(*paths)
        yield process


def window(mount: mounting.Mount) -> dict[str, Any]:
    found: dict[str, Any] = mount.status()["window"]
    return found


DATA = "file d{0..2}/{0..39} 20000; settle\n"


@pytest.mark.parametrize("freshness", [pytest.param("ttl=3600", marks=pytest.mark.smoke), "open"])
def test_files_are_in_memory_before_they_are_opened(work: mounting.Bench, freshness: str) -> None:
    """That of an immutable dataset is recorded. What a reader comes to while it is being asked for
    may be read twice; with ``open``, each open asks for the version, and so did the window."""
    script = f"""
mount --prefetch none --freshness {freshness}
order; until window.files >= 40
read; until window.orders = 0; until window.used_bytes = 0
check read
  window.hits >=40
  window.wasted_bytes <=240000
  source_io.read_bytes 2400000..2640000
  source.open >={160 if freshness == "open" else 120}
"""
    play(work, DATA + script)


CASES = {
    "what has room is copied in that order": """
mount --prefetch access
order d2/{39..0} d1/{39..0} d0/{39..0}; until files.resident >= 10
read d2/{39..0} d1/{39..0} d0/{39..0}
check read
  files.resident 120
  source_io.read_bytes 2400000
  served.local_opens >=1
until window.files = 0
""",
    "without a window nothing is fetched": """
mount --prefetch none --window 0
order; read; until window.files = 0
""",
    "a file that changed meanwhile is never shown as it was": """
mount --prefetch none --freshness open
order; until window.files >= 10
file d0/3 15; read d0/3 d0/4; order none
""",
    "a later order takes the place of an earlier one": """
mount --prefetch none
order d0/*; until window.files >= 10
order d1/*; until window.orders = 1
order none; until window.used_bytes = 0; until window.wasted_bytes >= 1
""",
    "open files go on when the worker dies": """
mount --prefetch none --freshness immutable
order; until window.files >= 10
open holder d0/0; held holder; kill worker; held holder; close holder
until window.used_bytes = 0
order; until window.files >= 10; read; until window.orders = 0
""",
}


@pytest.mark.parametrize("case", CASES)
def test_case(work: mounting.Bench, case: str) -> None:
    play(work, DATA + CASES[case])


def test_the_window_stays_within_its_limit(work: mounting.Bench) -> None:
    """Also with files larger than those that the C part reads otherwise."""
    with playing(work) as scenario:
        scenario.play("file {0..7} 3M; settle")
        scenario.play("mount --prefetch none --window 16M --freshness immutable")
        scenario.play("order {0..7}; until window.files >= 1")
        (mount,) = work.mounts
        for number in range(8):
            scenario.play(f"read {number}")
            assert window(mount)["used_bytes"] <= 16 << 20
        assert window(mount)["hits"] >= 1
        assert mount.status()["source_io"]["read_bytes"] <= 10 * (3 << 20)


def test_the_command_takes_paths_and_inode_numbers(work: mounting.Bench) -> None:
    """Lists that are wrong are refused; names that lead nowhere cost nothing."""
    with playing(work) as scenario:
        scenario.play(DATA + "mount --prefetch none --freshness ttl=3600")
        root = work.mounts[0].path
        found = find_mount(root)
        assert found is not None
        with Connection(found.daemon.socket_path, 1.0) as connection:
            connection.ask({"command": "order", "stream": 7})
            with pytest.raises(OperationError, match="short string"):
                connection.next(5.0)
        assert window(work.mounts[0])["orders"] == 0

        paths = work.path / "paths"
        paths.write_text("".join(f"{root}/d0/{n}\n" for n in range(20)))
        assert mounting.run("order", str(root), str(paths)).stdout == "announced: 20 files\n"
        scenario.play("until window.files = 20")
        paths.write_text("/etc/passwd\n")
        outside = mounting.run("order", str(root), str(paths))
        assert (outside.returncode, outside.stdout) == (2, "")
        assert "is not below" in outside.stderr
        inodes = "".join(f"{(root / 'd1' / str(n)).stat().st_ino}\n" for n in range(20))
        done = mounting.run("order", str(root), "-", "--inodes", "--json", stdin=inodes)
        assert json.loads(done.stdout) == {"files": 20}
        scenario.play("until window.files = 40; until window.orders = 2")
        scenario.play("read d0/{0..19} d1/{0..19}; until window.hits = 40")
        scenario.play("order none; until window.orders = 0")

        names = [
            *(b"../../etc/passwd", b"d0/..", b"d0", b"no/such", b"x" * 300, b"/99999", b"//"),
            *(b"d0//", *(b"d2/%d" % number for number in range(10))),
        ]
        with found.connect() as connection:
            sent = connection.send_list({"command": "order", "stream": "odd"}, [b"\0".join(names)])
        assert sent == {"files": 18}
        scenario.play("until window.files = 50; read d2/{0..9}; order none")
        scenario.play("until window.orders = 0")


def test_the_window_of_a_killed_job_is_given_up_until_one_reads_on(work: mounting.Bench) -> None:
    with playing(work) as scenario:
        scenario.play(DATA + "mount --prefetch none --freshness immutable")
        # What is as fast as memory is not fetched. 40 files are less than 1 MiB.
        scenario.play("slow open seconds=0.002; order d0/*; read d0/0 d0/1")
        (mount,) = work.mounts
        of_living, killed = 38 * SIZE, [f"{mount.path}/d1/{number}" for number in range(40)]
        with job(*killed) as process:
            scenario.play("until window.orders = 2")
            for path in killed[:5]:
                assert process.ask(path) == SIZE
            scenario.play(f"until window.used_bytes = {of_living + 35 * SIZE}")
        scenario.play(f"until window.used_bytes = {of_living}; until window.orders = 2")
        read = window(mount)["files"]
        scenario.play("read d1/{5..39}")
        assert window(mount)["files"] > read
        scenario.play(f"until window.orders = 1; until window.used_bytes = {of_living}")
        scenario.play("order none; until window.used_bytes = 0")


MANY = 300
OF_MANY = f"""
file {{0..{MANY - 1}}} 4000; settle
mount --prefetch none --freshness immutable
slow open seconds=0.001  # what is as fast as memory is not fetched
"""


def shuffled(seed: int) -> Sequence[str]:
    return [str(n) for n in random.Random(seed).sample(range(MANY), MANY)]


def test_an_order_that_nobody_announced(work: mounting.Bench) -> None:
    order = shuffled(1)
    with playing(work) as scenario:
        scenario.play(OF_MANY)
        (mount,) = work.mounts
        scenario.read(*order)
        assert (window(mount)["orders_learned"], window(mount)["files"]) == (0, 0)
        scenario.read(*order[:100])
        # At most 75 files, a quarter of an epoch, are ahead; the next 32 follow at 43.
        scenario.play("until window.orders_learned = 1; until window.used_bytes >= 160000")
        hits = window(mount)["hits"]
        scenario.read(*order[100:130])
        scenario.until("window.hits", ">=", str(hits + 30))
        scenario.read(*order[130:])
        assert window(mount)["orders"] == 1  # of the third epoch
        # What is announced takes its place.
        found = find_mount(mount.path)
        assert found is not None
        for names, orders in (([], 1), ([b"no/such"], 0)):
            with found.connect() as connection:
                connection.send_list({"command": "order", "stream": "another"}, names)
            scenario.until("window.orders", "=", str(orders))
        status = mount.status()
        read_in_vain = status["window"]["wasted_bytes"]
        # What a reader comes to while it is being asked for may be read twice.
        assert status["source_io"]["read_bytes"] - read_in_vain <= 2.2 * MANY * 4000


def test_an_order_goes_on_with_the_next_worker(work: mounting.Bench) -> None:
    order = shuffled(1)
    with playing(work) as scenario:
        scenario.play(OF_MANY.partition("mount")[0])
        # A worker that takes over distrusts what was changed in the last seconds before the mount.
        newest = max(path.stat().st_ctime for path in work.faulty[0].backing.iterdir())
        mounting.wait_for(lambda: newest < time.time() - 2.1, "the files to be older")
        scenario.play("mount --prefetch none --freshness immutable; slow open seconds=0.001")
        (mount,) = work.mounts
        with job(*(f"{mount.path}/{name}" for name in order)):
            scenario.play("until window.files >= 50")
            scenario.read(*order[:80])
            for how, first in (("kill worker", 80), ("command restart", 160)):
                hits = window(mount)["hits"]
                scenario.play(f"{how}; until window.orders = 1")
                # The readers' place is found by what they open: a fast one has read half by then.
                scenario.read(*order[first : first + 80])
                assert window(mount)["hits"] >= hits + 20
            scenario.play("until window.used_bytes >= 40000")
        # It is known whether the announcer lives.
        scenario.play("until window.used_bytes = 0")
        scenario.read(*order[240:])
        # Each file once, but what the first two workers had in their windows when they ended, which
        # is at most what was left of the order.
        status = mount.status()
        in_vain = status["window"]["wasted_bytes"] + status["window"]["used_bytes"]
        assert status["source_io"]["read_bytes"] - in_vain <= (1.02 * MANY + 220 + 140) * 4000
        scenario.umount()
        assert os.listdir(work.path / "state" / "said") == []


# What a job says of files stays with --evict weighted, and every byte is right


FILES = 10
CONTENTS = {f"dir/{number}": trees.random_bytes(200_000, number) for number in range(FILES)}


def dataset(work: mounting.Bench) -> Path:
    return trees.write_files(work.path / "src", CONTENTS)


@pytest.fixture
def mount(work: mounting.Bench) -> mounting.Mount:
    """Four of the files fit, each of which takes 49 blocks; none is local."""
    options = ("--evict", "weighted", "--freshness", "immutable", "--prefetch", "access")
    return work.mount(dataset(work), *options, tier="816K")


@pytest.fixture(autouse=True)
def _nothing_failed_before() -> Iterator[None]:
    hints._failed.clear()
    yield
    hints._failed.clear()


def read(mount: mounting.Mount, *numbers: int) -> None:
    """Each by itself, from below the page cache; and wait until it is copied, if it is."""
    for number in numbers:
        with (mount.path / "dir" / str(number)).open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert file.readall() == CONTENTS[f"dir/{number}"]
        mount.wait_idle()


def local(mount: mounting.Mount) -> set[int]:
    """And the tier holds no more than it may."""
    tier = mount.status()["tiers"][0]
    assert tier["used_bytes"] <= tier["capacity_bytes"]
    found = mounting.asked("why", *(str(mount.path / "dir" / str(n)) for n in range(FILES)))
    return {n for n, one in enumerate(found["paths"]) if one["state"] == "resident"}


def test_heavy_files_stay_with_the_next_worker(
    mount: mounting.Mount, work: mounting.Bench, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.write_text("".join(f"{n}\tdir/{n}\n" for n in range(FILES)))
    assert main(["weigh", str(mount.path), str(weights)]) == 0
    assert hints.weigh({mount.path / "dir" / "0": 100.0})
    mount.kill_worker()
    read(mount, *range(FILES))
    assert local(mount) == {0, *range(FILES - 3, FILES)}
    # What is said now changes only the files that are named.
    assert hints.weigh({mount.path / "dir" / "0": 0.5})
    assert main(["restart", str(mount.path)]) == 0
    read(mount, *range(FILES))
    stay = local(mount)
    assert stay == set(range(FILES - 4, FILES))
    # Equal weights: nothing goes any more.
    assert hints.weigh([(mount.path / "dir" / "7", 1.0)], replace=True)
    read(mount, *range(FILES))
    assert local(mount) == stay
    mount.umount()
    assert os.listdir(work.path / "state" / "said") == []


def test_names_are_as_ever(
    mount: mounting.Mount, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "weights"
    weights.write_text(f"1\t{mount.path}/dir/../dir/1\n2\tdir/2\n1e3\tdir/nosuch\n0\tdir\n")
    assert main(["weigh", str(mount.path), str(weights), "--json"]) == 1
    answer = {"files": 2, "unknown": 2, "first_unknown": "dir/nosuch"}
    assert json.loads(capsys.readouterr().out) == answer
    # Much of it goes in several requests; the first one alone replaces.
    weights.write_text("".join(f"{n % FILES}\tdir/{n % FILES}\n" for n in range(9_000)))
    assert main(["weigh", str(mount.path), str(weights), "--replace"]) == 0
    assert capsys.readouterr().out == "weighed 9,000 files\n"
    for text, words in (("1\t../x\n", "line 1: ../x is not"), ("1\t\n", "line 1: a path is empty")):
        weights.write_text(text)
        mounting.assert_refused(mount, capsys, ["weigh", "{mnt}", str(weights)], 2, words)
    mounting.assert_refused(mount, capsys, ["weigh", "{mnt}", "/nosuch/file"], 1, "No such file")
    assert not hints.weigh({tmp_path / "elsewhere": 1.0})
    assert not hints.weigh({})


def test_where_no_policy_wants_weights_they_are_refused(
    work: mounting.Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mount = work.mount(dataset(work))
    (tmp_path / "weights").write_text("1\tdir/1\n")
    mounting.assert_refused(
        mount, capsys, ["weigh", "{mnt}", f"{tmp_path}/weights"], 1, "--evict weighted"
    )
    assert not hints.weigh({mount.path / "dir" / "1": 1.0})
