"""Secrets and tokens, and the address on which a node serves."""

from __future__ import annotations

import hashlib
import socket
import time
from typing import Any

import pytest

from monarchfs.peers import credentials
from monarchfs.peers.nodes import PeerNode
from monarchfs.supervisor import peering
from monarchfs.types import OperationError

KEY = bytes(range(64))


def test_a_secret_is_of_a_user_groups_and_a_source() -> None:
    secrets = [
        credentials.mount_secret(KEY, 1000, [1000, 5], b"/data/a"),
        credentials.mount_secret(KEY, 1001, [1000, 5], b"/data/a"),
        credentials.mount_secret(KEY, 1000, [1000], b"/data/a"),
        credentials.mount_secret(KEY, 1000, [1000, 5], b"/data/b"),
        credentials.mount_secret(bytes(64), 1000, [1000, 5], b"/data/a"),
    ]
    assert len(set(secrets)) == len(secrets)
    assert credentials.mount_secret(KEY, 1000, [5, 1000, 5], b"/data/a") == secrets[0]


def test_tokens_are_made_where_md5_is_not_for_security(monkeypatch: pytest.MonkeyPatch) -> None:
    really = hashlib.md5

    def md5(data: bytes, *, usedforsecurity: bool = True) -> Any:
        assert not usedforsecurity
        return really(data, usedforsecurity=False)

    monkeypatch.setattr(hashlib, "md5", md5)
    assert credentials.token("127.0.0.1", "secret", 0).startswith("?e=900&s=")


def test_a_name_service_that_hangs_does_not_hang_a_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: time.sleep(60))
    with pytest.raises(OperationError, match="the address of node1 is not known"):
        peering.address_of(PeerNode("n1", "node1", 9466), 0.1)


def test_an_address_needs_no_name_service() -> None:
    assert peering.address_of(PeerNode("n1", "127.0.0.7", 9466)) == "127.0.0.7"
