"""A process that opens and reads files as it is told: a test itself must not hang in a mount.

It answers JSON lines on standard input, ``[CALL, ARGUMENT...]``, with a JSON line on standard
output: ``{"result": ...}``, ``{"error": ERRNO}`` by its name, or ``{"wrong": TEXT}``.
"""

import errno
import hashlib
import json
import mmap
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support import trees
from tests.support.programs import Running

REPOSITORY = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tests.support.reading"]
MIB = 1 << 20
MOST_WHOLE_BYTES = MIB
"""What ``loop`` reads as a whole, too."""
KEPT = 6
"""Files that ``loop`` has open, and mapped, for some time."""


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Reader:
    """The one who asks. Changing: ``held``, names of files that the process has open."""

    def __init__(self, command: Sequence[str]) -> None:
        """``command`` runs `COMMAND`, maybe as another user."""
        self.held: list[str] = []
        self.process = Running(command, cwd=REPOSITORY)

    def tell(self, *call: object) -> None:
        self.process.tell(json.dumps(call))

    def answer(self) -> Any:
        """Raises OSError if the process had one, AssertionError if it read something wrong."""
        answer = json.loads(self.process.line() or '{"wrong": "the reader died"}')
        if "error" in answer:
            raise OSError(getattr(errno, answer["error"]), "in a reader")
        assert "wrong" not in answer, answer["wrong"]
        return answer["result"]

    def ask(self, *call: object) -> Any:
        self.tell(*call)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


# -- in the process

_fds: dict[str, int] = {}
_maps: dict[str, mmap.mmap] = {}
_listings: dict[str, tuple[list[str], Iterator[os.DirEntry[str]]]] = {}


