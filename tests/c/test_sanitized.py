"""The C part in programs of its own: under sanitizers, and killed at any instruction; and whether
it can be built elsewhere."""

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import surroundings
from tests.support.programs import execute
from tests.support.surroundings import REPOSITORY

PRODUCT = REPOSITORY / "monarchfs"
MEMORY = (
    "core/_table", "core/_resident", "core/_items", "core/_tier_files", "core/_counts",
    "core/_journal",
)  # fmt: skip
PARTS = (
    "core/_relay", "core/_record", "core/_reply", "core/_nonresident", "core/_pool",
    "core/_absent_xattrs", "core/_waiting", "core/_misses", "core/_directories", "core/_revalidate",
    "core/_small_file", "core/_layout", "core/_names", "core/_opens", "core/_queue",
    "source/_opened", *MEMORY,
)  # fmt: skip
REQUESTS = 20_000
NAMES_WRAPPED = ("-Wl,--wrap=madvise", "-Wl,--wrap=sysconf")

COMPILER = shutil.which("cc") or "cc"
FLAGS = ("-std=gnu11", "-g", "-O1", "-Werror=implicit-function-declaration")  # as GCC 14

pytestmark = surroundings.program("cc", "gcc")

Run = Callable[..., None]


def compile_with(*words: str) -> None:
    done = execute([COMPILER, *FLAGS, *words])
    if done.returncode != 0 and "cannot find" in done.stderr:
        pytest.skip("needs this compiler's sanitizers: apt-get install gcc")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A program of tests/c with parts of the product; each is compiled once for the same flags."""
    directory = tmp_path_factory.mktemp("built")
    built: dict[tuple[object, ...], Path] = {}

    def build(name: str, parts: tuple[str, ...], flags: tuple[str, ...]) -> Path:
        def made(key: tuple[object, ...], *words: str) -> Path:
            if key not in built:
                path = directory / str(len(built))
                compile_with(*flags, *words, "-o", str(path))
                built[key] = path
            return built[key]

        compiled = tuple(flag for flag in flags if not flag.startswith("-Wl,"))
        objects = [made((part, *compiled), "-c", f"{PRODUCT / part}.c") for part in parts]
        source = str(REPOSITORY / "tests" / "c" / f"{name}.c")
        words = ("-D_GNU_SOURCE", source, *map(str, objects), "-pthread")
        return made((name, parts, flags), *words)

    return build


@pytest.fixture
def run(build: Callable[..., Path]) -> Run:
    def run(
        name: str, *arguments: object, parts: tuple[str, ...] = PARTS, flags: tuple[str, ...] = ()
    ) -> None:
        done = execute([str(build(name, parts, flags)), *map(str, arguments)])
        assert done.returncode == 0, done.stderr
        assert done.stdout == "done\n"
        assert "Sanitizer" not in done.stderr, done.stderr

    return run


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    (tmp_path / "tier").mkdir()
    return tmp_path / "tier"


BOTH = pytest.mark.parametrize(
    "sanitized", ["-fsanitize=thread", "-fsanitize=address,undefined"], ids=["thread", "address"]
)


@BOTH
def test_all_threads_at_once(run: Run, tier: Path, sanitized: str) -> None:
    run("stress", tier, REQUESTS, flags=(sanitized,))


def test_the_table_of_resident_files(run: Run, tier: Path) -> None:
    """It answers what a plain one would, and takes as many files as it should, again and again."""
    flags = ("-fsanitize=address,undefined", "-DMOST_RESIDENT=200000")
    run("residents", tier, 10 * REQUESTS, parts=MEMORY, flags=flags)


@BOTH
def test_records_that_are_written_over(run: Run, tier: Path, sanitized: str) -> None:
    """No answer has a byte of what comes after a record that was taken away."""
    parts = ("core/_reply", "core/_record", *MEMORY)
    flags = (sanitized, "-Wl,--wrap=splice")
    run("records", tier, REQUESTS // 20, parts=parts, flags=flags)


@BOTH
@pytest.mark.parametrize("opens", ["opens", "no opens"])
def test_misses_while_files_change(run: Run, tier: Path, sanitized: str, opens: str) -> None:
    """No byte of another version is answered, and who has opened a file can read it, whoever puts,
    forgets, holds and replaces files."""
    flags = (sanitized, "-Wl,--wrap=opens_answer_source")
    run("misses", tier, REQUESTS, int(opens == "no opens"), flags=flags)


@BOTH
def test_names_that_are_asked_about_while_they_change(run: Run, tier: Path, sanitized: str) -> None:
    """No look-up and no open is answered with what the source had no more, or what was
    forgotten."""
    run("revalidate", tier, REQUESTS, flags=(sanitized, "-Wl,--wrap=reply_with"))


def test_a_small_file_that_changes_while_it_is_read(run: Run, tier: Path) -> None:
    flags = ("-fsanitize=address,undefined", "-Wl,--wrap=pread")
    run("small", tier, parts=("core/_small_file", "core/_layout"), flags=flags)


@BOTH
def test_threads_of_a_pool_while_some_hang(run: Run, sanitized: str) -> None:
    """Each task is run once, or was withdrawn before; those that hang are not counted."""
    parts = ("core/_pool", "core/_reply", "core/_record", *MEMORY)
    run("pool", REQUESTS // 20, parts=parts, flags=(sanitized,))


@BOTH
def test_events_of_a_recording(run: Run, sanitized: str) -> None:
    """Each is whole, comes once, or is counted as lost."""
    run("record", REQUESTS, parts=("core/_record", "core/_counts"), flags=(sanitized,))


@pytest.mark.parametrize(
    ("sanitizer", "room"), [("thread", 1 << 16), ("address,undefined", 8 << 20)]
)
def test_names_while_they_change(run: Run, sanitizer: str, room: int) -> None:
    """No look-up shows what had been forgotten before."""
    flags = (f"-fsanitize={sanitizer}", f"-DNAMES_BYTES={room}", *NAMES_WRAPPED)
    run("names", 10 * REQUESTS, parts=("core/_names",), flags=flags)


def test_names_with_larger_pages(run: Run) -> None:
    """No more is cleared than the pages of 64 KiB that are the names' alone."""
    flags = ("-fsanitize=address,undefined", "-DNAMES_BYTES=8388608", "-DPAGE_OF=65536")
    run("names", REQUESTS, parts=("core/_names",), flags=(*flags, *NAMES_WRAPPED))


