"""Finding a tier's directory again: its disk may have come back, or the directory was removed."""

from __future__ import annotations

import errno
import os
import stat

from monarchfs.cache.store import files as on_disk
from monarchfs.cache.store.tier import Tier


def find_again(tier: Tier) -> bool:
    """Use the directory that has the path of the tier's now; whether it is another one.

    Makes the directory if it is gone. Raises OSError; PermissionError for one that is not ours, or
    that others may write to.
    """
    if tier.directory is None:
        return False
    try:
        fd = os.open(tier.directory, on_disk.DIRECTORY)
    except FileNotFoundError:
        os.mkdir(tier.directory, 0o700)
        fd = os.open(tier.directory, on_disk.DIRECTORY)
    try:
        st = os.fstat(fd)
        if st.st_uid != os.geteuid() or stat.S_IMODE(st.st_mode) & 0o022:
            raise PermissionError(errno.EACCES, "Belongs to others now", tier.directory)
        return tier.reopen(fd)
    finally:
        os.close(fd)
