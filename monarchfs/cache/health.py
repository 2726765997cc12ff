"""Whether a tier is in service. Pure; times are seconds of a monotonic clock."""

from __future__ import annotations

import errno
import os

FIRST_PROBE_SECONDS = 1.0
LAST_PROBE_SECONDS = 60.0

CALM_SECONDS = 60.0
"""A tier that fails again within this time after it came back is probed less and less often."""

NOT_THE_TIERS = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EBUSY),
        *(errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.EFBIG),
    }
)
"""Errors that concern this process, this node or one file, but not the tier."""

UNREADABLE = frozenset(
    {errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN, errno.ENOTCONN, errno.EREMOTEIO}
)
"""Errors of reading that mean the whole disk."""

_MEANINGS = {
    errno.ENOSPC: "its file system is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "its file system is read-only",
    errno.EIO: "its disk fails",
    errno.ENOENT: "its directory is gone",
}


class Health:
    """Out of service from the first failure until a probe succeeds.

    Changing: ``reason`` (None: in service), ``since``, ``readable`` (whether what it holds is still
    served).
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.since = 0.0
        self.readable = True
        self._interval = FIRST_PROBE_SECONDS
        self._next_probe = 0.0
        self._back_at = -CALM_SECONDS

    def failed(self, now: float, error: OSError, *, reading: bool) -> bool:
        """An operation failed; True if that took the tier out of service."""
        if error.errno in NOT_THE_TIERS:
            return False
        if reading and error.errno in UNREADABLE:
            self.readable = False
        elif reading:
            return False
        if self.reason is not None:
            return False
        if now - self._back_at >= CALM_SECONDS:
            self._interval = FIRST_PROBE_SECONDS
        self.reason = _meaning(error)
        self.since = now
        self._next_probe = now + self._interval
        return True

    def probe_due(self, now: float) -> bool:
        return self.reason is not None and now >= self._next_probe

    def probed(self, now: float, error: OSError | None) -> bool:
        """True if that put the tier back into service."""
        if self.reason is None:
            return False
        self._interval = min(2 * self._interval, LAST_PROBE_SECONDS)
        if error is not None:
            self.reason = _meaning(error)
            self._next_probe = now + self._interval
            return False
        self.reason = None
        self.readable = True
        self._back_at = now
        return True


def _meaning(error: OSError) -> str:
    text = error.strerror or os.strerror(error.errno or errno.EIO)
    meaning = _MEANINGS.get(error.errno or 0)
    return f"{meaning} ({text})" if meaning else text
