"""Names and attributes between nodes: the messages, and mounts that go through one source."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.peers.errors import PeerError
from monarchfs.peers.following import Following
from monarchfs.peers.names import (
    LARGE_BYTES,
    MOST_NAMES,
    NameOwners,
    NamesQuestion,
    decode_answer,
    decode_listing,
    decode_question,
    encode_answer,
    encode_listing,
    encode_question,
)
from monarchfs.peers.nodes import PeerNode, Peers
from monarchfs.peers.ownership import Ownership
from monarchfs.peers.web_server import find_nginx
from monarchfs.types import DirRef, FileType, PeerListing, PeerNames, SourceStat
from tests.peers.test_sharing import FILES, Nodes, answers, peers, read_all, source
from tests.support import surroundings
from tests.support.mounting import Bench, FaultySource, Mount, run, wait_for

__all__ = ["source"]

needs_mounts = [
    surroundings.requires_fuse,
    pytest.mark.skipif(find_nginx() is None, reason="needs nginx: apt-get install nginx-light"),
]
DIRECTORIES = 14

file_names = st.binary(min_size=1, max_size=20).filter(
    lambda name: name not in (b".", b"..") and not set(name) & {0, ord("/")}
)
paths = st.lists(file_names, max_size=4).map(b"/".join)
numbers = st.integers(0, 2**31)
stats = st.builds(
    SourceStat,
    *(st.just(0), st.integers(1, 2**64 - 1), st.integers(0, 2**62)),
    *[st.integers(-(2**70), 2**70)] * 3,
    *(st.sampled_from([0o100644, 0o40755]), *[numbers] * 6),
)
questions = st.builds(
    NamesQuestion,
    *(paths, st.integers(1, 2**64 - 1), st.lists(file_names, min_size=1, max_size=9)),
    *(st.integers(0, 2**63 - 1), st.booleans()),
)
found = st.builds(
    PeerNames,
    *(st.integers(0, 2**63 - 1), st.lists(st.tuples(file_names, stats, st.just(b"")), max_size=9)),
)


times = st.integers(-(2**63) + 1, 2**63 - 1)
listings = st.builds(
    PeerListing,
    *(st.integers(0, 2**63 - 1), times, times, st.booleans()),
    st.lists(
        st.tuples(file_names, st.sampled_from(FileType), st.integers(1, 2**64 - 1)),
        max_size=9,
        unique_by=lambda entry: entry[0],
    ),
)


@given(questions, found, listings, st.data())
def test_messages(
    question: NamesQuestion, answer: PeerNames, listing: PeerListing, data: st.DataObject
) -> None:
    asked, said, listed = encode_question(question), encode_answer(answer), encode_listing(listing)
    assert decode_question(asked) == question
    assert decode_answer(said) == answer
    assert decode_listing(listed) == listing
    with pytest.raises(PeerError):
        decode_listing(encode_listing(None))
    with pytest.raises(PeerError):
        decode_listing(encode_listing(listing._replace(entries=[(b"a", FileType.REGULAR, 1)] * 2)))
    with pytest.raises(PeerError):
        decode_listing(listed[: data.draw(st.integers(0, len(listed) - 1))])
    with pytest.raises(PeerError):
        decode_question(asked[: data.draw(st.integers(0, len(asked) - 1))])
    with pytest.raises(PeerError):
        decode_answer(said[: data.draw(st.integers(0, len(said) - 1))])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=14),
    max_leaves=30,
)


@given(st.binary(max_size=100) | json_values.map(lambda value: json.dumps(value).encode()))
def test_bytes_that_are_no_message(data: bytes) -> None:
    with suppress(PeerError):
        decode_question(data)
    with suppress(PeerError):
        decode_answer(data)
    with suppress(PeerError):
        decode_listing(data)


@pytest.mark.parametrize(
    "changed",
    [
        {"path": b"../x"}, {"path": b"/etc"}, {"path": b"a//b"}, {"ino": 0},
        {"names": [b".."]}, {"names": [b"a/b"]}, {"names": [b"a\0"]}, {"names": [b"n" * 256]},
        {"names": [b"a"] * (MOST_NAMES + 1)}, {"most_age_ns": -1},
    ],
)  # fmt: skip
def test_questions_that_lead_elsewhere(changed: dict[str, Any]) -> None:
    question = NamesQuestion(b"a", 1, [b"b"], 0, demand=True)
    assert decode_question(encode_question(question)) == question
    with pytest.raises(PeerError):
        decode_question(encode_question(question._replace(**changed)))


def test_each_name_has_one_owner_and_that_of_a_small_directory_owns_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    avoided: set[int] = set()
    monkeypatch.setattr("monarchfs.peers.names.avoided", avoided.__contains__)
    monkeypatch.setattr("monarchfs.peers.following.START_SECONDS", 0)
    names = [b"%d" % number for number in range(1000)]

    async def main() -> None:
        nodes = tuple(PeerNode(name, name, 1) for name in "abc")
        each = [Following(Peers(nodes, own, "secret")) for own in range(3)]
        owners = [NameOwners(Ownership(nodes), following) for following in each]
        for ino in range(2, 40):
            for size in (LARGE_BYTES - 1, LARGE_BYTES):
                directory = DirRef(b"d", ino)
                avoided.clear()
                divided = [one.divide(directory, size, names) for one in owners]
                shares = [divided[(n + 1) % 3].get(n, []) for n in range(3)]
                assert shares == [divided[(n + 2) % 3].get(n, []) for n in range(3)]
                assert sorted(name for share in shares for name in share) == sorted(names)
                assert size == LARGE_BYTES or sorted(map(len, shares)) == [0, 0, 1000]
                served = [one.served(directory, size, names) for one in owners]
                assert all(set(share) <= set(s) for share, s in zip(shares, served, strict=True))
                # The first node fails: the others ask who stands in for it.
                avoided.add(0)
                left = [one.divide(directory, size, names) for one in owners[1:]]
                assert not any(0 in one for one in left)
                for asked, number in ((left[0].get(2, []), 2), (left[1].get(1, []), 1)):
                    assert set(asked) <= set(served[number])

    trio.run(main)


def go_through(mount: Mount, source: Path) -> None:
    """As ``find -ls``; everything is as in the source."""
    for base, directories, files in os.walk(mount.path):
        directories.sort()
        for name in files:
            path = Path(base, name)
            there, here = (source / path.relative_to(mount.path)).lstat(), path.lstat()
            for field in ("st_size", "st_mtime_ns", "st_ctime_ns", "st_mode", "st_uid", "st_nlink"):
                assert getattr(here, field) == getattr(there, field), path


def at_once(mounts: list[Mount], source: Path) -> None:
    with ThreadPoolExecutor(len(mounts)) as pool:
        for done in [pool.submit(go_through, mount, source) for mount in mounts]:
            done.result()


def operations(mounts: list[Mount]) -> int:
    return sum(mount.status()["source_io"]["operations"] for mount in mounts)


def slow_source(work: Bench, source: Path) -> FaultySource:
    """Nobody asks peers instead of a faster one."""
    slow = work.faulty_source(source)
    slow.faults(delay=0.005, delayed=["lookup"])
    return slow


class TestMounts:
    pytestmark = needs_mounts

    def test_nodes_that_go_through_a_source_ask_it_once(self, work: Bench, source: Path) -> None:
        nodes = Nodes(work, slow_source(work, source).path, 3, "--prefetch", "none")
        nodes.until_they_know_each_other()
        a, b, c = nodes.mounts.values()
        before = operations([a, b, c])
        at_once([a, b], source)
        asked = operations([a, b, c]) - before
        # A busy machine misses a deadline now and then, and asks the source.
        assert FILES <= asked < 1.4 * (FILES + 4 * DIRECTORIES)
        before = operations([a, b, c])
        go_through(c, source)
        assert operations([a, b, c]) - before < 0.3 * FILES, "it comes later"
        served = [mount.status()["served"]["peer_names"] for mount in (a, b, c)]
        assert sum(served) > 1.2 * FILES

    def test_nodes_that_scan_a_source_ask_it_once(self, work: Bench, source: Path) -> None:
        nodes = Nodes(work, source, 3, "--prefetch", "all")
        for mount in nodes.mounts.values():
            mount.wait_idle()
        served = [mount.status()["served"]["peer_names"] for mount in nodes.mounts.values()]
        assert sum(served) > 1.5 * FILES
        for mount in nodes.mounts.values():
            read_all(mount, source)

    @pytest.mark.parametrize("victim", ["killed", "frozen"])
    def test_an_owner_that_is_lost_costs_a_deadline(
        self, work: Bench, source: Path, victim: str
    ) -> None:
        nodes = Nodes(work, slow_source(work, source).path, 2, "--prefetch", "none")
        nodes.until_they_know_each_other()
        a, b = nodes.mounts.values()
        worker = a.status()["worker"]["pid"]
        supervisor = int(Path(f"/proc/{worker}/stat").read_text().rpartition(") ")[2].split()[1])
        processes = (supervisor, worker, a.status()["peer_server"]["pid"])
        for pid in processes:
            os.kill(pid, signal.SIGKILL if victim == "killed" else signal.SIGSTOP)
        longest = 0.0
        for base, directories, files in os.walk(b.path):
            directories.sort()
            for name in files:
                began = time.monotonic()
                size = os.lstat(Path(base, name)).st_size
                longest = max(longest, time.monotonic() - began)
                assert size == (source / Path(base, name).relative_to(b.path)).stat().st_size
        assert longest < 5
        if victim == "killed":
            work.mounts.remove(a)
            run("umount", str(a.path))
            return
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        wait_for(lambda: all(map(answers, peers(b))), "the peer")

    def test_changes_show_after_the_ttl(self, work: Bench, source: Path) -> None:
        nodes = Nodes(work, source, 2, "--prefetch", "none", "--freshness", "ttl=4")
        nodes.until_they_know_each_other()
        a, b = nodes.mounts.values()
        at_once([a, b], source)
        changed = next(file for file in sorted(source.rglob("*")) if file.is_file())
        name = changed.relative_to(source)
        changed.write_bytes(b"changed")
        wait_for(lambda: os.lstat(b.path / name).st_size == 7, "the change", 20)
        assert (b.path / name).read_bytes() == b"changed"
        wait_for(lambda: os.lstat(a.path / name).st_size == 7, "the change", 20)
