"""Whether a directory of programs runs on other systems: every ELF file in it asks for no newer
glibc than the given one, and for no library but glibc's and those in it. Else `make bundle` fails.

    python3 check.py DIRECTORY GLIBC [--table]
"""

from __future__ import annotations

import argparse
import os
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

GLIBC_LIBRARIES = re.compile(r"(lib(c|m|dl|pthread|rt|util)|ld-linux[\w-]*)\.so\.\d")

# elf(5)
_DYNAMIC, _INTERPRETER, _LOAD = 2, 3, 1
_NEEDED, _STRINGS, _RUNPATH, _RPATH, _VERSIONS = 1, 5, 29, 15, 0x6FFFFFFE


@dataclass(slots=True)
class Elf:
    """What a program or library asks the system for."""

    interpreter: str = ""
    needed: list[str] = field(default_factory=list)
    runpath: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """Of symbols: ``GLIBC_2.17``, ..."""

    @property
    def glibc(self) -> tuple[int, ...]:
        """The oldest one that has all symbols; empty if none is asked for."""
        found = (re.fullmatch(r"GLIBC_([\d.]+)", version) for version in self.versions)
        return max((numbers(one[1]) for one in found if one), default=())


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def read_elf(path: Path) -> Elf | None:
    """None if the file is no 64-bit little-endian ELF file for a dynamic linker."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    (programs,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    headers = [
        struct.unpack_from("<IIQQQQQQ", data, programs + size * number) for number in range(count)
    ]
    found = Elf()
    dynamic: list[tuple[int, int]] = []
    for kind, _flags, offset, _address, _physical, length, _memory, _align in headers:
        if kind == _INTERPRETER:
            found.interpreter = data[offset : offset + length].rstrip(b"\0").decode()
        if kind == _DYNAMIC:
            dynamic = list(struct.iter_unpack("<QQ", data[offset : offset + length // 16 * 16]))
    if not dynamic:
        return None
    places = dict(dynamic)

    def at(address: int) -> int:
        for kind, _flags, offset, start, _physical, length, _memory, _align in headers:
            if kind == _LOAD and start <= address < start + length:
                return int(offset + address - start)
        raise ValueError(f"{path}: nothing is loaded at {address:#x}")

    strings = at(places[_STRINGS])

    def text(offset: int) -> str:
        return data[strings + offset : data.index(b"\0", strings + offset)].decode()

    found.needed = [text(value) for tag, value in dynamic if tag == _NEEDED]
    found.runpath = [
        part
        for tag, value in dynamic
        if tag in (_RUNPATH, _RPATH)
        for part in text(value).split(":")
    ]
    if _VERSIONS in places:
        found.versions = [text(name) for name in _version_names(data, at(places[_VERSIONS]))]
    return found


def _version_names(data: bytes, entry: int) -> Iterator[int]:
    """Of the table of needed versions (Elf64_Verneed, Elf64_Vernaux): where their names are."""
    while True:
        _version, count, _file, first, following = struct.unpack_from("<HHIII", data, entry)
        name = entry + first
        for _ in range(count):
            _hash, _flags, _other, offset, step = struct.unpack_from("<IHHII", data, name)
            yield offset
            name += step
        if not following:
            return
        entry += following


def elf_files(directory: Path) -> dict[Path, Elf]:
    """All of them below ``directory``, links left out."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and not path.is_symlink() and (elf := read_elf(path)) is not None:
            found[path] = elf
    return found


def complaints(directory: Path, files: dict[Path, Elf], glibc: str) -> Iterator[str]:
    """A line for each thing that another system may not have."""
    for path, elf in files.items():
        name = path.relative_to(directory)
        if elf.glibc > numbers(glibc):
            yield f"{name}: needs glibc {'.'.join(map(str, elf.glibc))}, newer than {glibc}"
        for library in elf.needed:
            if not GLIBC_LIBRARIES.fullmatch(library) and not _brought(
                directory, path, elf, library
            ):
                yield f"{name}: needs {library}, which is not in the bundle"
        for place in elf.runpath:
            if not place.startswith("$ORIGIN"):
                yield f"{name}: looks for libraries in {place}, outside of the bundle"


def _brought(directory: Path, path: Path, elf: Elf, library: str) -> bool:
    """Whether the dynamic linker finds ``library`` in ``directory``, wherever that lies."""
    for place in elf.runpath:
        found = Path(os.path.normpath(place.replace("$ORIGIN", str(path.parent)))) / library
        if found.is_relative_to(directory) and found.exists():
            return True
    return False


def table(directory: Path, files: dict[Path, Elf]) -> Iterator[str]:
    yield "| file | glibc | libraries |"
    yield "|---|---|---|"
    for path, elf in files.items():
        version = ".".join(map(str, elf.glibc)) or "-"
        yield f"| {path.relative_to(directory)} | {version} | {' '.join(elf.needed) or '-'} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("glibc", help="such as 2.28")
    parser.add_argument("--table", action="store_true", help="print what each file needs")
    given = parser.parse_args()
    directory = given.directory.resolve()
    files = elf_files(directory)
    if given.table:
        print("\n".join(table(directory, files)))
    wrong = list(complaints(directory, files, given.glibc))
    for line in wrong:
        print(line, file=sys.stderr)
    if not files:
        print(f"{directory}: no programs", file=sys.stderr)
    newest = max((elf.glibc for elf in files.values()), default=())
    if not wrong and files and not given.table:
        print(f"{len(files)} programs and libraries; glibc {'.'.join(map(str, newest))} or newer")
    return 1 if wrong or not files else 0


if __name__ == "__main__":
    sys.exit(main())
