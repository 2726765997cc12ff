"""Spack's packages and the definition of the container, as text: neither program is needed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.surroundings import REPOSITORY

PLACE = REPOSITORY / "packaging" / "spack" / "spack_repo" / "monarchfs"
PACKAGES = PLACE / "packages"


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


def test_the_version_is_this_one() -> None:
    source = (REPOSITORY / "monarchfs" / "__init__.py").read_text()
    version = re.search(r'__version__ = "(.*)"', source)
    assert version is not None
    package = PACKAGES / "monarchfs" / "package.py"
    assert first_words(package, "version") == [version[1]]
    assert f"monarchfs-{version[1]}.tar.gz" in package.read_text()


def test_each_package_has_the_class_that_spack_looks_for() -> None:
    assert (PLACE / "repo.yaml").read_text() == "repo:\n  namespace: monarchfs\n  api: v2.0\n"
    assert PLACE.parent.name == "spack_repo"  # Spack imports it by this name
    files = sorted(PACKAGES.glob("*/package.py"))
    assert len(files) == 6
    for path in files:
        wanted = "".join(part.capitalize() for part in path.parent.name.split("_"))
        body = ast.parse(path.read_text()).body
        assert wanted in [node.name for node in body if isinstance(node, ast.ClassDef)]
        for call in calls(path, "version") if path.parent.name != "monarchfs" else ():
            (digest,) = [word.value for word in call.keywords if word.arg == "sha256"]
            assert re.fullmatch("[0-9a-f]{64}", ast.literal_eval(digest))


def test_the_container_takes_the_bundle() -> None:
    definition = (REPOSITORY / "packaging" / "monarchfs.def").read_text()
    files = definition.partition("%files")[2].partition("%post")[0]
    taken = re.findall(r"^    (\S+) /", files, re.MULTILINE)
    build = (REPOSITORY / "packaging" / "bundle" / "build").read_text()
    assert taken == ["dist/monarchfs-*-linux-*.tar.gz"]
    assert "dist/monarchfs-VERSION-linux-ARCHITECTURE.tar.gz" in build
