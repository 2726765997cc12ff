"""Small files that are copied ahead of their readers, on a real mount: the C part reads them."""

from __future__ import annotations

import pytest

from tests.support.mounting import Bench, requires_mounts
from tests.support.scenario import play

pytestmark = requires_mounts

FILES = "file {0..2}/{0..19} 1500\n"
ALL = """
until files.resident = 60
read
check all
  source.read_bytes 90000
"""
"""They are here, and each was read once."""

CASES = {
    "each file is read once, and nobody waited for it": f"""
mount --prefetch all
{ALL}
  source.open 60
  source_io.read_bytes 90000
  source_io.prefetch_read_bytes 90000
  source_io.demand_read_bytes 0
""",
    "a reader is answered from the read that was begun ahead": f"""
slow read seconds=0.3
mount --prefetch all
begin a 0/0; begin b 1/3; begin c 0/16; begin d 2/19
finish a; finish b; finish c; finish d
{ALL}
""",
    "some that hang hold up neither others nor readers": f"""
hang open {{0..1}}/{{0..3}}
mount --prefetch all
until files.resident = 52
until prefetch.active = 8
state copying 1/2
heal
{ALL}
""",
    "what fails is tried again": f"""
fail read 0/{{0..4}} EIO
mount --prefetch all
reason 0/3 copying failed: Input/output error
heal
{ALL}
  prefetch.failed 0
  prefetch.outdated 0
""",
}


@pytest.mark.parametrize("case", CASES)
def test_case(work: Bench, case: str) -> None:
    play(work, FILES + CASES[case], "--freshness", "immutable")


def test_there_are_more_directories_than_are_kept_open(work: Bench) -> None:
    """512 (`monarchfs.source.dirs`)."""
    script = "file {0..599}/file 100; mount --freshness immutable --prefetch all"
    play(work, script + "; until files.resident = 600; read")