def _drop(fd: int) -> None:
    """So that the kernel asks."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _whole(fd: int) -> bytes:
    data = b""
    while piece := os.pread(fd, MIB, len(data)):
        data += piece
    return data


def _mapped(fd: int) -> bytes:
    with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as pages:
        return pages[:]


def _direct(fd: int) -> bytes:
    size, page, data = os.fstat(fd).st_size, mmap.mmap(-1, MIB), b""
    while len(data) < size:
        data += page[: os.preadv(fd, [page], len(data))]
    return data


WAYS = {"whole": _whole, "again": _whole, "mapped": _mapped, "direct": _direct}


def _read_file(path: str, way: str) -> str:
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if way == "direct" else 0))
    try:
        if way != "again":
            _drop(fd)
        return digest(WAYS[way](fd))
    finally:
        os.close(fd)


def _read(root: str, names: list[str], way: str, seed: int) -> dict[str, str]:
    """Digests by name; the order is random if there is a seed."""
    if seed:
        random.Random(seed).shuffle(names)
    return {name: _read_file(f"{root}/{name}", way) for name in names}


def _read_at_once(root: str, names: list[str], way: str) -> dict[str, str]:
    """By a thread each; an error in place of the digest."""
    found = {}

    def read(name: str) -> None:
        try:
            found[name] = _read_file(f"{root}/{name}", way)
        except OSError as error:
            found[name] = errno.errorcode[error.errno or 0]

    threading.stack_size(1 << 16)
    threads = [threading.Thread(target=read, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _part(root: str, name: str, offset: int, size: int, way: str) -> str:
    fd = os.open(f"{root}/{name}", os.O_RDONLY | (os.O_DIRECT if way == "direct" else 0))
    try:
        page = mmap.mmap(-1, size)
        return digest(page[: os.preadv(fd, [page], offset)])
    finally:
        os.close(fd)


def _open(root: str, names: list[str], way: str = "whole") -> None:
    for name in names:
        _fds[name] = os.open(f"{root}/{name}", os.O_RDONLY)
        if way == "mapped":
            _maps[name] = mmap.mmap(_fds[name], 0, mmap.MAP_SHARED, mmap.PROT_READ)


def _held(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        if name in _maps:
            found[name] = digest(_maps[name][:])
        else:
            _drop(_fds[name])
            found[name] = digest(_whole(_fds[name]))
    return found


def _close(names: list[str]) -> None:
    for name in names:
        if name in _maps:
            _maps.pop(name).close()
        os.close(_fds.pop(name))


def _list_some(path: str) -> None:
    entries = os.scandir(path)
    _listings[path] = [next(entries).name], entries


def _list_rest(path: str) -> list[str]:
    names, entries = _listings.pop(path)
    return sorted([*names, *(entry.name for entry in entries)])


def _loop(root: str, names: Sequence[str], truth: str, seed: int) -> tuple[int, float]:
    """Here and there until another line comes, with the largest file and some others open and
    mapped all the while, and the directory listed; how often, and how many seconds the longest
    round took."""
    chance, rounds, worst = random.Random(seed), 0, 0.0
    contents = {name: Path(truth, name).read_bytes() for name in names}
    listing = sorted(os.listdir(truth))
    largest = max(names, key=lambda name: len(contents[name]))
    held = [(os.open(f"{root}/{largest}", os.O_RDONLY), largest)]
    maps: list[tuple[mmap.mmap, str]] = []
    print(json.dumps({"result": "reading"}), flush=True)
    while rounds < 10 or not select.select([sys.stdin], [], [], 0)[0]:
        began = time.monotonic()
        name = chance.choice(names)
        fd = os.open(f"{root}/{name}", os.O_RDONLY)
        held.append((fd, name))
        _drop(fd)
        is_small = len(contents[name]) <= MOST_WHOLE_BYTES
        if is_small and chance.random() < 0.2:
            maps.append((mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ), name))
        elif is_small:
            assert _whole(fd) == contents[name], f"{name}: wrong bytes"
        else:
            _compare(fd, name, contents[name], chance)
        fd, name = held.pop(chance.randrange(1, len(held))) if len(held) > KEPT else held[0]
        _drop(fd)
        _compare(fd, name, contents[name], chance)
        if fd != held[0][0]:
            os.close(fd)
        if len(maps) > KEPT:
            pages, name = maps.pop(chance.randrange(len(maps)))
            assert pages[:] == contents[name], f"{name}: wrong bytes in a map"
            pages.close()
        assert sorted(os.listdir(root)) == listing, "names are missing"
        rounds += 1
        worst = max(worst, time.monotonic() - began)
    for pages, _name in maps:
        pages.close()
    for fd, _name in held:
        os.close(fd)
    return rounds, worst


def _compare(fd: int, name: str, contents: bytes, chance: random.Random) -> None:
    at = chance.randrange(len(contents))
    assert os.pread(fd, 5000, at) == contents[at : at + 5000], f"{name}: wrong bytes at {at}"


CALLS: dict[str, Callable[..., Any]] = {
    **{"read": _read, "read at once": _read_at_once, "part": _part, "open": _open, "held": _held},
    "held sizes": lambda names: [os.fstat(_fds[name]).st_size for name in names],
    "close": _close,
    "list": lambda path: sorted(os.listdir(path)),
    "list some": _list_some,
    "list rest": _list_rest,
    "stat": lambda path: os.stat(path).st_size,
    "differences": lambda source, mount: trees.differences(Path(source), Path(mount)),
    "loop": _loop,
    "end": lambda: None,
}


def main() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR1, True)
    # Not by sys.stdin's buffer, which would hide from select(2) that there is another line.
    for line in iter(_line, ""):
        name, *arguments = json.loads(line)
        try:
            answer = {"result": CALLS[name](*arguments)}
        except OSError as error:
            answer = {"error": errno.errorcode[error.errno or 0]}
        except AssertionError as error:
            answer = {"wrong": str(error)}
        print(json.dumps(answer), flush=True)


def _line() -> str:
    found = b""
    while not found.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return ""
        found += byte
    return found.decode()


if __name__ == "__main__":
    main()
