"""What is read from the source, and how often: counted by the source itself. The first epochs,
a second mount, a file larger than its tier and a full disk are recorded (`tests/scenarios`)."""

import pytest

from tests.support.mounting import Bench, requires_mounts
from tests.support.scenario import play

pytestmark = requires_mounts

SMALL = """
file {0..2}/{0..7} 1500
settle
"""
CASES = (
    {
        "a large file that is read here and there while it is copied is read about once": """
file large 24M; slow seconds=0.005
mount --freshness immutable
loop reader large; until files.resident = 1; end reader; check read
  source.read_bytes 25165824..31457280
""",
        "where nothing is kept exactly what is asked for is read": """
file f 3M
mount --prefetch none
part f 1M 4K way=direct; check read
  source.read_bytes 4096
  files.resident 0
""",
        "who reads the beginning of each file does not wait for all of it": f"""
file f/{{0..39}} 400K; settle
mount --freshness ttl=3600 --prefetch none
{"; ".join(f"part f/{n} 0 4K" for n in range(40))}
read f/0; check read
  source.read_bytes <=6000000
""",
        "the source's errors are the reader's, and pass": """
file f g 2M
mount --freshness ttl=0
fail read f EIO; read f error=EIO; read g; heal
fail open f EACCES; read f error=EACCES; heal
read f; state resident f; check passed
  request_errors.EIO >=1
  request_errors.EACCES >=1
  source_errors.EIO >=1
  source_errors.EACCES 0  # that is an answer
""",
        "directories that change places": f"""{SMALL}
mount --freshness open --prefetch none
read; rename 1 3; rename 2 1; rename 3 2
same 1/*; read
""",
    }
    | {
        # Where it is copied, too: `tests/scenarios/remount.txt`.
        f"each small file is opened and read once ({mode})": f"""{SMALL}
mount --freshness {mode} --prefetch none
read; check first
  source.open 24
  source.read_bytes 36000
  source_io.read_bytes 36000
  served.source_opens 24
  served.source_file_bytes 36000
  files.resident 0
read; check second
  source.read_bytes 36000
"""
        for mode in ("immutable", "open")
    }
    | {
        f"who has a file open keeps its version ({mode})": f"""{SMALL}
mount --freshness {mode} --prefetch none
open holder 1/1; held holder
replace 1/1 7; held holder old=1
command refresh; same 1/1; held holder old=1; close holder
"""
        for mode in ("ttl=3600", "open")
    }
)
"""Of directories that change places, one that the C part knows goes on meaning what it did; the
version tells whether the file is the one that was meant."""


@pytest.mark.parametrize("case", CASES)
def test_case(work: Bench, case: str) -> None:
    play(work, CASES[case])
