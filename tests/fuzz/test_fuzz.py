"""A short run of the fuzzer, always the same but for the timing."""

import sys

from tests.support import surroundings
from tests.support.programs import execute


@surroundings.requires_root
@surroundings.requires_fuse
@surroundings.requires_namespaces
def test_a_mount_answers_random_calls_as_its_source_does() -> None:
    words = ["--seed", "20", "--seconds", "6", "--paths", "passthrough,free opens,open"]
    command = [sys.executable, "-m", "tests.fuzz", *words]
    done = execute(command, cwd=surroundings.REPOSITORY, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
