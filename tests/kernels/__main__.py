"""``make test-kernels``: boots each kernel of ``build/kernels`` (.ci/kernels), or the one that is
given, in a virtual machine with Debian's minimum and the bundle, and has it try ``smoke.py``.

    python -m tests.kernels [--kernel FILE --modules DIRECTORY] [--json] [SUITE ...]
"""

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.packages.nodes import required_bundle, required_root, unpacked
from tests.support.surroundings import REPOSITORY

KERNELS = REPOSITORY / "build" / "kernels"
SUITES = ("bullseye", "bookworm", "trixie", "forky")
"""Debian's, with Linux 5.10, 6.1, 6.12, and (in autumn 2026) 7.2."""
ROOT = "trixie"
"""The same for all of them: what differs is the kernel."""

UNPACK = {".ko": ["cat"], ".gz": ["gzip", "-dc"], ".xz": ["xz", "-dc"], ".zst": ["zstd", "-dc"]}
MEMORY = "3G"
SECONDS = 3600.0
NEEDED = (
    *("tests/__init__.py", "tests/kernels/smoke.py"),
    *("tests/support/__init__.py", "tests/support/faultfs.py", "tests/support/layouts.py"),
)
NOT_NEEDED = ("./usr/share/doc", "./usr/share/locale", "./usr/share/man", "./var/lib/apt", "./dev")


class Kernel(NamedTuple):
    """``modules`` is any directory above its ``fuse.ko``, if that is not built in."""

    image: Path
    modules: Path | None


class Seen(NamedTuple):
    """What a machine said: ``rows`` are (word, case, what was seen, seconds)."""

    kernel: str
    doctor: list[dict[str, Any]]
    rows: list[tuple[str, str, str, float]]
    ended: bool
    output: str

    @property
    def failed(self) -> list[str]:
        return [name for word, name, _seen, _seconds in self.rows if word == "FAILED"]


def debian_kernel(suite: str) -> Kernel:
    """Raises FileNotFoundError."""
    found = sorted((KERNELS / suite).rglob("vmlinuz*"))
    if not found:
        raise FileNotFoundError(f"no kernel of {suite}: .ci/kernels build/kernels")
    return Kernel(found[-1], KERNELS / suite)


