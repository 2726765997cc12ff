"""Completion in real shells: bash where its answers are read, others where they are installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from monarchfs.cli.documents import completion_for
from monarchfs.cli.parser import SHELLS, build_parser, commands_of
from tests.support import surroundings
from tests.support.mounting import Bench, needs_mounts, run
from tests.support.programs import execute
from tests.support.trees import write_files

needs_bash = surroundings.program("bash")


def complete(*words: str, cwd: Path, findmnt: str | None = None) -> list[str]:
    """What bash offers for the last of ``words``; ``findmnt`` stands in for that command."""
    script = completion_for(build_parser(), "bash")
    fake = "" if findmnt is None else f"findmnt() {{ printf '%s\\n' {findmnt}; }}\n"
    script += f"""
{fake}COMP_WORDS=(monarchfs "$@"); COMP_CWORD=$#
_shtab_monarchfs monarchfs 2>/dev/null
(( ${{#COMPREPLY[@]}} == 0 )) || printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    command = ["bash", "--norc", "-c", script, "bash", *words]
    return execute(command, cwd=cwd, check=True).stdout.splitlines()


@needs_bash
def test_every_command_and_every_option_is_offered(tmp_path: Path) -> None:
    assert complete("um", cwd=tmp_path) == ["umount"]
    commands = commands_of(build_parser())
    assert set(complete("", cwd=tmp_path)) == set(commands)
    for name, command in commands.items():
        wanted = {word for action in command._actions for word in action.option_strings}
        assert set(complete(name, "-", cwd=tmp_path)) == wanted, name


@needs_bash
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["completion", "z"], ["zsh"]),
        (["mount", "--evict", "s"], ["sieve"]),
        (["mount", "d"], ["data"]),
        (["mount", "--config", "s"], ["site.toml"]),
        (["mount", "--user", "nobod"], ["nobody"]),
    ],
)
def test_values_and_paths(tmp_path: Path, words: list[str], offered: list[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "site.toml").touch()
    assert complete(*words, cwd=tmp_path) == offered


@needs_bash
def test_mount_points_are_not_run(tmp_path: Path) -> None:
    points = r"""'/mnt/a b' '/mnt/$(touch pwned)' '/mnt/`touch pwned`' /elsewhere"""
    offered = complete("umount", "/mnt/", cwd=tmp_path, findmnt=points)
    assert offered == ["/mnt/a b", "/mnt/$(touch pwned)", "/mnt/`touch pwned`"]
    assert list(tmp_path.iterdir()) == []


@needs_bash
@needs_mounts
def test_mount_points_and_what_lies_in_them(work: Bench) -> None:
    mount = work.mount(write_files(work.path / "source", {"images/f": b"", "labels.txt": b""}))
    point = str(mount.path)
    for command in ("umount", "status", "evict", "pin"):
        assert complete(command, point[:-2], cwd=work.path) == [point]
    assert complete("pin", point, "lab", cwd=work.path) == ["labels.txt"]
    assert complete("pin", point, f"{point}/im", cwd=work.path) == [f"{point}/images"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_a_script_that_the_shell_can_read(shell: str, tmp_path: Path) -> None:
    done = run("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert "monarchfs" in done.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}, to read its script: apt-get install {shell}")
    (tmp_path / "script").write_text(done.stdout)
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=30)
