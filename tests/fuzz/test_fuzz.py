"""A short run of the fuzzer, always the same but for the timing."""

from __future__ import annotations

import subprocess
import sys

from tests.support import surroundings


@surroundings.requires_root
@surroundings.requires_fuse
@surroundings.requires_namespaces
def test_a_mount_answers_random_calls_as_its_source_does() -> None:
    words = ["--seed", "20", "--seconds", "6", "--paths", "passthrough,free opens,open"]
    command = [sys.executable, "-m", "tests.fuzz", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=surroundings.REPOSITORY, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