def archive(directory: Path, to: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Append a directory to an initial file system (cpio(1), newc; the kernel takes several in a
    row)."""
    prune = [word for path in leave_out for word in ("-path", path, "-prune", "-o")]
    with open(to, "ab") as file:
        listed = subprocess.run(
            ["find", ".", *prune, "-print0"], cwd=directory, check=True, capture_output=True
        )
        subprocess.run(
            ["cpio", "--null", "--create", "--format=newc", "--quiet", "--owner=0:0"],
            cwd=directory, input=listed.stdout, stdout=file, check=True,
        )  # fmt: skip


def with_modules(kernel: Kernel, work: Path) -> None:
    """A directory with what the guest's ``init`` loads."""
    place = work / "modules"
    place.mkdir()
    found = [] if kernel.modules is None else sorted(kernel.modules.rglob("fuse.ko*"))
    for path in found[:1]:
        unpack = UNPACK[path.suffix]
        done = subprocess.run([*unpack, path], check=True, stdout=subprocess.PIPE)
        (place / "fuse.ko").write_bytes(done.stdout)
    (place / "order").write_text("fuse.ko\n" if found else "")


def machine(image: Path, initial: Path, accelerator: str) -> list[str]:
    return [
        *("qemu-system-x86_64", "-accel", accelerator, "-cpu", "max", "-smp", "2"),
        *("-m", MEMORY, "-nic", "none", "-nographic", "-monitor", "none", "-no-reboot"),
        *("-kernel", str(image), "-initrd", str(initial)),
        *("-append", "console=ttyS0 loglevel=3 panic=-1 rdinit=/init"),
    ]


def boot(kernel: Kernel, base: Path, work: Path, accelerator: str) -> Seen:
    """Runs it to its end, and shows its lines as they come."""
    initial = work / "initial"
    shutil.copy(base, initial)
    place = work / "added"
    place.mkdir()
    with_modules(kernel, place)
    archive(place, initial)
    lines: list[str] = []
    process = subprocess.Popen(
        ["timeout", "-s", "KILL", f"{SECONDS:g}", *machine(kernel.image, initial, accelerator)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip("\r\n")
            lines.append(line)
            if re.match(r"(ok|FAILED)\t|kernel: ", line):
                print("  " + line.expandtabs(4), file=sys.stderr, flush=True)
    shutil.rmtree(place)
    return understood(lines)


def understood(lines: list[str]) -> Seen:
    name, doctor = "?", []
    rows = []
    ended = False
    for line in lines:
        if line.startswith("kernel: "):
            name = line.removeprefix("kernel: ")
        elif line.startswith("doctor: "):
            doctor = json.loads(line.removeprefix("doctor: "))["checks"]
        elif re.match(r"(ok|FAILED)\t", line):
            word, case, seen, seconds = line.split("\t")
            rows.append((word, case, seen, float(seconds)))
        elif line == "exit code: 0":
            ended = True
    return Seen(name, doctor, rows, ended, "\n".join(lines))


def base_of(root: Path, bundle: Path, to: Path, work: Path) -> None:
    """What is the same for all kernels."""
    archive(root, to, NOT_NEEDED)
    added = work / "base"
    for name in ("dev", "proc", "sys", "brought", "usr/bin"):
        (added / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", added / "usr" / "bin" / "busybox")
    shutil.copy(Path(__file__).with_name("init"), added / "init")
    (added / "init").chmod(0o755)
    for needed in NEEDED:
        (added / "repository" / needed).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / needed, added / "repository" / needed)
    shutil.copytree(bundle, added / "brought", symlinks=True, dirs_exist_ok=True)
    archive(added, to)


def wanted(options: argparse.Namespace) -> Iterator[Kernel]:
    if options.kernel is not None:
        if not options.kernel.is_file():
            raise FileNotFoundError(f"{options.kernel}: there is no such file")
        yield Kernel(options.kernel, options.modules)
        return
    for suite in options.suites or SUITES:
        yield debian_kernel(suite)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels", description=__doc__)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="Debian's (default: all)")
    parser.add_argument("--kernel", type=Path, help="an image (vmlinuz) in place of Debian's")
    parser.add_argument("--modules", type=Path, help="its modules: a directory above fuse.ko")
    parser.add_argument("--accelerator", default="tcg", help="qemu's (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print all that was seen")
    options = parser.parse_args()
    if platform.machine() != "x86_64" or shutil.which("qemu-system-x86_64") is None:
        print("needs qemu-system-x86_64: apt-get install qemu-system-x86", file=sys.stderr)
        return 2
    try:
        archive_of_bundle, root, kernels = (
            required_bundle(),
            required_root(ROOT),
            [*wanted(options)],
        )
    except (FileNotFoundError, pytest.skip.Exception) as missing:
        print(missing, file=sys.stderr)
        return 2
    found: list[Seen] = []
    with (
        tempfile.TemporaryDirectory(prefix="monarchfs-test-") as name,
        unpacked(archive_of_bundle) as bundle,
    ):
        base = Path(name) / "base.cpio"
        base_of(root, bundle, base, Path(name))
        for number, kernel in enumerate(kernels):
            work = Path(name) / str(number)
            work.mkdir()
            print(f"{number + 1} of {len(kernels)}: {kernel.image}", file=sys.stderr, flush=True)
            seen = boot(kernel, base, work, options.accelerator)
            if seen.failed or not seen.ended:
                print(seen.output, file=sys.stderr)
            found.append(seen)
            shutil.rmtree(work)
    if options.json:
        print(json.dumps([seen._asdict() for seen in found], indent=2))
    for seen in found:
        good = sum(word == "ok" for word, *_ in seen.rows)
        state = "" if seen.ended else ", and it did not come to its end"
        print(f"Linux {seen.kernel}: {good} of {len(seen.rows)} right{state}")
        for failed in seen.failed:
            print(f"  {failed}")
    return 0 if all(seen.ended and not seen.failed for seen in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
