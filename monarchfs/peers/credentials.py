"""Access to a peer: a request needs a token that is signed with the secret of the mount.

The secret is an HMAC of (user, groups, source) with a key of the site, which only root can read on
each node. A token is valid from one address to one other, for a limited time: who gets it as the
peer that it was meant for can use it nowhere else. nginx checks it (ngx_http_secure_link_module).

The key with which peers encrypt what they send is derived from the secret, too. Nobody signs
certificates: a node accepts a peer whose key has the expected digest, so only a peer that has the
secret can answer. OpenSSL's command makes the certificate that nginx wants.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import stat
import subprocess
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterable

from monarchfs.types import OperationError, UsageError

KEY_MIN_BYTES = 32
KEY_MAX_BYTES = 4096
TOKEN_SECONDS = 900
"""For how long a token is valid. The clocks of the nodes may differ by half of it."""

_PRIVATE_KEY = bytes.fromhex("302e020100300506032b657004220420")
"""What stands before the 32 bytes of an Ed25519 key in PKCS #8: RFC 8410, section 7."""

_OPENSSL_SECONDS = 10.0
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_BEGIN, _END = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"


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


def public_key_pin(secret: str) -> str:
    """The digest of the public key of mounts with this secret, as libcurl's
    CURLOPT_PINNEDPUBLICKEY takes it.

    Raises OperationError if openssl is missing or fails.
    """
    public = _openssl(["pkey", "-pubout", "-outform", "DER"], _private_key(secret))
    return f"sha256//{b64encode(hashlib.sha256(public).digest()).decode()}"


def key_and_certificate(secret: str) -> str:
    """The private key, and a certificate for it, in PEM.

    Raises OperationError if openssl is missing or fails.
    """
    key = _private_key(secret)
    # The key is read from the standard input, so that no file and no argument has it.
    request = ["req", "-x509", "-new", "-key", "/dev/stdin", "-subj", "/CN=monarchfs peer"]
    return key + _openssl([*request, "-days", "36500"], key).decode()


def _private_key(secret: str) -> str:
    seed = hmac.new(secret.encode(), b"monarchfs peers tls", hashlib.sha256).digest()
    return f"{_BEGIN}\n{b64encode(_PRIVATE_KEY + seed).decode()}\n{_END}\n"


def _openssl(arguments: list[str], text: str) -> bytes:
    program = shutil.which("openssl", path=_ENVIRONMENT["PATH"])
    if program is None:
        raise OperationError(
            "peers with TLS need the openssl command, which is not installed:"
            " apt-get install openssl"
        )
    try:
        done = subprocess.run(
            [program, *arguments], input=text.encode(), capture_output=True, env=_ENVIRONMENT,
            timeout=_OPENSSL_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OperationError(f"{program} {arguments[0]}: {error}") from None
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().split("\n")[-1]
        raise OperationError(f"{program} {arguments[0]} failed: {reason}")
    return done.stdout
