"""The man pages say what the parsers know, in the language that man(1) reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from monarchfs.cli.man import helper_page, monarchfs_page
from monarchfs.cli.mount_helper import build_helper_parser
from monarchfs.cli.parser import build_parser, commands_of
from tests.support import surroundings
from tests.support.mounting import REPOSITORY

needs_groff = surroundings.program("groff", "groff-base")


@pytest.fixture
def pages(tmp_path: Path) -> list[Path]:
    subprocess.run(
        [sys.executable, "-m", "monarchfs.cli.man", str(tmp_path / "man")],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        timeout=30,
    )
    return sorted((tmp_path / "man").iterdir())


def test_two_pages_are_written(pages: list[Path]) -> None:
    assert [page.name for page in pages] == ["monarchfs.1", "mount.monarchfs.8"]


def test_every_command_and_option_is_there() -> None:
    page = monarchfs_page(build_parser()).replace("\\-", "-")
    for name, command in commands_of(build_parser()).items():
        begins = page.index(f'.SS "monarchfs {name}"')
        section = page[begins : page.find(".S", begins + 3)]
        for action in command._actions:
            for option in action.option_strings:
                assert option in section, f"{name} {option}"
            assert (action.help or "").partition("%")[0] in section
    helper = helper_page(build_helper_parser()).replace("\\-", "-")
    for action in build_helper_parser()._actions:
        assert all(option in helper for option in action.option_strings)


@needs_groff
def test_groff_has_nothing_to_complain_about(pages: list[Path]) -> None:
    for page in pages:
        done = subprocess.run(
            ["groff", "-man", "-ww", "-Tascii", "-P-cbou", str(page)],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert done.stderr == ""
        assert "monarchfs mount" in done.stdout or page.name == "mount.monarchfs.8"
        assert "/lustre/imagenet" in done.stdout
        assert "tier=/scratch=80%,allow_other" in done.stdout or page.name == "monarchfs.1"
