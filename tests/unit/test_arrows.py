"""Who may import whom, as docs/ARCHITECTURE.md says."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import monarchfs

PACKAGE = Path(monarchfs.__file__).parent

ARCHITECTURE = PACKAGE.parent / "docs" / "ARCHITECTURE.md"
ROW = re.compile(r"^\| `(\w+)` \| .* \| ([^|]*) \|$", re.MULTILINE)

MOUNT_PARTS = {
    *("connection", "mount", "mountinfo", "protocol", "requests", "handle_table", "unmount")
}
WITH_TRIO = {"http_server", "low_priority", "threads"}
ONLY_USER = {"lmdb": "index", "pyfuse3": "fuse"}


def unit_of(parts: Sequence[str]) -> str:
    """The unit of what lies at this path below monarchfs: what is in a package of a package belongs
    to the inner one."""
    if parts[0] == "__main__.py":  # python -m monarchfs
        return "cli"
    inner = len(parts) > 1 and (PACKAGE / parts[0] / parts[1]).is_dir()
    return parts[1] if inner else parts[0].partition(".")[0]


@cache
def nodes_of_files() -> dict[Path, list[ast.AST]]:
    return {
        path: list(ast.walk(ast.parse(path.read_text("utf-8"))))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def imports() -> list[tuple[str, str, str]]:
    """(our unit, its file, the full name it imports), for all of the package."""
    found = []
    for path, nodes in nodes_of_files().items():
        relative = path.relative_to(PACKAGE)
        unit = unit_of(relative.parts)
        for node in nodes:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                assert node.level == 0, f"{relative}: relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            found += [(unit, str(relative), name) for name in names]
    return found


def includes() -> dict[str, set[str]]:
    """What each file of the C part includes of ours. A header and its .c file are one."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.[ch]"):
        name = str(path.relative_to(PACKAGE).with_suffix(""))
        for other in re.findall(r'^#include "(.*)\.h"', path.read_text("utf-8"), re.MULTILINE):
            included = str((path.parent / other).resolve().relative_to(PACKAGE.resolve()))
            found.setdefault(name, set()).update({included} - {name})
    return found


INCLUDES = includes()
TABLE = ARCHITECTURE.read_text("utf-8").partition("| unit | holds | may import |")[2]
MAY_IMPORT = {unit: set(re.findall(r"`(\w+)`", names)) for unit, names in ROW.findall(TABLE)}


def test_the_table_has_every_unit_and_only_what_it_imports() -> None:
    units = {path.stem for path in PACKAGE.glob("*.py")}
    units |= {path.parent.name for path in PACKAGE.rglob("*/*.py")}
    assert set(MAY_IMPORT) == units - {"__init__", "__main__", "__pycache__"}
    used = {(unit, unit_of(name.split(".")[1:])) for unit, _f, name in imports() if "." in name}
    unused = [
        (unit, other)
        for unit, others in MAY_IMPORT.items()
        for other in others
        if (unit, other) not in used
    ]
    assert not unused
    wrong = [
        f"{file} imports {name}"
        for unit, file, name in imports()
        if unit != "__init__" and name.startswith("monarchfs.")
        if unit_of(name.split(".")[1:]) not in MAY_IMPORT[unit] | {unit, "__version__"}
    ]
    assert not wrong
    modules = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for _unit, file, name in imports():
        package = name.rpartition(".")[0]
        is_c_part = (PACKAGE.parent / name.replace(".", "/")).with_suffix(".pyi").exists()
        imported = name if name in modules else package
        if imported in modules and not is_c_part:
            graph.setdefault(module_of(PACKAGE / file), set()).add(imported)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_a_c_file_includes_only_what_it_may() -> None:
    wrong = {}
    for name, others in INCLUDES.items():
        unit = unit_of(name.split("/"))
        allowed = MAY_IMPORT[unit] | {unit}
        if against := {other for other in others if unit_of(other.split("/")) not in allowed}:
            wrong[name] = against
    assert not wrong
    TopologicalSorter(INCLUDES).prepare()


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def test_libraries_are_declared_and_few_load_them() -> None:
    """Another package may bring it, and leave it out one day."""
    text = (PACKAGE.parent / "pyproject.toml").read_text("utf-8")
    lists = re.findall(r"^(?:dependencies|darshan) = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    declared = {re.split(r"[^\w-]", word)[0] for word in re.findall(r'"(.*?)"', "".join(lists))}
    imported = {name.split(".")[0] for _unit, _file, name in imports()}
    # The last one is the type checker's.
    others = imported - sys.stdlib_module_names - {"monarchfs", "tomllib", "typing_extensions"}
    assert others == {name.replace("-", "_") for name in declared}
    used = {(name.split(".")[0], unit) for unit, _f, name in imports()}
    assert {one for one in used if one[0] in ONLY_USER} == {*ONLY_USER.items()}
    for unit, file, name in imports():
        light = unit == "system" and Path(file).stem not in WITH_TRIO
        if light or unit in ("supervisor", "cli", "control", "config", "text", "hints"):
            assert name.split(".")[0] not in ("trio", "pyfuse3", "lmdb"), f"{file}: {name}"
            if name.startswith("monarchfs.system."):
                assert name.split(".")[2] not in WITH_TRIO, f"{file}: {name}"
        outside = unit in ("supervisor", "cli", "exporter", "hints")
        if outside and name.startswith("monarchfs.fuse."):
            assert name.split(".")[2] in MOUNT_PARTS, f"{file}: {name}"


def test_a_class_name_stands_for_one_class() -> None:
    names = Counter(
        node.name
        for nodes in nodes_of_files().values()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_document_names_files_and_methods_that_there_are() -> None:
    text = ARCHITECTURE.read_text("utf-8")
    files = re.findall(r"`((?:[a-z]+/)+_?[a-z_]+\.(?:py|c|h))`", text)
    assert len(files) > 100
    roots = (PACKAGE, PACKAGE.parent)
    assert not [name for name in files if not any((root / name).exists() for root in roots)]
    methods = set(re.findall(r"`([A-Z][A-Za-z]+\.[a-z_]+)`", text))
    assert len(methods) > 10
    trees = [*nodes_of_files().values()]
    trees += [list(ast.walk(ast.parse(path.read_text()))) for path in PACKAGE.rglob("*.pyi")]
    classes = [node for nodes in trees for node in nodes if isinstance(node, ast.ClassDef)]
    known = {
        f"{one.name}.{name}"
        for one in classes
        for node in ast.walk(one)
        for name in (getattr(node, "name", None), getattr(node, "attr", None), _target(node))
    }
    assert not methods - known


def _target(node: ast.AST) -> str | None:
    """The field that a class declares here."""
    declares = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    return node.target.id if declares else None  # type: ignore[attr-defined]
