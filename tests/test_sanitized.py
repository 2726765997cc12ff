"""The C part under the compiler's sanitizers: races between its threads, and memory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = (
    "_relay", "_bytes", "_resident", "_unfinished", "_pool", "_backed", "_table", "_journal",
)  # fmt: skip
REQUESTS = 20_000

COMPILER = shutil.which("cc")


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_all_threads_at_once(tmp_path: Path, sanitizers: str) -> None:
    assert COMPILER is not None
    program = tmp_path / "stress"
    built = subprocess.run(
        [COMPILER, "-std=gnu11", "-g", "-O1", f"-fsanitize={sanitizers}", "-o", str(program),
         str(ROOT / "tests" / "relay_stress.c"),
         *(str(ROOT / "monarchfs" / "fuse" / f"{part}.c") for part in PARTS), "-pthread"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    if built.returncode != 0 and "cannot find" in built.stderr:
        pytest.skip("the sanitizer's library is not installed")
    assert built.returncode == 0, built.stderr
    tier = tmp_path / "tier"
    tier.mkdir()
    done = subprocess.run(
        [str(program), str(tier), str(REQUESTS)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert "Sanitizer" not in done.stderr, done.stderr
