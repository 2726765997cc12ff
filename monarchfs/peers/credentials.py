"""Access to a peer: a request needs a token that is signed with the secret of the mount.

The secret is an HMAC of (user, groups, source) with a key of the site, which only root can read on
each node. A token is valid from one address to one other, for a limited time: who gets it as the
peer that it was meant for can use it nowhere else. nginx checks it (ngx_http_secure_link_module).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from base64 import urlsafe_b64encode
from collections.abc import Iterable

from monarchfs.types import UsageError

KEY_MIN_BYTES = 32
KEY_MAX_BYTES = 4096
TOKEN_SECONDS = 900
"""For how long a token is valid. The clocks of the nodes may differ by half of it."""


def read_site_key(path: str) -> bytes:
    """The key of the site.

    Raises UsageError if anybody but its owner can read it, if its owner is not this process's user,
    or if it is too short; OSError if it cannot be read.
    """
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(
                f"{path}: only its owner may have access to the key: chmod 0400 {path}"
            )
        key = file.read(KEY_MAX_BYTES)
    if len(key) < KEY_MIN_BYTES:
        raise UsageError(
            f"{path}: a key has at least {KEY_MIN_BYTES} bytes:"
            f" dd if=/dev/urandom of={path} bs=64 count=1"
        )
    return key


def mount_secret(site_key: bytes, uid: int, groups: Iterable[int], source: bytes) -> str:
    """The secret of a user's mounts of one dataset: 64 hexadecimal digits, the same on each node.

    Another set of ``groups`` may read other files, so it has another secret.
    """
    members = ",".join(map(str, sorted(set(groups))))
    parts = (b"monarchfs peers", b"%d" % uid, members.encode(), source)
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(site_key, message, hashlib.sha256).hexdigest()


def token(sender: str, receiver: str, secret: str, now: float) -> str:
    """The query of a request from one address to another: ``?e=...&s=...``."""
    expires = str(int(now) + TOKEN_SECONDS)
    # FIPS mode refuses MD5 otherwise; nginx knows no other digest here.
    signed = signed_text(expires, sender, receiver, secret).encode()
    digest = hashlib.md5(signed, usedforsecurity=False).digest()
    return f"?e={expires}&s={urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def signed_text(expires: str, sender: str, receiver: str, secret: str) -> str:
    """The text whose MD5 is in the token: nginx builds the same from its variables.

    The secret is at both ends, so that nothing can be appended to a known text.
    """
    return f"{secret} {expires} {sender} {receiver} {secret}"
