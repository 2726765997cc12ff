"""Sources whose listings do not say what a look-up says: other inode numbers (d_ino), as overlays
of two file systems and subvolumes of btrfs have them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from monarchfs.fs.refresh import Refresh
from monarchfs.source.posix import SourceEntry
from monarchfs.types import ROOT_INO, FreshnessMode, Lane, Node
from tests.support.lookups import IMMUTABLE, OPEN, TTL, Hours, names
from tests.support.mirror import Area, Mirror, content

FILES = 12
"""In each of four directories."""

Lie = Callable[[SourceEntry], int]


@pytest.fixture
def tree(area: Area) -> dict[str, bytes]:
    """Path and content of each file."""
    return {
        f"{top}/{below}/f{number}": area.write(
            f"{top}/{below}/f{number}", content(100 + number, seed)
        )
        for seed, (top, below) in enumerate((t, b) for t in "ab" for b in "cd")
        for number in range(FILES)
    }


def lies_of(area: Area) -> dict[str, Lie]:
    """By what they are about."""
    root = area.source.stat().st_ino
    paths = sorted(area.source.rglob("*"))
    inos = [path.stat().st_ino for path in paths]
    after = dict(zip(inos, inos[1:] + inos[:1], strict=True))
    files = [path.stat().st_ino for path in paths if path.is_file()]
    neighbours = dict(zip(files, files[1:] + files[:1], strict=True))
    elsewhere = random.Random(1)
    return {
        "the next file's": lambda entry: neighbours.get(entry.ino, entry.ino),
        "the next name's, of whatever type": lambda entry: after.get(entry.ino, root),
        "the root's": lambda _entry: root,
        "the same for all": lambda _entry: files[0],
        "another one each time": lambda _entry: elsewhere.choice(inos),
        "nobody's": lambda entry: entry.ino + (1 << 40),
    }


LIES = (
    *("the next file's", "the next name's, of whatever type", "the root's"),
    *("the same for all", "another one each time", "nobody's"),
)


async def walked(mirror: Mirror) -> dict[str, Node]:
    """All that a walk by listings finds, each name looked up."""
    found: dict[str, Node] = {}
    waiting = [("", ROOT_INO)]
    while waiting:
        path, ino = waiting.pop()
        for name in await names(mirror, ino):
            node = await mirror.tree.names.find(ino, name, Lane.DEMAND)
            assert node is not None, name
            here = f"{path}{os.fsdecode(name)}"
            found[here] = node
            assert len(found) < 1000, "the tree does not end"
            if node.stat.is_directory:
                waiting.append((f"{here}/", node.ino))
    return found


async def check(mirror: Mirror, area: Area, tree: dict[str, bytes]) -> None:
    """Listed first, then read by path."""
    found = await walked(mirror)
    there = {str(path.relative_to(area.source)) for path in area.source.rglob("*")}
    assert found.keys() == there
    wrong = []
    for path, data in tree.items():
        try:
            if await mirror.read_file(path) != data:
                wrong.append(f"{path}: bytes of another file")
        except OSError as error:
            wrong.append(f"{path}: {error}")
    assert not wrong, f"{len(wrong)} of {len(tree)} files are wrong: {wrong[:3]}"
    assert len({node.ino for node in found.values()}) == len(found)


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL, OPEN])
@pytest.mark.parametrize("lie", LIES)
async def test_what_a_listing_numbers_is_not_taken_for_a_file(
    area: Area, tree: dict[str, bytes], hours: Hours, mode: FreshnessMode, lie: str
) -> None:
    for _mount in range(2):
        await area.settled()
        async with area.mount(mode=mode, ttl=60) as mirror:
            mirror.posix.lists_as = lies_of(area)[lie]
            await check(mirror, area, tree)
            hours.pass_by(61)
            area.write("a/new", b"so that the directory is listed again")
            hours.pass_by(61)
            if mode is IMMUTABLE:
                await Refresh(mirror.tree, mirror.kernel).run()
            await check(mirror, area, {**tree, "a/new": b"so that the directory is listed again"})
            await mirror.idle()
            await mirror.settled()
