"""The bundle of ``make bundle`` on nodes without Python, compiler and network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import monarchfs
from bundle import check
from tests.packages import nodes
from tests.support.mounting import requires_fuse, requires_root
from tests.support.surroundings import REPOSITORY, requires_namespaces

SETTINGS = REPOSITORY / "packaging" / "bundle" / "settings"
GLIBC = re.search(r"^glibc=([\d.]+)", SETTINGS.read_text(), re.M)
PLACE = "/opt/an odd place/monarchfs"


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with nodes.unpacked(nodes.required_bundle()) as found:
        yield found


def test_nothing_in_it_needs_a_newer_glibc_or_another_library(directory: Path) -> None:
    assert GLIBC is not None
    files = check.elf_files(directory)
    assert {path.name for path in files} >= {"python3"}
    assert list(check.complaints(directory, files, GLIBC[1])) == []


def test_it_has_what_install_system_installs_and_licences(directory: Path) -> None:
    for name in (
        "bin/monarchfs",
        "bin/mount.monarchfs",
        "share/man/man1/monarchfs.1",
        "share/man/man8/mount.monarchfs.8",
        "share/bash-completion/completions/monarchfs",
        "lib/systemd/system/monarchfs@.service",
        "lib/monarchfs/slurm/prolog",
        "share/monarchfs/monarchfs-slurm.toml",
        "share/licenses/monarchfs/LICENSE",
        "share/licenses/libfuse/LGPL2.txt",
    ):
        assert (directory / name).is_file(), name


def test_no_file_of_it_names_the_machine_that_built_it(directory: Path) -> None:
    place = str(REPOSITORY).encode()
    named = [
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and not path.is_symlink() and place in path.read_bytes()
    ]
    assert named == []


@requires_root
@requires_fuse
@requires_namespaces
@pytest.mark.parametrize("suite", nodes.SUITES)
def test_it_runs_read_only_from_any_path_on_a_bare_node(
    suite: str, directory: Path, tmp_path: Path
) -> None:
    root = nodes.required_root(suite)
    steps = nodes.tried_on(root, "inside.sh", "bundle", directory, tmp_path, place=PLACE)
    assert steps["version"] == f"monarchfs {monarchfs.__version__}\n" * 3
    within, kind, outside, *_removed = steps["run"].splitlines()
    assert within == outside
    assert kind == "fuse.monarchfs"
    assert {line.removeprefix("> ") for line in steps["left"].splitlines()} <= nodes.LEFT, steps
