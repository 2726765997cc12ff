"""What nodes tell each other: messages, and the catalogue of replicas, which a peer follows."""

import json
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.peers import catalogue, messages
from monarchfs.peers.catalogue import Catalogue, Follower
from monarchfs.peers.messages import Page, PageState, Row, decode_page, encode_page
from monarchfs.peers.nodes import parse_nodes
from monarchfs.peers.ownership import Ownership
from monarchfs.types import FileType, PeerListing, PeerNames, SourceStat

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
    "catalogue": (encode_page, decode_page),
}
QUESTION = messages.NamesQuestion(
    b"\xff/b c", 2**64 - 1, [b"\xff\n", b"b" * 255], LARGEST, demand=True
)
ENTRIES = [(b"\xff%d" % n, kind, 2**64 - 1) for n, kind in enumerate(FileType)]
LISTING = PeerListing(LARGEST, -LARGEST, LARGEST, True, ENTRIES)
SPAN = messages.WantedSpan(b"\xff" * 16, 2**32 - 1, 2**32 - 1, 2**32 - 1, 255, b"\xff/x y")
HOLDS = messages.HeldSpan(coming=True, path="/tier/0/parts/00", digests=b"\xff" * 64)
REPLICA = messages.WantedReplica(b"\xff" * 16, 1 << 40, b"a/\xff/b c")
PAGE = Page(PageState.ALL, 1, 2, [Row(bytes(16), 1, 2, 3, 4, 5)])
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
    ("catalogue", PAGE),
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


@pytest.mark.parametrize(("at", "wrong"), [(0, b"xxxx"), (4, b"\x09"), (None, b"x")])
def test_what_is_no_catalogue_is_refused(at: int | None, wrong: bytes) -> None:
    sent = encode_page(PAGE)
    changed = sent + wrong if at is None else sent[:at] + wrong + sent[at + len(wrong) :]
    with pytest.raises(messages.PeerError):
        decode_page(changed)


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


# The catalogue


names = st.integers(0, 40).map(lambda n: n.to_bytes(16, "big"))


class Held(Catalogue):
    """Of replicas that are in no index."""

    def __init__(self, held: dict[bytes, Row], incarnation: int) -> None:
        super().__init__(
            None,  # type: ignore[arg-type]
            (),
            None,  # type: ignore[arg-type]
            incarnation,
        )
        self._held = held

    def _rows(self, names: Iterable[bytes]) -> list[Row]:
        return [self._held.get(name, Row(name)) for name in names]

    def _names_after(self, after: bytes, limit: int) -> list[bytes]:
        return sorted(name for name in self._held if name > after)[:limit]


def test_of_what_others_own_little_is_read_for_a_page() -> None:
    rng, read = random.Random(4), 0
    held = sorted(bytes((rng.randrange(2), *rng.randbytes(15))) for _ in range(20_000))

    def names(_tier: int, _prefix: bytes, after: bytes, limit: int) -> list[tuple[bytes, int]]:
        nonlocal read
        at = bisect_right(held, after)
        read += len(held[at : at + limit])
        return [(name, 1) for name in held[at : at + limit]]

    ownership = Ownership(parse_nodes([f"n{n}" for n in range(64)], 1), 5)
    replicas: Any = SimpleNamespace(names=names)
    own = [name for name in held if ownership.owns(name)]
    assert Catalogue(replicas, [1], ownership, 1)._names_after(b"", 1024) == own
    assert Catalogue(replicas, [1], ownership, 1)._names_after(own[9], 9) == own[10:19]
    assert read < 4 * len(own)


STEPS = st.tuples(st.sampled_from(["come", "go", "restart", "ask"]), st.lists(names, max_size=8))


@settings(max_examples=100)
@given(steps=st.lists(STEPS, max_size=60))
def test_who_asks_until_there_is_no_more_knows_what_the_node_has(
    steps: list[tuple[str, list[bytes]]],
) -> None:
    """Replicas come and go while a peer asks; the node is restarted; changes are forgotten."""
    held: dict[bytes, Row] = {}
    known: dict[bytes, Row] = {}
    follower, told = Follower(), Held(held, 1)

    def ask() -> bool:
        query = dict(part.split("=") for part in follower.query().split("&"))
        if "after" in query:
            page = told.page(bytes.fromhex(query["after"]))
        else:
            page = told.changes(int(query["incarnation"]), int(query["since"]))
        page = decode_page(encode_page(page))
        void, again = follower.take_page(page)
        if void:
            known.clear()
        for row in page.rows:
            known[row.name] = row
        return again

    with patch.multiple(catalogue, PAGE_ROWS=3, MAX_CHANGES=10):
        for number, (what, wanted) in enumerate(steps, 2):
            if what == "ask":
                ask()
            elif what == "restart":
                told = Held(held, number)
            else:
                for name in wanted:
                    held.pop(name, None)
                    if what == "come":
                        held[name] = Row(name, number, 7, 0, number, 4096)
                told.note(wanted)
        for _ in range(2):  # changes during the list come with the next request
            while ask():
                pass
    assert {name: row for name, row in known.items() if row.segment} == held
