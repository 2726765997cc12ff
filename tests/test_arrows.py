"""Who may import whom, as docs/ARCHITECTURE.md says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import monarchfs

PACKAGE = Path(monarchfs.__file__).parent

BOTTOM = {"types"}
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "bounded": {"types"},
    "trusted": set(),
    "metrics": set(),
    "units": set(),
    "escaping": set(),
    "quiet": set(),
    "config": {"types"},
    "placement": {"types"},
    "index": {"types"},
    "source": {"types", "metrics", "quiet"},
    "store": {"types"},
    "memory": set(),
    "cache": {"types", "placement", "index", "store", "metrics", "memory", "quiet"},
    "engine": {"types"},
    "prefetch": {"types", "cache", "source", "metrics", "quiet", "engine"},
    "fs": {"types", "cache", "source", "index", "metrics", "units", "mirror"},
    "fuse": {"types", "fs", "metrics", "bounded", "engine"},
    "privileges": set(),
    "logs": {"types"},
    "control": {"types", "config"},
    "commands": {"types", "control", "cache", "prefetch", "fs"},
    "status": {"types", "worker", "prefetch"},
    "exporter": {
        *("types", "config", "metrics", "worker", "control", "fuse", "privileges", "supervisor"),
    },
    "bootstrap": {"types", "config", "control"},
    "worker": {
        "bootstrap",
        *("types", "config", "metrics", "placement", "index", "source", "store", "cache"),
        *("prefetch", "fs", "fuse", "privileges", "logs", "control", "status", "commands"),
        *("memory", "exporter", "quiet", "escaping", "engine"),
    },
    "fsck": {"types", "cache", "index", "store"},
    "doctor": {"types", "config", "supervisor", "fuse", "bounded", "memory", "plan"},
    "plan": {"types", "placement", "store", "bounded", "walk"},
    "walk": set(),
    "mirror": {"types", "walk"},
    "supervisor": {
        "types",
        "config",
        "control",
        "fuse",
        "bounded",
        "trusted",
        "logs",
        "units",
        "escaping",
    },
    "inventory": {"types", "config", "supervisor", "fuse", "store", "bounded", "trusted"},
    "slurm": {
        *("types", "config", "control", "supervisor", "fuse", "bounded", "trusted", "units"),
        *("doctor", "inventory"),
    },
    "cli": {
        "types",
        "config",
        "control",
        "supervisor",
        "fuse",
        "bounded",
        "trusted",
        "logs",
        "doctor",
        "plan",
        "units",
        "escaping",
        "mirror",
        "exporter",
        "slurm",
        "inventory",
    },
}
"""``fuse`` below ``supervisor``, ``cli`` and ``exporter`` means mount parts, see the last test."""

MOUNT_PARTS = {"mount", "mountinfo", "protocol", "requests", "slots", "unmount"}
ONLY_USER = {"lmdb": "index", "pyfuse3": "fuse"}


def imports() -> list[tuple[str, str, str]]:
    """(our unit, its file, the full name it imports), for all of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        unit = relative.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                assert node.level == 0, f"{relative}: relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            found += [(unit, str(relative), name) for name in names]
    return found


IMPORTS = imports()


@pytest.mark.parametrize("unit", sorted({unit for unit, _f, _n in IMPORTS}))
def test_a_module_imports_only_what_it_may(unit: str) -> None:
    if unit == "__init__":
        return
    for user, file, name in IMPORTS:
        if user == unit and name.startswith("monarchfs."):
            imported = name.split(".")[1]
            allowed = MAY_IMPORT[unit] | {unit, "__version__"}
            assert imported in allowed, f"{file} imports {name}"


@pytest.mark.parametrize("library", sorted(ONLY_USER))
def test_a_library_has_one_user(library: str) -> None:
    users = {unit for unit, _f, name in IMPORTS if name.split(".")[0] == library}
    assert users == {ONLY_USER[library]}


def test_the_supervisor_and_the_command_line_stay_light() -> None:
    for unit, file, name in IMPORTS:
        if unit in ("supervisor", "cli", "control", "config", "bounded"):
            assert name.split(".")[0] not in ("trio", "pyfuse3", "lmdb"), f"{file}: {name}"
        if unit in ("supervisor", "cli", "exporter") and name.startswith("monarchfs.fuse."):
            assert name.split(".")[2] in MOUNT_PARTS, f"{file}: {name}"
