"""What ``make deb``, ``rpm`` and ``wheelhouse`` make, on nodes without compiler and network."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import monarchfs
from tests.packages import nodes
from tests.support.mounting import requires_fuse, requires_root
from tests.support.surroundings import REPOSITORY, requires_namespaces

PATTERNS = {"deb": "monarchfs_*.deb", "rpm": "monarchfs-*.rpm"}
NEXT = monarchfs.__version__ + ".1"


def tried(root: Path, kind: str, brought: Path, tmp_path: Path) -> None:
    """It runs, and is removed without a trace."""
    layer = tmp_path / "layer"
    layer.mkdir()
    steps = nodes.tried_on(root, "inside.sh", kind, brought, layer)
    assert steps["version"] == f"monarchfs {monarchfs.__version__}\n" * 3
    assert {line.removeprefix("> ") for line in steps["left"].splitlines()} <= nodes.LEFT, steps


@requires_root
@requires_fuse
@requires_namespaces
@pytest.mark.parametrize("suite", nodes.SUITES)
@pytest.mark.parametrize("kind", PATTERNS)
def test_a_package_on_a_bare_node(kind: str, suite: str, tmp_path: Path) -> None:
    brought = tmp_path / "brought"
    brought.mkdir()
    shutil.copy(nodes.made(PATTERNS[kind], kind), brought)
    tried(nodes.required_root(suite), kind, brought, tmp_path)


@requires_root
@requires_fuse
@requires_namespaces
def test_wheels_on_a_node_with_python_alone(tmp_path: Path) -> None:
    wheel = nodes.made("wheelhouse/monarchfs-*.whl", "wheelhouse")
    root = nodes.required_root("bookworm")
    if "-cp311-" not in wheel.name:
        pytest.skip(f"needs wheels for bookworm's Python 3.11, not {wheel.name}")
    tried(root, "wheels", wheel.parent, tmp_path)


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


@requires_root
@requires_fuse
@requires_namespaces
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