@BOTH
def test_units_while_their_files_change(run: Run, tier: Path, sanitized: str) -> None:
    """What is shown and written of a large file is of its version, whoever stops it."""
    flags = (sanitized, "-Dpreadv=read_badly", "-Dlseek=seek_badly")
    run("units", tier, REQUESTS // 200, parts=("core/_unit",), flags=flags)


@BOTH
def test_files_that_are_wanted_of_peers(run: Run, sanitized: str) -> None:
    """Threads that want files of one peer ask together, and each hears of its own."""
    flags = (sanitized, "-DMOST_OF_PEER=5000")
    run("wants", REQUESTS // 20, parts=("peers/_want", "peers/_places"), flags=flags)


@BOTH
def test_an_open_that_is_handed_out_again_meanwhile(run: Run, tier: Path, sanitized: str) -> None:
    """The kernel refuses the one of two answers, and has the handle from the other."""
    run("opens", tier, flags=(sanitized, "-Wl,--wrap=writev"))


@pytest.mark.parametrize("memory", ["table", "journal"])
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="steps through atomic instructions")
def test_a_kill_at_any_instruction(run: Run, memory: str) -> None:
    """No number of a handle is given out twice, and no request is lost, halved or doubled."""
    run("kills", memory, parts=MEMORY)


def test_threads_that_outlive_their_worker(run: Run) -> None:
    """What one that was killed has in hand is taken up once, and only when it is whole."""
    run("unreapable", parts=MEMORY)


@pytest.mark.smoke
def test_it_builds_with_the_headers_of_older_systems(tmp_path: Path) -> None:
    """glibc before 2.32 and headers before Linux 5.6 lack openat2(2), those before 5.16 the flags
    of struct fuse_attr."""
    header = Path("/usr/include/linux/fuse.h").read_text()
    (found,) = re.findall(r"struct fuse_attr \{.*?\};", header, re.DOTALL)
    (tmp_path / "linux").mkdir()
    older = header.replace(found, found.replace("flags;", "padding;"))
    (tmp_path / "linux" / "fuse.h").write_text(older)
    (tmp_path / "calls.h").write_text("#include <sys/syscall.h>\n#undef SYS_openat2\n")
    words = subprocess.check_output(["pkg-config", "--cflags", "fuse3"], text=True).split()
    flags = ["-Wall", "-Wextra", "-D_FILE_OFFSET_BITS=64", f"-I{tmp_path}", *words]
    flags += [f"-I{sysconfig.get_paths()['include']}", "-include", str(tmp_path / "calls.h")]
    sources = [*PRODUCT.rglob("*.c")]
    built = execute([COMPILER, "-std=gnu11", "-fsyntax-only", *flags, *sources])
    assert (built.returncode, built.stderr) == (0, "")
    # New headers of glibc include it themselves, so it cannot be made to fail.
    assert not [path for path in sources if "<linux/openat2.h>" in path.read_text()]
