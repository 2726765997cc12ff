"""The key with which peers encrypt what they send: all nodes derive the same one from their secret.

Nobody signs certificates. A node accepts a peer whose key has the expected digest, so only a peer
that has the secret can answer. OpenSSL's command makes the certificate that nginx wants.
"""

from __future__ import annotations

import hashlib
import hmac
import shutil
import subprocess
from base64 import b64encode

from monarchfs.types import OperationError

_PRIVATE_KEY = bytes.fromhex("302e020100300506032b657004220420")
"""What stands before the 32 bytes of an Ed25519 key in PKCS #8: RFC 8410, section 7."""

_OPENSSL_SECONDS = 10.0
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_BEGIN, _END = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"


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
