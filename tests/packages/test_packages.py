"""What ``make bundle``, ``deb``, ``rpm`` and ``wheelhouse`` make, on nodes without Python, compiler
and network; the modulefile; and as text, Spack's packages and the definition of the container."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import monarchfs
from bundle import check
from tests.packages import nodes
from tests.support.mounting import requires_fuse, requires_root
from tests.support.programs import execute
from tests.support.surroundings import REPOSITORY, requires_namespaces

SETTINGS = REPOSITORY / "packaging" / "bundle" / "settings"
GLIBC = re.search(r"^glibc=([\d.]+)", SETTINGS.read_text(), re.M)
PLACE = "/opt/an odd place/monarchfs"
PATTERNS = {"deb": "monarchfs_*.deb", "rpm": "monarchfs-*.rpm"}
NEXT = monarchfs.__version__ + ".1"

Test = TypeVar("Test", bound=Callable[..., object])


def on_a_node(test: Test) -> Test:
    marked: Test = requires_root(requires_fuse(requires_namespaces(test)))
    return marked


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with nodes.unpacked(nodes.required_bundle()) as found:
        yield found


def test_nothing_in_it_needs_a_newer_glibc_or_another_library(directory: Path) -> None:
    assert GLIBC is not None
    files = check.elf_files(directory)
    assert {path.name for path in files} >= {"python3"}
    assert list(check.complaints(directory, files, GLIBC[1])) == []
    places = [str(REPOSITORY / name).encode() for name in ("build/bundle", "monarchfs/core")]
    named = [
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and not path.is_symlink()
        if any(place in path.read_bytes() for place in places)
    ]
    assert named == []
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


def tried(
    suite: str, kind: str, brought: Path, tmp_path: Path, place: str = "/brought"
) -> dict[str, str]:
    """It runs, and is removed without a trace."""
    root, layer = nodes.required_root(suite), tmp_path / "layer"
    layer.mkdir()
    steps = nodes.tried_on(root, "inside.sh", kind, brought, layer, place=place)
    assert steps["version"] == f"monarchfs {monarchfs.__version__}\n" * 3
    assert {line.removeprefix("> ") for line in steps["left"].splitlines()} <= nodes.LEFT, steps
    return steps


@on_a_node
@pytest.mark.parametrize("suite", nodes.SUITES)
def test_it_runs_from_any_path_on_a_bare_node(suite: str, directory: Path, tmp_path: Path) -> None:
    steps = tried(suite, "bundle", directory, tmp_path, PLACE)
    within, kind, outside, *_removed = steps["run"].splitlines()
    assert within == outside
    assert kind == "fuse.monarchfs"


@on_a_node
@pytest.mark.parametrize("suite", nodes.SUITES)
@pytest.mark.parametrize("kind", PATTERNS)
def test_a_package_on_a_bare_node(kind: str, suite: str, tmp_path: Path) -> None:
    brought = tmp_path / "brought"
    brought.mkdir()
    shutil.copy(nodes.made(PATTERNS[kind], kind), brought)
    tried(suite, kind, brought, tmp_path)


@on_a_node
def test_wheels_on_a_node_with_python_alone(tmp_path: Path) -> None:
    wheel = nodes.made("wheelhouse/monarchfs-*.whl", "wheelhouse")
    if "-cp311-" not in wheel.name:
        pytest.skip(f"needs wheels for bookworm's Python 3.11, not {wheel.name}")
    tried("bookworm", "wheels", wheel.parent, tmp_path)


@pytest.fixture(scope="module")
def next_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle's directory, as of a later release."""
    with nodes.unpacked(nodes.required_bundle()) as directory:
        later = tmp_path_factory.mktemp("next") / "monarchfs"
        shutil.copytree(directory, later, symlinks=True)
    (package,) = later.glob("python/lib/python3*/site-packages/monarchfs")
    text = (package / "__init__.py").read_text()
    (package / "__init__.py").write_text(text.replace(monarchfs.__version__, NEXT))
    for compiled in (package / "__pycache__").glob("__init__.*.pyc"):
        compiled.unlink()
    return later


