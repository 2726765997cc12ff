"""A copy of the tree, in which files may be changed and tests run, with workers of the copy."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.programs import execute
from tests.support.surroundings import REPOSITORY

_LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "build", "results"
)


_COMPILER = """\
for word; do
    case $before in -c) source=$word ;; -o) made=$word ;; esac
    before=$word
done
if [ -n "$source" ] && [ "$made" -nt "$source" ] &&
    [ -z "$(find monarchfs -name '*.h' -newer "$made")" ]; then exit 0; fi
"""
"""A compiler that compiles only what is older than its source file and all headers: setuptools
compiles all files of an extension again if one has changed."""


class Overdue(Exception):
    """The tests did not end in time."""


class Copy:
    """``path`` has the tree and, in ``.venv``, a Python that imports monarchfs from there; all
    other packages are those of this Python."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.copytree(REPOSITORY, path, symlinks=True, ignore=_LEFT_OUT, dirs_exist_ok=True)
        environment = path / ".venv"
        venv.create(environment, symlinks=True)
        self.python = environment / "bin" / "python"
        self._packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
        # No .pth file of the other packages is read, so neither is that of the tree itself.
        self.begin_with(str(path), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))

    def begin_with(self, *lines: str) -> None:
        """Each process of ``python`` begins with these lines of a .pth file (see ``site``)."""
        with open(Path(self._packages, "copy.pth"), "a") as file:
            file.writelines(f"{line}\n" for line in lines)

    def build(self, flags: str = "") -> str | None:
        """Build what is older than its source files, or all if there are more ``flags`` for the
        compiler. What that says if it cannot."""
        if flags:
            for built in self.path.rglob("*.so"):
                built.unlink()
        compiler = self.path / "compiler"
        compiler.write_text(f'{_COMPILER}exec {sysconfig.get_config_var("CC")} "$@" {flags}\n')
        done = execute(
            [str(self.python), "setup.py", "--quiet", "build_ext", "--inplace"],
            cwd=self.path,
            env={**os.environ, "CC": f"sh {compiler}"},
            timeout=1000,
        )
        return done.stderr if done.returncode else None

    def test(self, arguments: Sequence[str], seconds: float) -> tuple[int, str]:
        """pytest's exit code and output. Raises Overdue after ``seconds``."""
        options = "-q", "-p", "no:cacheprovider"
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [str(self.python), "-m", "pytest", *options, *arguments],
                cwd=self.path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise Overdue from None
            finally:
                _end(process)
            output.seek(0)
            return code, output.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with all that it has started; tests that are told to end unmount."""
    for number, seconds in ((signal.SIGTERM, 30), (signal.SIGKILL, 30)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def copied() -> Iterator[Copy]:
    """A copy that is removed at the end, also if that comes by SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="monarchfs-copy-") as directory:
        os.chmod(directory, 0o755)  # some tests run as another user
        yield Copy(Path(directory, "tree"))
