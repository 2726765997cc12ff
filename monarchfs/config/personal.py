"""Settings of whoever runs the command: environment variables and a file in the home directory.

They only count for mounts of one's own. If root acts for another user (``--user``, sudo, a prolog,
mount(8)), the environment and the home may be that user's, who must not tell root's mount where to
write.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from monarchfs.config.files import from_content, read_limited
from monarchfs.config.options import OPTIONS
from monarchfs.config.settings import Layer, parse_value, split_options
from monarchfs.types import UsageError

PREFIX = "MONARCHFS_"
FILES = ("monarchfs.toml", "monarchfs/config.toml")
"""Below $XDG_CONFIG_HOME, or ~/.config; the first that exists counts."""

CONFIG_VARIABLE = PREFIX + "CONFIG"
RUN_FLAGS = frozenset({"strict", "report"})
"""Of ``monarchfs run``, besides those of a mount."""

_NOT_FROM_HERE = frozenset({"user", "foreground"})
"""Whose mount it is, and whether it is a daemon's, is said where it is made."""

_ACTING_FOR = ("SUDO_UID", "PKEXEC_UID", "DOAS_USER")
_OF_SLURM = ("ROOT", "DATA_", "WARNING", "RUN", "MODEL_")
"""Beginnings of what the prolog tells jobs, and of what scripts of ours take."""


@dataclass(frozen=True, slots=True)
class Personal:
    """``variables`` are the names of those that count, ``unknown`` those without a meaning;
    ``file`` is the file that was read, ``config`` what $MONARCHFS_CONFIG names."""

    environment: Layer = field(default_factory=dict)
    home: Layer = field(default_factory=dict)
    variables: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    file: str | None = None
    config: str | None = None


def read_personal(
    environ: Mapping[str, str], user: str | None, *, at_home: bool = True
) -> Personal:
    """What counts for a mount for ``user`` (None: nobody was named); nothing if that is not who
    runs this. Blocks as the home's file system does, unless only the environment is asked
    (``at_home``). Raises UsageError."""
    if acts_for_another(environ, user):
        return Personal()
    names = sorted(name for name in environ if name.startswith(PREFIX) and environ[name])
    known = [name for name in names if _is_known(name, environ[name])]
    layer = {_key_of(name): _value_of(name, environ[name]) for name in known}
    strange = [n for n in names if n not in known and not n.startswith(_RESERVED)]
    file = _file_of(environ) if at_home else None
    content = None if file is None else _read(file)
    return Personal(
        layer,
        {} if file is None or content is None else from_content(file, content),
        tuple(known),
        tuple(name for name in strange if _key_of(name) not in {*RUN_FLAGS, "config"}),
        None if content is None else file,
        environ.get(CONFIG_VARIABLE) or None,
    )


def acts_for_another(environ: Mapping[str, str], user: str | None) -> bool:
    """Whether root runs this for somebody else."""
    if os.geteuid() != 0:
        return False
    return any(environ.get(name) for name in _ACTING_FOR) or user not in (None, "0", "root")


def flag_of_run(environ: Mapping[str, str], user: str | None, name: str) -> bool:
    """Whether a variable switches one of RUN_FLAGS on. Raises UsageError."""
    variable = PREFIX + name.upper()
    text = environ.get(variable)
    if not text or acts_for_another(environ, user):
        return False
    return bool(parse_value("noexec", text, variable))  # any switch's parser


_RESERVED = tuple(PREFIX + beginning for beginning in _OF_SLURM)


def _key_of(name: str) -> str:
    return name.removeprefix(PREFIX).lower()


def _is_known(name: str, value: str) -> bool:
    key = _key_of(name)
    # A dataset called "path" has its mount point in a variable of that name, in jobs of Slurm.
    if key == "data_path" and value.startswith("/"):
        return False
    return key in OPTIONS and key not in _NOT_FROM_HERE


def _value_of(name: str, text: str) -> object:
    key = _key_of(name)
    try:
        value: object = split_options(text) if key == "tier" else text
    except UsageError as error:
        raise UsageError(f"environment variable {name}: {error}") from None
    return parse_value(key, value, f"environment variable {name}")


def _file_of(environ: Mapping[str, str]) -> str | None:
    base = environ.get("XDG_CONFIG_HOME") or ""
    if os.geteuid() == 0:
        # su, and sudo on some systems, leave another user's HOME.
        base = os.path.join(pwd.getpwuid(0).pw_dir, ".config")
    elif not os.path.isabs(base):
        home = environ.get("HOME") or ""
        base = os.path.join(home, ".config") if os.path.isabs(home) else ""
    files = [os.path.join(base, file) for file in FILES] if base else []
    return next(filter(os.path.lexists, files), None)


def _read(path: str) -> bytes | None:
    """None if it cannot be entered or is gone: HOME may be somebody else's. Raises UsageError for a
    file that others could have written."""
    try:
        # O_NONBLOCK: a FIFO is not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(
            f"cannot read configuration {path}: {error.strerror}: correct or remove it"
        ) from None
    with open(descriptor, "rb") as file:
        st = os.fstat(descriptor)
        if not stat.S_ISREG(st.st_mode) or st.st_uid not in (0, os.geteuid()):
            raise UsageError(f"configuration {path} is not a file of yours: remove it")
        if st.st_mode & 0o002:
            raise UsageError(f"configuration {path} can be written by others: chmod 644 {path}")
        return read_limited(file)
