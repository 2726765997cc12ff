"""The control socket: what is said on it, who may ask, and where it is found."""

from monarchfs.control.client import Connection, request
from monarchfs.control.messages import (
    MOST_NAME_BYTES,
    MOST_PATH_BYTES,
    MOST_REPLY_BYTES,
    MOST_REQUEST_BYTES,
    PROGRESS_SECONDS,
    SILENCE_SECONDS,
    decode_message,
    decode_request,
    encode_error,
    encode_message,
    encode_progress,
    encode_result,
    too_long,
)
from monarchfs.control.peers import may_ask, peer_uid, short_socket_path
from monarchfs.control.registration import (
    UNKNOWN_CONNECTION,
    Registered,
    Registration,
    decode_registration,
    find_mounts,
    own_mount_namespace,
    registration_stem,
    root_uid,
)

__all__ = [
    "MOST_NAME_BYTES",
    "MOST_PATH_BYTES",
    "MOST_REPLY_BYTES",
    "MOST_REQUEST_BYTES",
    "PROGRESS_SECONDS",
    "SILENCE_SECONDS",
    "UNKNOWN_CONNECTION",
    "Connection",
    "Registered",
    "Registration",
    "decode_message",
    "decode_registration",
    "decode_request",
    "encode_error",
    "encode_message",
    "encode_progress",
    "encode_result",
    "find_mounts",
    "may_ask",
    "own_mount_namespace",
    "peer_uid",
    "registration_stem",
    "request",
    "root_uid",
    "short_socket_path",
    "too_long",
]