@on_a_node
@pytest.mark.parametrize("kind", PATTERNS)
def test_mounts_stay_with_their_release(kind: str, next_release: Path, tmp_path: Path) -> None:
    tool = {"deb": "dpkg-deb", "rpm": "rpmbuild"}[kind]
    if shutil.which(tool) is None:
        pytest.skip(f"needs {tool}")
    layer = tmp_path / "layer"
    layer.mkdir()
    for release in ("old", "new"):
        (tmp_path / "brought" / release).mkdir(parents=True)
    shutil.copy(nodes.made(PATTERNS[kind], kind), tmp_path / "brought" / "old")
    subprocess.run(
        [REPOSITORY / "packaging/system/build", kind, next_release, tmp_path / "brought" / "new"],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    root = nodes.required_root("trixie")
    steps = nodes.tried_on(root, "upgrade.sh", kind, tmp_path / "brought", layer)
    assert steps["wrong"] == "", steps
    for step in ("upgrade", "rollback"):
        counts = re.search(r"(\d+) rounds, (\d+) kills", steps[step])
        assert counts is not None
        assert int(counts[1]) > 0, steps
        assert int(counts[2]) > 0, steps
    # Both releases while each has a mount, and the one that is installed alone afterwards.
    assert steps["upgrade"].split()[-3:] == [monarchfs.__version__, NEXT, "theirs"]
    assert steps["rollback"].split()[-3:] == [monarchfs.__version__, NEXT, "theirs"]
    assert steps["unused"].split()[-2:] == [monarchfs.__version__, "theirs"]
    assert NEXT not in steps["unused"].split()
    *_said, last, file = steps["uninstall in use"].split()
    assert (last, file) == ("/opt/monarchfs/theirs:", "file")
    assert steps["uninstall in use"].split()[-4:-2] == ["/opt/monarchfs:", "theirs"]


PROGRAMS = {
    "environment-modules": "/usr/bin/modulecmd",
    "lmod": "/usr/share/lmod/lmod/libexec/lmod",
}


@pytest.mark.parametrize("package", PROGRAMS)
def test_it_finds_the_directory_in_which_it_lies(package: str, tmp_path: Path) -> None:
    program = PROGRAMS[package]
    if not Path(program).exists():
        pytest.skip(f"needs {package}: apt-get install {package}")
    root = tmp_path / "monarchfs"
    (root / "bin").mkdir(parents=True)
    (root / "share" / "modulefiles" / "monarchfs").mkdir(parents=True)
    (root / "bin" / "monarchfs").write_text("#!/bin/sh\necho it runs\n")
    (root / "bin" / "monarchfs").chmod(0o755)
    shutil.copy(REPOSITORY / "packaging" / "modulefile", root / "share/modulefiles/monarchfs/0.1.0")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "MODULEPATH": str(root / "share" / "modulefiles"),
    }
    shell = "sh" if package == "environment-modules" else "bash"
    loads = execute([program, shell, "load", "monarchfs"], env=environment, check=True)
    then = f"{loads.stdout}\ncommand -v monarchfs; monarchfs; echo $MANPATH"
    done = execute(["bash", "-c", then], env=environment, check=True)
    where, says, manual = done.stdout.splitlines()
    assert where == str(root / "bin" / "monarchfs"), loads.stderr
    assert says == "it runs"
    # The empty path stands for the system's pages.
    assert manual.startswith(f"{root}/share/man:"), manual


SPACK = REPOSITORY / "packaging" / "spack" / "spack_repo" / "monarchfs"
PACKAGES = SPACK / "packages"


def calls(path: Path, name: str) -> list[ast.Call]:
    nodes = ast.walk(ast.parse(path.read_text()))
    found = [node for node in nodes if isinstance(node, ast.Call)]
    return [node for node in found if isinstance(node.func, ast.Name) and node.func.id == name]


def first_words(path: Path, name: str) -> list[str]:
    words = [ast.literal_eval(call.args[0]) for call in calls(path, name)]
    assert all(isinstance(word, str) for word in words)
    return words


def test_the_bounds_are_those_of_pyproject() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    listed = project.partition("\ndependencies = [\n")[2].partition("\n]")[0]
    wanted = set()
    for name, lower, upper in re.findall(r'"([a-z0-9-]+)>=([\d.]+)(?:,<([\d.]+))?', listed):
        # Spack's range takes along what its end begins: 3.5.9 is in 3.4:3.5, and 3.6 is not.
        last = re.sub(r"\d+$", lambda end: str(int(end[0]) - 1), upper)
        wanted.add(f"py-{name}@{lower}:{last}")
    python = re.search(r'requires-python = ">=([\d.]+)"', project)
    setuptools = re.search(r'requires = \["setuptools>=(\d+)"\]', project)
    assert python is not None
    assert setuptools is not None
    wanted |= {f"python@{python[1]}:", f"py-setuptools@{setuptools[1]}:"}
    asked = first_words(PACKAGES / "monarchfs" / "package.py", "depends_on")
    assert {word for word in asked if word.startswith("py")} == wanted
    source = (REPOSITORY / "monarchfs" / "__init__.py").read_text()
    version = re.search(r'__version__ = "(.*)"', source)
    assert version is not None
    package = PACKAGES / "monarchfs" / "package.py"
    assert first_words(package, "version") == [version[1]]
    assert f"monarchfs-{version[1]}.tar.gz" in package.read_text()
    assert (SPACK / "repo.yaml").read_text() == "repo:\n  namespace: monarchfs\n  api: v2.0\n"
    assert SPACK.parent.name == "spack_repo"  # Spack imports it by this name
    files = sorted(PACKAGES.glob("*/package.py"))
    assert len(files) == 6
    for path in files:
        title = "".join(part.capitalize() for part in path.parent.name.split("_"))
        body = ast.parse(path.read_text()).body
        assert title in [node.name for node in body if isinstance(node, ast.ClassDef)]
        for call in calls(path, "version") if path.parent.name != "monarchfs" else ():
            (digest,) = [word.value for word in call.keywords if word.arg == "sha256"]
            assert re.fullmatch("[0-9a-f]{64}", ast.literal_eval(digest))


def test_the_programs_of_the_bundle_are_modules_that_can_be_run() -> None:
    build = (REPOSITORY / "packaging" / "bundle" / "build").read_text()
    (programs,) = re.findall(r"for program in (.*); do", build)
    for word in programs.split():
        program, module = word.split(":")
        done = execute([sys.executable, "-I", "-m", module, "--help"])
        assert program in done.stdout, done.stderr
    definition = (REPOSITORY / "packaging" / "monarchfs.def").read_text()
    files = definition.partition("%files")[2].partition("%post")[0]
    taken = re.findall(r"^    (\S+) /", files, re.MULTILINE)
    build = (REPOSITORY / "packaging" / "bundle" / "build").read_text()
    assert taken == ["dist/monarchfs-*-linux-*.tar.gz"]
    assert "dist/monarchfs-VERSION-linux-ARCHITECTURE.tar.gz" in build
