"""The catalogue of a node's replicas, and a peer that follows it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from monarchfs.peers import catalogue
from monarchfs.peers.catalogue import Catalogue, Follower
from monarchfs.peers.messages import Page, PageState, PeerError, Row, decode_page, encode_page

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


class Following(RuleBasedStateMachine):
    """Replicas come and go while a peer asks; the node is restarted; changes are forgotten. After
    the peer was told that there is no more, it knows what the node has."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[bytes, Row] = {}
        self.incarnation = 1
        self.catalogue = Held(self.held, 1)
        self.follower = Follower()
        self.known: dict[bytes, Row] = {}
        self.number = 1

    @rule(wanted=st.lists(names, max_size=8))
    def come(self, wanted: list[bytes]) -> None:
        for name in wanted:
            self.number += 1
            self.held[name] = Row(name, self.number, 7, 0, self.number, 4096)
        self.catalogue.note(wanted)

    @rule(wanted=st.lists(names, max_size=8))
    def go(self, wanted: list[bytes]) -> None:
        for name in wanted:
            self.held.pop(name, None)
        self.catalogue.note(wanted)

    @rule()
    def restart(self) -> None:
        self.incarnation += 1
        self.catalogue = Held(self.held, self.incarnation)

    def ask(self) -> bool:
        query = dict(part.split("=") for part in self.follower.query().split("&"))
        if "after" in query:
            page = self.catalogue.page(bytes.fromhex(query["after"]))
        else:
            page = self.catalogue.changes(int(query["incarnation"]), int(query["since"]))
        page = decode_page(encode_page(page))
        void, again = self.follower.take_page(page)
        if void:
            self.known.clear()
        for row in page.rows:
            if row.segment:
                self.known[row.name] = row
            else:
                self.known.pop(row.name, None)
        return again

    @rule()
    def one_request(self) -> None:
        self.ask()

    @rule()
    def until_all_is_known(self) -> None:
        for _ in range(200):
            if not self.ask():
                break
        while self.ask():  # changes during the list come with the next request
            pass
        assert self.known == self.held


class TestFollowing(Following.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(catalogue, "PAGE_ROWS", 3)
        monkeypatch.setattr(catalogue, "MAX_CHANGES", 10)


def test_what_is_no_catalogue_is_refused() -> None:
    good = encode_page(Page(PageState.ALL, 1, 2, [Row(bytes(16), 1, 2, 3, 4, 5)]))
    assert decode_page(good).rows == [Row(bytes(16), 1, 2, 3, 4, 5)]
    for bad in (b"", good[:-1], good + b"x", b"xxxx" + good[4:], good[:4] + b"\x09" + good[5:]):
        with pytest.raises(PeerError):
            decode_page(bad)
