"""What nodes tell each other, and names and attributes that come from other nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.peers import messages
from monarchfs.peers import names as peer_names
from monarchfs.peers.following import Following
from monarchfs.peers.nodes import PeerNode, Peers
from monarchfs.peers.ownership import Ownership
from monarchfs.types import DirRef, FileType, PeerListing, PeerNames, SourceStat
from tests.peers.nodes import FILES, Nodes, files_of, requires_peers
from tests.support.mounting import Bench, Mount, wait_for

DIRECTORIES = 14
HELD = 3
"""In each answer about spans."""
LARGEST = 2**63 - 1
STAT = SourceStat(0, 2**64 - 1, 2**62, -(2**70), 2**70, -1, 0o100644, *[2**31] * 6)


MESSAGES: dict[str, tuple[Callable[[Any], bytes], Callable[[bytes], Any]]] = {
    "question": (messages.encode_names_question, messages.decode_names_question),
    "answer": (messages.encode_names, messages.decode_names),
    "listing": (messages.encode_listing, messages.decode_listing),
    "held spans": (messages.encode_held, lambda data: messages.decode_held(data, HELD)),
    "wanted spans": (messages.encode_spans, messages.decode_spans),
    "wanted replicas": (messages.encode_wanted, messages.decode_wanted),
}
QUESTION = messages.NamesQuestion(
    b"\xff/b c", 2**64 - 1, [b"\xff\n", b"b" * 255], LARGEST, demand=True
)
ENTRIES = [(b"\xff%d" % n, kind, 2**64 - 1) for n, kind in enumerate(FileType)]
LISTING = PeerListing(LARGEST, -LARGEST, LARGEST, True, ENTRIES)
SPAN = messages.WantedSpan(b"\xff" * 16, 2**32 - 1, 2**32 - 1, 2**32 - 1, 255, b"\xff/x y")
HOLDS = messages.HeldSpan(coming=True, path="/tier/0/parts/00", digests=b"\xff" * 64)
REPLICA = messages.WantedReplica(b"\xff" * 16, 1 << 40, b"a/\xff/b c")
TOLD: list[tuple[str, Any]] = [
    *(
        ("question", QUESTION),
        ("question", messages.NamesQuestion(b"", 1, [b"a"], 0, demand=False)),
    ),
    ("answer", PeerNames(LARGEST, [(b"\xff", STAT, b""), (b"a", STAT, b"")])),
    *(("answer", PeerNames(0, [])), ("listing", LISTING), ("held spans", [HOLDS] * HELD)),
    ("held spans", [messages.HeldSpan(coming=False)] * HELD),
    *(("wanted spans", [SPAN] * count) for count in (0, 1, messages.MOST_SPANS)),
    *(("wanted replicas", [REPLICA] * count) for count in (0, 1, messages.MAX_WANTED)),
]


@pytest.mark.parametrize(("kind", "message"), TOLD)
def test_a_message_is_read_as_it_was_written_and_as_a_whole(kind: str, message: Any) -> None:
    encode, decode = MESSAGES[kind]
    sent = encode(message)
    assert decode(sent) == message
    for length in range(len(sent)):
        if not kind.startswith("wanted"):  # whose first rows are a message, too
            with pytest.raises(messages.PeerError):
                decode(sent[:length])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=14),
    max_leaves=30,
)


@given(st.binary(max_size=100) | json_values.map(lambda value: json.dumps(value).encode()))
def test_bytes_that_are_no_message(data: bytes) -> None:
    for kind, (encode, decode) in MESSAGES.items():
        with suppress(messages.PeerError):
            message = decode(data)
            assert kind != "wanted replicas" or encode(message) == data


FILE = ["a", 8, 9, 5, 1, 1, 1, 0o100644, 1, 0, 0, 0, 8, 4096]
LINK = ["l", 10, 9, 5, 1, 1, 1, 0o120777, 1, 0, 0, 0, 8, 4096]


def test_the_entries_that_others_below_are_a_variation_of() -> None:
    found = messages.decode_names(json.dumps([0, [FILE, [*LINK, "t"]]]).encode()).found
    assert [(name, st.mode, target) for name, st, target in found] == [
        (b"a", 0o100644, b""),
        (b"l", 0o120777, b"t"),
    ]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (["..", 4, 9], "a name is none"),
        (["", 4, 9], "a name is none"),
        (["\ud800", 8, 9], "stand for no byte"),
        (["a", 3, 9], "no file type 3"),
        (["a", 8, 1 << 64], "out of range"),
        (["a", 8, 9, 5], "attributes are missing"),
        (["a", 8], "an entry is not known"),
        ([*FILE[:-1], 1 << 32], "out of range"),
        ([*FILE[:-1], True], "is no number"),
        ([*FILE, "target"], "of no symbolic link"),
        ([*FILE, 1], "no text"),
        (LINK, "of no symbolic link"),
        ([*LINK, "t" * 4096], "wrong length"),
        (["a", 4, *FILE[2:]], "another than the mode's"),
        ([*FILE[:7], 0o170644, *FILE[8:]], "another than the mode's"),
    ],
)
def test_an_entry_that_no_node_would_send(entry: list[object], words: str) -> None:
    with pytest.raises(messages.PeerError, match=words):
        messages.decode_names(json.dumps([0, [entry]]).encode())


ELSEWHERE = (b"/", b"/etc", b"a/", b"a//b", b"../x", b"a/../b", b".", b"a/.", b"a\0b")
REFUSED: list[tuple[str, Any]] = [
    *(("question", QUESTION._replace(path=path)) for path in ELSEWHERE),
    *(("question", QUESTION._replace(names=[name])) for name in (*ELSEWHERE, b"a/b", b"n" * 256)),
    ("question", QUESTION._replace(names=[b"a"] * (messages.MOST_NAMES + 1))),
    *(("question", QUESTION._replace(ino=0)), ("question", QUESTION._replace(most_age_ns=-1))),
    *(("listing", None), ("listing", LISTING._replace(entries=ENTRIES * 2))),
    *(("wanted spans", [SPAN._replace(path=path)]) for path in (b"", *ELSEWHERE)),
    ("wanted spans", [SPAN] * (messages.MOST_SPANS + 1)),
    *(("wanted replicas", [REPLICA._replace(path=path)]) for path in (b"", *ELSEWHERE)),
    ("wanted replicas", [REPLICA] * (messages.MAX_WANTED + 1)),
    *(
        ("held spans", [HOLDS._replace(path=path)] * HELD)
        for path in ("@elsewhere/x", "x", "/a b", "/a?b", "/a\0")
    ),
    *(("held spans", [HOLDS] * count) for count in (HELD - 1, HELD + 1)),
]
"""Too much of something, or what leads elsewhere: out of the source, to another host."""


@pytest.mark.parametrize(("kind", "message"), REFUSED)
def test_what_a_node_would_not_say_is_refused(kind: str, message: Any) -> None:
    encode, decode = MESSAGES[kind]
    with pytest.raises(messages.PeerError):
        decode(encode(message))


async def test_each_name_has_one_owner_and_that_of_a_small_directory_owns_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    avoided: set[int] = set()
    monkeypatch.setattr("monarchfs.peers.names.avoided", avoided.__contains__)
    monkeypatch.setattr("monarchfs.peers.following.START_SECONDS", 0)
    names = [b"%d" % number for number in range(1000)]

    nodes = tuple(PeerNode(name, name, 1) for name in "abc")
    each = [Following(Peers(nodes, own, "secret")) for own in range(3)]
    owners = [peer_names.NameOwners(Ownership(nodes, one.own), one) for one in each]
    for ino in range(2, 40):
        for size in (peer_names.LARGE_BYTES - 1, peer_names.LARGE_BYTES):
            directory = DirRef(b"d", ino)
            avoided.clear()
            divided = [one.divide(directory, size, names) for one in owners]
            shares = [divided[(n + 1) % 3].get(n, []) for n in range(3)]
            assert shares == [divided[(n + 2) % 3].get(n, []) for n in range(3)]
            assert sorted(name for share in shares for name in share) == sorted(names)
            assert size == peer_names.LARGE_BYTES or sorted(map(len, shares)) == [0, 0, 1000]
            served = [one.served(directory, size, names) for one in owners]
            assert all(set(share) <= set(s) for share, s in zip(shares, served, strict=True))
            # The first node fails: the others ask who stands in for it.
            avoided.add(0)
            left = [one.divide(directory, size, names) for one in owners[1:]]
            assert not any(0 in one for one in left)
            for asked, number in ((left[0].get(2, []), 2), (left[1].get(1, []), 1)):
                assert set(asked) <= set(served[number])


def go_through(source: Path, *mounts: Mount) -> None:
    """All at once, as ``find -ls``; everything is as in the source."""
    with ThreadPoolExecutor(len(mounts)) as pool:
        list(pool.map(lambda mount: compare(mount, source), mounts))


def compare(mount: Mount, source: Path) -> None:
    for base, directories, files in os.walk(mount.path):
        directories.sort()
        for name in files:
            path = Path(base, name)
            there, here = (source / path.relative_to(mount.path)).lstat(), path.lstat()
            for field in ("st_size", "st_mtime_ns", "st_ctime_ns", "st_mode", "st_uid", "st_nlink"):
                assert getattr(here, field) == getattr(there, field), path


def operations(nodes: Nodes) -> int:
    return sum(mount.status()["source_io"]["operations"] for mount in nodes.mounts.values())


class TestMounts:
    pytestmark = requires_peers

    def test_nodes_that_go_through_a_source_ask_it_once(self, work: Bench, source: Path) -> None:
        slow = work.faulty_source(source)
        slow.faults(delay=0.005, delayed=["lookup"])  # nobody asks peers instead of a faster one
        nodes = Nodes(work, slow.path, 3, "--prefetch", "none")
        *first, last = nodes.mounts.values()
        before = operations(nodes)
        go_through(source, *first)
        asked = operations(nodes) - before
        # A busy machine misses a deadline now and then, and asks the source.
        assert FILES <= asked < 1.4 * (FILES + 4 * DIRECTORIES)
        before = operations(nodes)
        go_through(source, last)
        assert operations(nodes) - before < 0.3 * FILES, "it comes later"
        assert nodes.served("peer_names") > 1.2 * FILES

    def test_changes_show_after_the_ttl(self, work: Bench, source: Path) -> None:
        nodes = Nodes(work, source, 2, "--prefetch", "none", "--freshness", "ttl=4")
        a, b = nodes.mounts.values()
        go_through(source, a, b)
        changed = files_of(source)[0]
        name = changed.relative_to(source)
        changed.write_bytes(b"changed")
        wait_for(lambda: os.lstat(b.path / name).st_size == 7, "the change", 20)
        assert (b.path / name).read_bytes() == b"changed"
        wait_for(lambda: os.lstat(a.path / name).st_size == 7, "the change", 20)
