"""``packaging/modulefile`` with the programs that load modules."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.programs import execute
from tests.support.surroundings import REPOSITORY

PROGRAMS = {
    "environment-modules": "/usr/bin/modulecmd",
    "lmod": "/usr/share/lmod/lmod/libexec/lmod",
}


@pytest.mark.parametrize("package", PROGRAMS)
def test_it_finds_the_directory_in_which_it_lies(package: str, tmp_path: Path) -> None:
    program = PROGRAMS[package]
    if not Path(program).exists():
        pytest.skip(f"needs {package}: apt-get install {package}")
    root = tmp_path / "monarchfs"
    (root / "bin").mkdir(parents=True)
    (root / "share" / "modulefiles" / "monarchfs").mkdir(parents=True)
    (root / "bin" / "monarchfs").write_text("#!/bin/sh\necho it runs\n")
    (root / "bin" / "monarchfs").chmod(0o755)
    shutil.copy(REPOSITORY / "packaging" / "modulefile", root / "share/modulefiles/monarchfs/0.1.0")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "MODULEPATH": str(root / "share" / "modulefiles"),
    }
    shell = "sh" if package == "environment-modules" else "bash"
    loads = execute([program, shell, "load", "monarchfs"], env=environment, check=True)
    then = f"{loads.stdout}\ncommand -v monarchfs; monarchfs; echo $MANPATH"
    done = execute(["bash", "-c", then], env=environment, check=True)
    where, says, manual = done.stdout.splitlines()
    assert where == str(root / "bin" / "monarchfs"), loads.stderr
    assert says == "it runs"
    # The empty path stands for the system's pages.
    assert manual.startswith(f"{root}/share/man:"), manual
