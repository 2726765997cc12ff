"""Whatever is read in whatever order, the bytes are the file's and come from the source once."""

from __future__ import annotations

import errno
import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.cache.placement import placement
from monarchfs.fs.files import FileHandle
from tests.support.mirror import ALL_ROOM, KIB, MIB, Area, Mirror, content

SIZES = (0, 1, 4097, 128 * KIB, 128 * KIB + 1, 1 * MIB, 1 * MIB + 1, 3 * MIB + 77)
CONTENTS = [content(size, seed) for seed, size in enumerate(SIZES)]
SOURCE_ERROR = errno.ETIMEDOUT
WHICH = st.integers(0, 9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, len(SIZES) - 1)),
        st.tuples(
            st.just("read"),
            WHICH,
            st.floats(0, 1),
            st.sampled_from([1, 4 * KIB, 128 * KIB, 300_000, 2 * MIB]),
        ),
        *(st.tuples(st.just(what), WHICH) for what in ("close", "source", "tier", "kill")),
        st.tuples(st.just("fail"), st.sampled_from(["source", "tier"])),
    ),
    max_size=40,
)


@dataclass
class Opened:
    handle: FileHandle
    file: int
    reads: int = 0
    closed: bool = False

    def close(self) -> None:
        self.closed = True
        self.release_if_done()

    def release_if_done(self) -> None:
        """The kernel releases a handle after the last of its reads."""
        if self.closed and not self.reads:
            self.handle.release()


async def take_steps(mirror: Mirror, steps: list[tuple[object, ...]]) -> None:
    """One after the other, while reads go on beside them; then close what is open."""
    gates = {
        "source": mirror.posix.faults.gate("read"),
        "tier": mirror.tier.faults.gate("write", "write_whole"),
    }
    opened: list[Opened] = []
    scopes: list[trio.CancelScope] = []
    ending = False

    async def read(of: Opened, offset: int, size: int) -> None:
        with trio.CancelScope() as scope:
            scopes.append(scope)
            try:
                data = await mirror.read(of.handle, offset, size)
            except OSError as exc:
                if exc.errno != SOURCE_ERROR or ("fail", "source") not in steps:
                    raise
            else:
                assert data == CONTENTS[of.file][offset : offset + size]
        of.reads -= 1
        of.release_if_done()

    async def open_file(file: int) -> None:
        """Waits for the source, as a small file's open does."""
        with trio.CancelScope() as scope:
            scopes.append(scope)
            one = Opened(await mirror.open(f"f{file}"), file)
            opened.append(one)
            if ending:
                one.close()

    def choose(which: int) -> Opened | None:
        left = [one for one in opened if not one.closed]
        return left[which % len(left)] if left else None

    async with trio.open_nursery() as nursery:
        for step in steps:
            match step:
                case "open", int(file):
                    nursery.start_soon(open_file, file)
                case "read", int(which), float(where), int(size):
                    if one := choose(which):
                        one.reads += 1
                        nursery.start_soon(read, one, int(where * SIZES[one.file]), size)
                case "close", int(which):
                    if one := choose(which):
                        one.close()
                case str(place), int(which) if place in gates:
                    if waiting := gates[place].waiting:
                        gates[place].release(which % waiting)
                case "kill", int(which):
                    if scopes:
                        scopes.pop(which % len(scopes)).cancel()
                case "fail", "source":
                    mirror.posix.faults.fail("after_read", SOURCE_ERROR, times=1)
                case "fail", "tier":
                    for call in ("after_write", "finish_part"):
                        mirror.tier.faults.fail(call, errno.EIO, times=1)
            await trio.testing.wait_all_tasks_blocked()
        ending = True
        for gate in gates.values():
            gate.open()
        while one := choose(0):
            one.close()
    await mirror.settled()


def assert_read_once(mirror: Mirror) -> None:
    covered: dict[int, list[tuple[int, int]]] = {}
    for read in mirror.posix.reads:
        covered.setdefault(read.ino, []).append((read.offset, read.offset + read.size))
    for ranges in covered.values():
        ranges.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


@settings(max_examples=60)
@given(
    steps=STEPS,
    room=st.sampled_from([ALL_ROOM, 2 * MIB, 100 * KIB]),
    keeps=st.booleans(),
    copies=st.booleans(),
)
def test_any_order_of_events(
    steps: list[tuple[object, ...]], room: int, keeps: bool, copies: bool
) -> None:
    async def main(area: Area) -> None:
        for number, data in enumerate(CONTENTS):
            area.write(f"f{number}", data)
        async with area.mount([room], keeps=keeps, copies=copies) as mirror:
            await take_steps(mirror, steps)
            if room == ALL_ROOM and keeps and not any(step[0] == "fail" for step in steps):
                assert_read_once(mirror)
            if ("fail", "tier") not in steps:
                assert mirror.metrics.tier_errors == 0
        # What was suspended is resumed where it was left.
        async with area.mounted([room], keeps=keeps) as again:
            for number, data in enumerate(CONTENTS):
                assert await again.read_file(f"f{number}") == data

    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.object(placement, "PARTIAL_ROOM_BYTES", 256 * KIB),
    ):
        trio.run(main, Area(Path(directory)))
