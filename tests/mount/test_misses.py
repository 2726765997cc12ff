"""Small files that are not cached, on a real mount: the C part opens and reads them."""

from __future__ import annotations

import pytest

from tests.support.mounting import Bench, requires_mounts
from tests.support.scenario import play

pytestmark = requires_mounts

FILES = """
file {0..2}/{0..19} 1500
settle
"""


@pytest.mark.parametrize("mode", ["immutable", "ttl=3600", "open"])
@pytest.mark.parametrize("prefetch", ["none", "access"])
def test_each_file_is_opened_and_read_once(work: Bench, mode: str, prefetch: str) -> None:
    script = f"""
mount --freshness {mode} --prefetch {prefetch}
read
check first
  source.open 60
  source.read_bytes 90000
  source_io.read_bytes 90000
  served.source_opens 60
  served.source_file_bytes 90000
  files.resident {60 if prefetch == "access" else 0}
read
check second
  source.read_bytes {0 if prefetch == "access" else 90000}
"""
    play(work, FILES + script)


@pytest.mark.smoke
@pytest.mark.parametrize("mode", ["ttl=3600", "open"])
def test_who_has_a_file_open_keeps_its_version(work: Bench, mode: str) -> None:
    script = f"""
mount --freshness {mode} --prefetch none
open holder 1/1; held holder
replace 1/1 7; held holder old=1
command refresh; same 1/1; held holder old=1; close holder
"""
    play(work, FILES + script)


CASES = {
    "a new worker reads what was open": """
mount --freshness ttl=3600 --prefetch none
open holder; kill worker; held holder; close holder; read
""",
    "what the source says reaches the reader": """
mount --freshness ttl=3600 --prefetch none
fail open * EIO; read 1/1 error=EIO
heal; read 1/1
""",
    "a tier that is too small keeps what fits": """
mount --prefetch access tier=80K
read
check read
  files.resident 1..20
  prefetch.refused >=1
  tier1.used_bytes <=81920
read
""",
    "directories that change places": """
mount --freshness open --prefetch none
read; rename 1 3; rename 2 1; rename 3 2
same 1/*; read
""",
}
"""In the last one, a directory that the C part knows goes on meaning what it did; the version tells
whether the file is the one that was meant."""


@pytest.mark.parametrize("case", CASES)
def test_case(work: Bench, case: str) -> None:
    play(work, FILES + CASES[case])
