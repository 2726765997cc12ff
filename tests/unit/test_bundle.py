"""What makes the bundle, without making one: how its programs find it, what the check of its files
sees, what it takes from the package index. `tests/packages` tries a whole one."""

import os
import re
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from bundle import check, no_tls
from monarchfs.core import _session, _units
from tests.support.programs import execute
from tests.support.surroundings import REPOSITORY

BUNDLE = REPOSITORY / "packaging" / "bundle"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """bin/monarchfs of a bundle whose Python says how it was called."""
    release = tmp_path / "a place" / "release 1"
    for name, text in {
        "bin/monarchfs": (BUNDLE / "run").read_text().replace("@MODULE@", "the.module"),
        "python/bin/python3": '#!/bin/sh\nprintf "%s\\n" "$0" "$@"\n[ $file$target$here = abc ]\n',
    }.items():
        path = release / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        path.chmod(0o755)
    return release / "bin" / "monarchfs"


def said(*words: str | Path, path: str = "/usr/bin:/bin", cwd: Path | None = None) -> list[str]:
    environment = {"PATH": path, "CDPATH": "/", "file": "a", "target": "b", "here": "c"}
    return execute(words, env=environment, cwd=cwd, check=True).stdout.splitlines()


def python_of(program: Path) -> str:
    return str(program.parents[1] / "python" / "bin" / "python3")


def test_the_program_runs_the_python_beside_it(program: Path) -> None:
    words = ["-I", "-m", "the.module", "mount", "a b", "*"]
    assert said(program, "mount", "a b", "*") == [python_of(program), *words]
    assert said("./monarchfs", "mount", "a b", "*", cwd=program.parent)[0] == python_of(program)
    assert said("env", "monarchfs", path=f"{program.parent}:/usr/bin:/bin")[0] == python_of(program)


@pytest.mark.parametrize("relative", [False, True])
def test_links_are_followed(program: Path, tmp_path: Path, relative: bool) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    first, second = commands / "first", commands / "second"
    first.symlink_to(os.path.relpath(program, commands) if relative else program)
    second.symlink_to("first" if relative else first)
    for link in (first, second):
        found = said(link)[0]
        assert os.path.samefile(found, python_of(program))
        assert ".." not in Path(found).parts
    (tmp_path / "bin").symlink_to(program.parent)
    assert said(tmp_path / "bin" / "monarchfs")[0] == python_of(program)
    # One to the release stays, so that another release can follow.
    current, link = tmp_path / "current", tmp_path / "monarchfs"
    current.symlink_to(program.parents[1])
    link.symlink_to(current / "bin" / "monarchfs")
    assert said(link)[0] == str(current / "python" / "bin" / "python3")


@pytest.mark.parametrize(
    ("part", "glibc", "said"),
    [
        (_units, "2.99", ""),
        (_units, "2.1", r"part\.so: needs glibc 2\.[\d.]+, newer than 2\.1"),
        (_session, "2.99", r"part\.so: needs libfuse3\.so\.\d, which is not in the bundle"),
    ],
)
def test_the_check_sees_what_is_too_new_or_not_there(
    tmp_path: Path, part: ModuleType, glibc: str, said: str
) -> None:
    (tmp_path / "part.so").write_bytes(Path(str(part.__file__)).read_bytes())
    found = check.complaints(tmp_path, check.elf_files(tmp_path), glibc)
    # Where the Python that built it has every extension look for libraries (pyenv's does).
    own = re.findall(r"-rpath[,=](\S+)", sysconfig.get_config_var("LDSHARED"))
    lines = [line for line in found if not any(f" {place}, outside" in line for place in own)]
    assert len(lines) == bool(said)
    assert re.fullmatch(said, "".join(lines))


def test_what_is_taken_from_the_index_is_what_pyproject_asks_for() -> None:
    asked = re.search(
        r"^dependencies = \[\n(.*?)^\]", (REPOSITORY / "pyproject.toml").read_text(), re.M | re.S
    )
    assert asked is not None
    pinned = dict(
        re.findall(r"^([\w-]+)==([\d.]+)", (BUNDLE / "requirements.txt").read_text(), re.M)
    )
    found = re.findall(r'^ *"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?(;?)', asked[1], re.M)
    assert len(found) >= 10
    for name, least, below, only_for_some in found:
        if only_for_some:
            continue  # Pythons older than the bundle's
        version = check.numbers(pinned[name].rstrip("."))
        assert check.numbers(least) <= version, name
        assert not below or version < check.numbers(below), name


def test_python_without_tls_says_so() -> None:
    with pytest.raises(OSError, match="without TLS"):
        no_tls.create_default_context()
    with pytest.raises(OSError, match="without TLS"):
        no_tls.SSLContext(no_tls.PROTOCOL_TLS_CLIENT)
