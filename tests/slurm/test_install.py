"""What an administrator gets of ``make install-system`` for Slurm."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from monarchfs.slurm.site import MOST_DEADLINE
from tests.support.mounting import REPOSITORY
from tests.support.programs import execute

SCRIPTS = "usr/local/lib/monarchfs/slurm"
HEADER = Path("/usr/include/slurm/spank.h")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    words = [f"DESTDIR={root}", f"INSTALLED={root}/opt/bin", "PLUGINDIR=/plugins"]
    done = execute(
        ["make", "-s", "install-system", *words, f"BUILD={root}/build", f"PAGES={root}/man"],
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    assert ("no Slurm headers" in done.stdout) is not HEADER.exists()
    return root


@pytest.mark.parametrize("step", ["prolog", "epilog"])
def test_the_scripts_run_the_command_that_was_installed(installed: Path, step: str) -> None:
    program = installed / "opt" / "bin" / "monarchfs"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f'#!/bin/sh\necho "$@" > {installed}/called\nexit 5\n')
    program.chmod(0o755)
    # As slurmd runs it: there is no PATH that anybody could rely on.
    subprocess.run([str(installed / SCRIPTS / step), "--config", "/x"], env={}, check=True)
    assert (installed / "called").read_text() == f"job {step} --config /x\n"


@pytest.mark.parametrize("step", ["prolog", "epilog"])
def test_the_scripts_end_after_the_deadline_and_before_slurm_gives_up(step: str) -> None:
    found = re.search(r"^timeout -k (\d+) (\d+) ", (REPOSITORY / "slurm" / step).read_text(), re.M)
    assert found is not None
    grace, limit = map(int, found.groups())
    document = (REPOSITORY / "docs" / "SLURM.md").read_text()
    advised = re.search(r"^ +BatchStartTimeout=(\d+)$", document, re.M)
    assert advised is not None
    assert MOST_DEADLINE < limit < limit + grace < int(advised[1])
    assert f"{limit + grace} seconds after which the scripts end" in " ".join(document.split())


def test_the_task_prolog_prints_what_the_prolog_wrote(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "12").write_text("export A=b\n")
    for job, said in (("12", "export A=b\n"), ("13", ""), ("../env/12", ""), ("", "")):
        done = execute(
            [str(installed / SCRIPTS / "task_prolog")],
            env={"SLURM_JOB_ID": job, "MONARCHFS_RUN": str(tmp_path)},
            check=True,
        )
        assert done.stdout == said


def test_the_example_is_there(installed: Path) -> None:
    example = installed / "usr/local/share/monarchfs/monarchfs-slurm.toml"
    assert example.read_bytes() == (REPOSITORY / "slurm" / "monarchfs-slurm.toml").read_bytes()


def test_the_plugin_goes_where_slurm_looks(installed: Path) -> None:
    plugin = installed / "plugins" / "monarchfs.so"
    assert plugin.exists() is HEADER.exists()
    if plugin.exists():
        assert os.stat(plugin).st_mode & 0o777 == 0o644
        symbols = plugin.read_bytes()
        assert b"slurm_spank_init_post_opt" in symbols
        assert b"plugin_type" in symbols
