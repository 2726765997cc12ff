"""The C part in programs of its own: under sanitizers, and killed at any instruction; and whether
it can be built elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.support import surroundings
from tests.support.mounting import REPOSITORY

ROOT = REPOSITORY
PARTS = (
    "fuse/_relay", "fuse/_counts", "fuse/_record", "fuse/_reply", "fuse/_resident", "fuse/_items",
    "fuse/_tier_files", "fuse/_nonresident", "fuse/_pool", "fuse/_backed", "fuse/_table",
    "fuse/_journal", "fuse/_absent_xattrs", "engine/_waiting", "engine/_misses",
    "engine/_miss_entries", "engine/_small_file", "engine/_layout", "engine/_names",
)  # fmt: skip
MEMORY = (
    "fuse/_table", "fuse/_resident", "fuse/_items", "fuse/_tier_files", "fuse/_counts",
    "fuse/_journal",
)  # fmt: skip
REQUESTS = 20_000

COMPILER = shutil.which("cc")

pytestmark = surroundings.program("cc", "gcc")


def build(directory: Path, name: str, *flags: str, parts: tuple[str, ...] = PARTS) -> Path:
    """The program ``name`` of tests/c with the C part."""
    program = directory / name
    assert COMPILER is not None
    built = subprocess.run(
        [COMPILER, "-std=gnu11", "-g", "-O1", *flags, "-o", str(program),
         str(ROOT / "tests" / "c" / f"{name}.c"),
         *(str(ROOT / "monarchfs" / f"{part}.c") for part in parts), "-pthread"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    if built.returncode != 0 and "cannot find" in built.stderr:
        pytest.skip("needs this compiler's sanitizers: apt-get install gcc")
    assert built.returncode == 0, built.stderr
    return program


def run(program: Path, *arguments: object) -> None:
    done = subprocess.run(
        [str(program), *map(str, arguments)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert "Sanitizer" not in done.stderr, done.stderr


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    tier = tmp_path / "tier"
    tier.mkdir()
    return tier


SANITIZERS = pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])


@SANITIZERS
def test_all_threads_at_once(tmp_path: Path, tier: Path, sanitizers: str) -> None:
    run(build(tmp_path, "stress", f"-fsanitize={sanitizers}"), tier, REQUESTS)


def test_the_table_of_resident_files(tmp_path: Path, tier: Path) -> None:
    """It answers what a plain one would, and takes as many files as it should, again and again."""
    program = build(tmp_path, "residents", "-fsanitize=address,undefined", parts=MEMORY[:5])
    run(program, tier, 10 * REQUESTS)


@SANITIZERS
def test_records_that_are_written_over(tmp_path: Path, tier: Path, sanitizers: str) -> None:
    """No answer has a byte of what comes after a record that was taken away."""
    parts = ("fuse/_reply", "fuse/_record", *MEMORY[:5])
    flags = (f"-fsanitize={sanitizers}", "-Dsplice=splice_at_once")
    run(build(tmp_path, "records", *flags, parts=parts), tier, REQUESTS // 10)


@SANITIZERS
@pytest.mark.parametrize("opens", ["opens", "no opens"])
def test_misses_while_files_change(tmp_path: Path, tier: Path, sanitizers: str, opens: str) -> None:
    """No byte of another version is answered, and who has opened a file can read it, whoever puts,
    forgets, holds and replaces files."""
    wrap = "-Wl,--wrap=relay_answer_open"
    program = build(tmp_path, "misses", f"-fsanitize={sanitizers}", wrap)
    run(program, tier, REQUESTS, int(opens == "no opens"))


def test_a_small_file_that_changes_while_it_is_read(tmp_path: Path, tier: Path) -> None:
    flags = ("-fsanitize=address,undefined", "-Wl,--wrap=pread")
    run(build(tmp_path, "small", *flags, parts=("engine/_small_file", "engine/_layout")), tier)


@SANITIZERS
def test_threads_of_a_pool_while_some_hang(tmp_path: Path, sanitizers: str) -> None:
    """Each task is run once, or was withdrawn before; those that hang are not counted."""
    parts = ("fuse/_pool", "fuse/_reply", "fuse/_record", *MEMORY[:5])
    run(build(tmp_path, "pool", f"-fsanitize={sanitizers}", parts=parts), REQUESTS // 20)


@SANITIZERS
def test_events_of_a_recording(tmp_path: Path, sanitizers: str) -> None:
    """Each is whole, comes once, or is counted as lost."""
    parts = ("fuse/_record", "fuse/_counts")
    run(build(tmp_path, "record", f"-fsanitize={sanitizers}", parts=parts), REQUESTS)


@SANITIZERS
@pytest.mark.parametrize("size", [1 << 16, 8 << 20], ids=["little room", "more room"])
def test_names_while_they_change(tmp_path: Path, size: int, sanitizers: str) -> None:
    """No look-up shows what had been forgotten before."""
    flags = (f"-fsanitize={sanitizers}", f"-DNAMES_BYTES={size}", "-Wl,--wrap=madvise")
    program = build(tmp_path, "names", *flags, parts=("engine/_names",))
    run(program, 10 * REQUESTS)


@SANITIZERS
def test_units_while_their_files_change(tmp_path: Path, tier: Path, sanitizers: str) -> None:
    """What is shown and written of a large file is of its version, whoever stops it."""
    flags = f"-fsanitize={sanitizers}", "-Dpreadv=read_badly", "-Dlseek=seek_badly"
    program = build(tmp_path, "units", *flags, parts=("engine/_unit",))
    run(program, tier, REQUESTS // 200)


@SANITIZERS
def test_files_that_are_wanted_of_peers(tmp_path: Path, sanitizers: str) -> None:
    """Threads that want files of one peer ask together, and each hears of its own."""
    parts = ("peers/_want", "peers/_places")
    run(build(tmp_path, "wants", f"-fsanitize={sanitizers}", parts=parts), REQUESTS // 10)


@SANITIZERS
def test_an_open_that_is_handed_out_again_meanwhile(
    tmp_path: Path, tier: Path, sanitizers: str
) -> None:
    """The kernel refuses the one of two answers, and has the handle from the other."""
    run(build(tmp_path, "opens", f"-fsanitize={sanitizers}", "-Dwritev=take_answer"), tier)


@pytest.mark.parametrize("memory", ["table", "journal"])
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="steps through atomic instructions")
def test_a_kill_at_any_instruction(tmp_path: Path, memory: str) -> None:
    """No number of a handle is given out twice, and no request is lost, halved or doubled."""
    run(build(tmp_path, "kills", parts=MEMORY), memory)


def test_threads_that_outlive_their_worker(tmp_path: Path) -> None:
    """What one that was killed has in hand is taken up once, and only when it is whole."""
    run(build(tmp_path, "unreapable", parts=MEMORY))


@pytest.mark.smoke
def test_it_builds_with_the_headers_of_older_systems(tmp_path: Path) -> None:
    """glibc before 2.32 and headers before Linux 5.6 lack openat2(2), those before 5.16 the flags
    of struct fuse_attr."""
    header = Path("/usr/include/linux/fuse.h").read_text()
    (found,) = re.findall(r"struct fuse_attr \{.*?\};", header, re.DOTALL)
    (tmp_path / "linux").mkdir()
    older = header.replace(found, found.replace("flags;", "padding;"))
    (tmp_path / "linux" / "fuse.h").write_text(older)
    (tmp_path / "linux" / "openat2.h").write_text("#error there is none\n")
    (tmp_path / "calls.h").write_text("#include <sys/syscall.h>\n#undef SYS_openat2\n")
    assert COMPILER is not None
    words = subprocess.run(
        ["pkg-config", "--cflags", "fuse3"], capture_output=True, text=True, check=True
    ).stdout.split()
    built = subprocess.run(
        [COMPILER, "-std=gnu11", "-Wall", "-Wextra", "-D_FILE_OFFSET_BITS=64", "-fsyntax-only",
         f"-I{tmp_path}", *words, f"-I{sysconfig.get_paths()['include']}",
         "-include", str(tmp_path / "calls.h"), *map(str, (ROOT / "monarchfs").rglob("*.c"))],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (built.returncode, built.stderr) == (0, "")
