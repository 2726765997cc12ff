"""Who may ask a peer: whoever has a token that is signed with the secret of the job.

The secret is an HMAC of (user, source, job) with a key of the site, which only root can read on
each node. A token is valid for requests from one address, until a time. nginx checks it
(ngx_http_secure_link_module).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from base64 import urlsafe_b64encode

from monarchfs.types import UsageError

KEY_MIN_BYTES = 32
KEY_MAX_BYTES = 4096
TOKEN_SECONDS = 900
"""For how long a token is valid. The clocks of the nodes may differ by half of it."""


def read_site_key(path: str) -> bytes:
    """The key of the site.

    Raises UsageError if others than its owner can read it, if it is not this process's user's, or
    if it is too short; OSError if it cannot be read.
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


def job_secret(site_key: bytes, uid: int, source: bytes, job: str) -> str:
    """The secret of one user's mount of one dataset in one job: 64 hexadecimal digits, the same on
    each of the job's nodes."""
    parts = (b"monarchfs peers", b"%d" % uid, source, job.encode())
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(site_key, message, hashlib.sha256).hexdigest()


def job_port(first: int, count: int, secret: str) -> int:
    """The port on which the job's nodes serve, of ``count`` from ``first`` on: the same on each."""
    return first + int(hashlib.sha256(b"port" + secret.encode()).hexdigest(), 16) % count


def token(address: str, secret: str, now: float) -> str:
    """What a request has behind its path, if it comes from ``address``: ``?e=...&s=...``."""
    expires = str(int(now) + TOKEN_SECONDS)
    digest = hashlib.md5(signed_text(expires, address, secret).encode()).digest()
    return f"?e={expires}&s={urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def signed_text(expires: str, address: str, secret: str) -> str:
    """What the token is the MD5 of: nginx builds the same from its variables.

    The secret is at both ends, so that nothing can be appended to a known text.
    """
    return f"{secret} {expires} {address} {secret}"
