"""Sources whose listings do not say what a look-up says: other inode numbers (d_ino), as overlays
of two file systems and subvolumes of btrfs have them; and fewer names (.snapshot)."""

import os
import random
from collections.abc import Callable

import pytest
import trio

from monarchfs.metadata.refresh import Refresh
from monarchfs.metadata.tree import Missing
from monarchfs.types import ROOT_INO, FreshnessMode, Lane, Node, SourceStat
from tests.support.lookups import IMMUTABLE, OPEN, TTL, Hours, asked, names
from tests.support.mirror import Area, Mirror, content

FILES = 5
"""In each of four directories."""


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


class Numbers:
    """Of all that there is, in the order of the paths."""

    def __init__(self, area: Area) -> None:
        paths = sorted(area.source.rglob("*"))
        self.root = area.source.stat().st_ino
        self.all = [path.stat().st_ino for path in paths]
        self.files = [path.stat().st_ino for path in paths if path.is_file()]
        self.random = random.Random(1)

    def after(self, ino: int, among: list[int], otherwise: int) -> int:
        return among[(among.index(ino) + 1) % len(among)] if ino in among else otherwise


LIES: dict[str, Callable[[Numbers, int], int]] = {
    "the next file's": lambda numbers, ino: numbers.after(ino, numbers.files, ino),
    "the next name's, of whatever type": lambda numbers, ino: numbers.after(
        ino, numbers.all, numbers.root
    ),
    "the root's": lambda numbers, _ino: numbers.root,
    "the same for all": lambda numbers, _ino: numbers.files[0],
    "another one each time": lambda numbers, _ino: numbers.random.choice(numbers.all),
    "nobody's": lambda _numbers, ino: ino + (1 << 40),
}


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
    assert found.keys() == {str(path.relative_to(area.source)) for path in area.source.rglob("*")}
    for path, data in tree.items():
        assert await mirror.read_file(path) == data, path
    assert len({node.ino for node in found.values()}) == len(found)


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL, OPEN])
@pytest.mark.parametrize("lie", LIES)
async def test_what_a_listing_numbers_is_not_taken_for_a_file(
    area: Area, tree: dict[str, bytes], hours: Hours, mode: FreshnessMode, lie: str
) -> None:
    for _mount in range(2):
        await area.settled()
        async with area.mounted(mode=mode, ttl=60) as mirror:
            numbers = Numbers(area)
            mirror.posix.lists_as = lambda entry: LIES[lie](numbers, entry.ino)  # noqa: B023
            await check(mirror, area, tree)
            hours.pass_by(61)
            area.write("a/new", b"so that the directory is listed again")
            hours.pass_by(61)
            if mode is IMMUTABLE:
                await Refresh(mirror.tree, mirror.kernel).run()
            await check(mirror, area, {**tree, "a/new": b"so that the directory is listed again"})


SNAPSHOT = b".snapshot"


@pytest.fixture
def hidden(area: Area) -> Area:
    area.write(".snapshot/hourly/f", b"an older one")
    area.write("a", content(10))
    area.write("d/b", content(20))
    return area


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL])
async def test_a_look_up_confirms_once(hidden: Area, hours: Hours, mode: FreshnessMode) -> None:
    await hidden.settled()
    async with hidden.mount(mode=mode, ttl=60) as mirror:
        mirror.posix.unlisted = frozenset({SNAPSHOT})
        await names(mirror, ROOT_INO)
        asked(mirror)
        for _time in range(3):
            found = await mirror.tree.names.lookup(ROOT_INO, b"x.so")
            assert isinstance(found, Missing)
            assert found.timeout > 50
        assert asked(mirror) == 1
        hours.pass_by(61)
        hidden.write("x.so", b"it is there now")
        if mode is IMMUTABLE:
            assert isinstance(await mirror.tree.names.lookup(ROOT_INO, b"x.so"), Missing)
            await Refresh(mirror.tree, mirror.kernel).run()
            assert (ROOT_INO, b"x.so") in mirror.kernel.entries
        assert await mirror.read_file("x.so") == b"it is there now"


async def test_a_source_that_is_silent_denies_only_what_it_denied_before(hidden: Area) -> None:
    await hidden.settled()
    async with hidden.mount(mode=TTL, ttl=0, deadline=0.05) as mirror:
        mirror.posix.unlisted = frozenset({SNAPSHOT})
        await names(mirror, ROOT_INO)
        assert isinstance(await mirror.tree.names.lookup(ROOT_INO, b"x.so"), Missing)
        gate = mirror.posix.faults.gate("found", "stat")
        assert isinstance(await mirror.tree.names.lookup(ROOT_INO, b"x.so"), Missing)
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                assert await mirror.read_file(".snapshot/hourly/f") == b"an older one"

            nursery.start_soon(read)
            await gate.arrived(2)
            gate.open()


@pytest.mark.parametrize("mode", [IMMUTABLE, TTL, OPEN])
async def test_names_in_any_case(files: Area, hours: Hours, mode: FreshnessMode) -> None:
    await files.settled()
    async with files.mounted(mode=mode, ttl=60) as mirror:
        mirror.posix.finds_any_case = True
        for _time in range(3):
            assert set(await names(mirror, ROOT_INO)) == {b"a", b"d"}
            assert await mirror.read_file("A") == content(10)
            assert (await mirror.ino("A")) == (await mirror.ino("a"))
            assert await mirror.read_file("d/B") == content(20)
            hours.pass_by(61)
            files.write("new", b"so that it is listed again")
            (files.source / "new").unlink()
            # No listing makes it another file, or takes it for gone.
            before = await mirror.ino("A")
            await names(mirror, ROOT_INO)
            node = mirror.index.nodes.node(before)
            assert node is not None
            assert not node.outdated
            assert await mirror.ino("A") == before


async def test_files_that_get_other_numbers_are_counted_and_named(
    files: Area, hours: Hours, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await files.settled()
    async with files.mount(mode=TTL, ttl=60) as mirror:
        await walked(mirror)
        before = await mirror.ino("a")
        files.write("d/b", b"another version")
        files.write("e", content(10))
        (files.source / "e").rename(files.source / "a")
        hours.pass_by(61)
        assert await mirror.ino("a") != before
        await walked(mirror)
        assert mirror.metrics.renumbered_files == 0
        true = SourceStat.of

        def renumbered(st: os.stat_result, root_device: int) -> SourceStat:
            stat = true(st, root_device)
            return stat if stat.is_directory else stat._replace(ino=stat.ino + (1 << 40))

        monkeypatch.setattr(SourceStat, "of", renumbered)
        mirror.posix.faults.before("found", lambda: None)  # one by one, so by the above
        hours.pass_by(61)
        await walked(mirror)
        assert mirror.metrics.renumbered_files == 3
    (line,) = [record.getMessage() for record in caplog.records if "inode number" in record.msg]
    assert "is otherwise the same" in line
