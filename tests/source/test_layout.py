"""Lustre layouts, as lustre_idl.h lays them out."""

import ctypes
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.source.layout import parse
from tests.support import surroundings
from tests.support.layouts import MIB, RELEASED, plain

EOF = (1 << 64) - 1


def composite(components: list[tuple[int, int, int, bytes]]) -> bytes:
    """Of (flags, start, end, layout)."""
    at = 32 + 48 * len(components)
    head, bodies = b"", b""
    for number, (flags, start, end, body) in enumerate(components, 1):
        head += struct.pack(
            "<IIQQIIIQI", number, flags, start, end, at + len(bodies), len(body), 0, 0, 0
        )
        bodies += body
    size = at + len(bodies)
    return (
        struct.pack("<IIIHHHBBIQ", 0x0BD60BD0, size, 1, 0, len(components), 0, 0, 0, 0, 0)
        + head
        + bodies
    )


@pytest.mark.parametrize(
    ("value", "targets", "spans"),
    [
        # All of it lies together.
        pytest.param(plain([7]), {0: 7, 5: 7, 1 << 30: 7}, {(0, 8): 8}, id="one target"),
        pytest.param(
            plain([3, 1, 4], 4 * MIB, pool=b"flash"),
            {0: 3, 3: 3, 4: 1, 8: 4, 12: 3, 16: 1, 20: 4},
            {(0, 8): 4, (0, 1): 1},
            id="stripes in turn, in a pool",
        ),
        pytest.param(
            composite(
                [
                    (0x10, 0, MIB, plain([5])),
                    (0x10, MIB, 64 * MIB, plain([1, 2], 4 * MIB)),
                    (0, 64 * MIB, EOF, plain([], 16 * MIB)),  # no object yet: it is shorter
                ]
            ),
            {0: 5, 1: 1, 4: 2, 8: 1, 63: 2, 64: None},
            {(0, 8): 8, (1, 8): 4},
            id="a progressive layout",
        ),
        pytest.param(
            composite([(0x11, 0, EOF, plain([5])), (0x10, 0, EOF, plain([6]))]),
            {0: 6},
            {},
            id="a mirror that is behind",
        ),
        pytest.param(
            composite([(0x10, 0, MIB, b"\x01" * 40), (0x10, MIB, EOF, plain([2]))]),
            {0: None, 1: 2},
            {},
            id="a component that is not known",
        ),
    ],
)
def test_where_bytes_lie(
    value: bytes, targets: dict[int, int | None], spans: dict[tuple[int, int], int]
) -> None:
    """Offsets and lengths in MiB."""
    layout = parse(value)
    assert layout is not None
    assert not layout.released
    assert {at: layout.target(at * MIB) for at in targets} == targets
    assert {span: layout.span(span[0] * MIB, span[1] * MIB) // MIB for span in spans} == spans


@pytest.mark.parametrize(
    ("value", "released"),
    [
        (plain([], pattern=RELEASED), True),
        (plain([1, 2], pattern=RELEASED), True),
        (plain([], pattern=RELEASED, pool=b"flash"), True),
        (composite([(0, 0, EOF, plain([], pattern=RELEASED))]), True),
        (
            composite([(0x10, 0, MIB, plain([1])), (0, MIB, EOF, plain([], pattern=RELEASED))]),
            False,
        ),
        (composite([]), False),
        (plain([1]), False),
    ],
)
def test_what_an_archive_holds(value: bytes, released: bool) -> None:
    layout = parse(value)
    assert layout is not None
    assert layout.released == released
    if released:
        assert layout.target(0) is None


@pytest.mark.parametrize(
    "value",
    [b"", b"\0" * 64, plain([1, 2])[:-1], composite([(0x10, 0, EOF, plain([1]))])[:70], b"x" * 500],
)
def test_what_is_no_layout_known_here(value: bytes) -> None:
    assert parse(value) is None


@given(st.sampled_from([b"", plain([])[:4], composite([])[:4]]), st.binary(max_size=300))
def test_no_bytes_are_harmful(start: bytes, rest: bytes) -> None:
    layout = parse(start + rest)
    if layout is not None:
        for offset in (0, MIB, 1 << 60):
            layout.target(offset)
            assert 0 < layout.span(offset, MIB) <= MIB


BODIES = st.sampled_from(
    [
        plain([7]),
        plain([3, 1], pool=b"flash"),
        plain([], pattern=RELEASED),
        plain([1], pattern=RELEASED, pool=b"flash"),
        b"",
        struct.pack("<I", 0x0BD40BD0) + b"another kind" * 4,
    ]
)
VALUES = BODIES | st.lists(
    st.tuples(st.sampled_from([0, 0x10, 0x11]), st.just(0), st.just(EOF), BODIES), max_size=4
).map(composite)


@pytest.fixture(scope="module")
def released_in_c(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], bool]:
    library = tmp_path_factory.mktemp("c") / "layout.so"
    code = Path(__file__).parents[2] / "monarchfs" / "core" / "_layout.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, code], check=True, timeout=60)
    function = ctypes.CDLL(str(library)).layout_released
    function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_size_t], ctypes.c_bool
    return lambda value: bool(function(value, len(value)))


@surroundings.program("cc", "gcc")
@given(VALUES, st.integers(0, 1 << 10))
def test_archives_in_c(released_in_c: Callable[[bytes], bool], value: bytes, length: int) -> None:
    for part in (value, value[:length]):
        layout = parse(part)
        assert released_in_c(part) == (layout is not None and layout.released)
