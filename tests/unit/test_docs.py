"""The documents and man pages say what the program can do, and promises name their tests."""

import argparse
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import bench.run
from monarchfs.cli.documents import helper_page, monarchfs_page
from monarchfs.cli.mount_helper import build_helper_parser
from monarchfs.cli.parser import build_parser, commands_of
from monarchfs.config.files import SYSTEM_FILE, from_file
from monarchfs.config.options import OPTIONS
from monarchfs.config.settings import PROFILES, Settings, is_known_option
from tests.support import surroundings
from tests.support.fake_daemon import healthy
from tests.support.mounting import REPOSITORY, Bench, requires_fuse, requires_root
from tests.support.programs import execute

USAGE = (REPOSITORY / "docs" / "USAGE.md").read_text()
CONFIGURATION = (REPOSITORY / "docs" / "CONFIGURATION.md").read_text()
TROUBLESHOOTING = (REPOSITORY / "docs" / "TROUBLESHOOTING.md").read_text()

COMMANDS = commands_of(build_parser())
LONG_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
OF_OTHER_PROGRAMS = {
    *("--vfs-cache-mode", "--only-values", "--bind", "--comment", "--monarchfs", "--data"),
    *("--now", "--table", "--no-index", "--find-links"),
    *("--fusemount", "--no-checksum", "--path", "--prefix"),
}
"""Options in the documents that are getfattr's, a container's, sbatch's, a training script's,
systemctl's, rclone's, pip's, git's, Spack's or packaging/bundle/check.py's."""


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {word for action in parser._actions for word in action.option_strings} - {"-h"}


def sections(text: str, mark: str) -> dict[str, str]:
    """The parts of a document by their headings of one level; each ends where a heading of this
    level or a higher one begins."""
    found: dict[str, str] = {}
    heading, fenced = None, False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        level = 0 if fenced else len(line) - len(line.lstrip("#"))
        if 0 < level <= len(mark):
            heading = line.strip("#` ") if level == len(mark) else None
        elif heading is not None:
            found[heading] = found.get(heading, "") + line + "\n"
    return found


def names_in(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None


# ARCHITECTURE is about how the program works.
ABOUT_USE = sorted(
    path for path in (REPOSITORY / "docs").glob("*.md") if path.name != "ARCHITECTURE.md"
)


@pytest.mark.parametrize("command", COMMANDS)
def test_usage_has_every_command_and_option(command: str) -> None:
    about = [s for s in sections(USAGE, "##").values() if names_in(s, f"monarchfs {command}")]
    assert about, f"no section of docs/USAGE.md has `monarchfs {command}`"
    missing = [
        option
        for option in sorted(options_of(COMMANDS[command]))
        if option.startswith("--")
        and option != "--help"
        and not any(names_in(section, option) for section in about)
    ]
    assert not missing, f"docs/USAGE.md has not where it has `monarchfs {command}`: {missing}"


@pytest.mark.parametrize("document", ABOUT_USE, ids=lambda p: p.name)
def test_documents_name_no_option_and_no_command_that_there_is_not(document: Path) -> None:
    text = document.read_text()
    parsers = (build_parser(), build_helper_parser(), *COMMANDS.values())
    unknown = set(LONG_OPTION.findall(text)) - OF_OTHER_PROGRAMS.union(*map(options_of, parsers))
    if document.name == "BENCHMARKS.md":
        unknown -= options_of(bench.run.build_parser())
    assert not unknown, f"{document.name} has options that no command has"
    said = set(re.findall(r"(?:^|[`$] ?|sudo )monarchfs ([a-z]+)", text, flags=re.M))
    assert said <= set(COMMANDS), f"{document.name} has commands that there are not"
    shown = "".join(text.replace("\\\n", "").split("```")[1::2])
    for words in re.findall(r"^(?:[#$] )?monarchfs (.*?)(?: (?:--|&|>+)(?: .*)?)?$", shown, re.M):
        if not re.search(r"\.\.\.|\[|\|", words):
            build_parser().parse_args(shlex.split(words, comments=True))


def test_configuration_has_every_option_and_no_other() -> None:
    options = sections(CONFIGURATION, "###")
    assert set(options) == set(OPTIONS)
    assert options_of(COMMANDS["mount"]) - {"--help"} <= {
        *LONG_OPTION.findall(CONFIGURATION),
        *("-o", "-f"),
    }
    rows = re.findall(r"^\| `([a-z-]+)` \| .* \| (.*) \|$", options["profile"], re.MULTILINE)
    said = [(name, re.findall("`([^`]*)`", sets)) for name, sets in rows]
    every = {one.value: [f"{k}={v}" for k, v in sets.items()] for one, sets in PROFILES.items()}
    assert {"none": [], **dict(said)} == every


@pytest.mark.parametrize("key", OPTIONS)
def test_configuration_has_every_form_and_the_default(key: str) -> None:
    forms, _, meaning = sections(CONFIGURATION, "###")[key].strip().partition("\n\n")
    assert forms.startswith(f"{OPTIONS[key].forms(key)} · default: ")
    assert meaning
    default = getattr(Settings(), key)
    said = re.search(r"default: `([^`]*)`$", forms)
    if said is None:
        assert default is None, f"no default of {key}"
        assert "default: " in forms
    else:
        assert OPTIONS[key].parse(said[1]) == default


def test_the_example_has_every_option_at_its_default_and_changes_nothing(tmp_path: Path) -> None:
    text, file = sections(CONFIGURATION, "##")["A complete example"], tmp_path / "example.toml"
    (example,) = re.findall(r"^```toml\n(.*?)^```$", text, flags=re.M | re.S)
    assert example.startswith(f"# {SYSTEM_FILE}")
    file.write_text(example)
    assert from_file(str(file)) == {}
    file.write_text(re.sub(r"^#(?=[a-z_]+ = )", "", example, flags=re.M))
    layer = from_file(str(file))
    assert set(layer) == {field.name for field in fields(Settings)}
    for key, value in layer.items():
        default = getattr(Settings(), key)
        assert default is None or value == default, key


def test_lines_of_fstab_can_be_used() -> None:
    lines = [line.split() for line in (CONFIGURATION + USAGE + TROUBLESHOOTING).splitlines()]
    mounts = [words for words in lines if len(words) == 6 and words[2] == "monarchfs"]
    assert mounts
    for words in mounts:
        for option in words[3].split(","):
            assert is_known_option(option), option


def test_the_site_is_built_and_no_link_or_anchor_is_broken(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs: make setup")
    words = [sys.executable, "-m", "mkdocs", "build", "--config-file", "packaging/site/mkdocs.yml"]
    built = execute([*words, "--site-dir", str(tmp_path)], cwd=REPOSITORY)
    assert built.returncode == 0, built.stdout + built.stderr


def test_the_readme_has_all_documents() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    for document in (REPOSITORY / "docs").glob("*.md"):
        assert f"(docs/{document.name})" in readme, document.name
    # There is no release of ours on the index: what has the name there is somebody else's.
    documents = (*ABOUT_USE, REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md")
    for path in (*documents, *(REPOSITORY / "monarchfs").rglob("*.py")):
        named = re.search(r"pip install [^\n]*(?<![\w./-])monarchfs(?![\w/-])", path.read_text())
        assert named is None, f"{path.name}: {named}"


def keys_of(report: dict[str, Any]) -> set[str]:
    found = set(report)
    for value in report.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                found |= set(part)
    return found


@requires_root
@requires_fuse
def test_every_key_is_documented_and_in_the_report_of_the_fake_daemon(work: Bench) -> None:
    source = work.path / "source"
    source.mkdir()
    report = work.mount(source).status()
    section = USAGE[USAGE.index("## Looking") :]
    section = section[: section.index("\n## ", 1)].replace("[]`", "`")
    assert [key for key in sorted(keys_of(report)) if f"`{key}`" not in section] == []
    assert {"age_seconds", "uptime_seconds", "left_bytes", "operation_seconds"} <= keys_of(report)
    assert keys_of(healthy()) == keys_of(report) - {"private"}, "tests/support/status.json"


@pytest.fixture
def pages(tmp_path: Path) -> list[Path]:
    words = [sys.executable, "-m", "monarchfs.cli.documents", str(tmp_path / "man")]
    execute(words, cwd=REPOSITORY, check=True)
    return sorted((tmp_path / "man").iterdir())


def test_the_man_pages_have_every_command_and_option(pages: list[Path]) -> None:
    assert [page.name for page in pages] == ["monarchfs.1", "mount.monarchfs.8"]
    page = monarchfs_page(build_parser()).replace("\\-", "-")
    for name, command in COMMANDS.items():
        begins = page.index(f'.SS "monarchfs {name}"')
        section = page[begins : page.find(".S", begins + 3)]
        for action in command._actions:
            for option in action.option_strings:
                assert option in section, f"{name} {option}"
            assert (action.help or "").partition("%")[0] in section
    helper = helper_page(build_helper_parser()).replace("\\-", "-")
    for action in build_helper_parser()._actions:
        assert all(option in helper for option in action.option_strings)


@surroundings.program("groff", "groff-base")
def test_groff_has_nothing_to_complain_about(pages: list[Path]) -> None:
    for page in pages:
        done = execute(["groff", "-man", "-ww", "-Tascii", "-P-cbou", str(page)], check=True)
        assert done.stderr == ""
        assert "monarchfs mount" in done.stdout or page.name == "mount.monarchfs.8"
        assert "/lustre/imagenet" in done.stdout
        assert "tier=/scratch=80%,allow_other" in done.stdout or page.name == "monarchfs.1"


NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


@pytest.mark.parametrize("document", ["SEMANTICS.md", "SECURITY.md"])
def test_the_tests_that_promises_name_exist(document: str) -> None:
    named = NAMED.findall((REPOSITORY / "docs" / document).read_text())
    assert len(named) > 15
    for path, function in named:
        assert f"def {function or 'test_'}" in (REPOSITORY / path).read_text(), (path, function)


def test_the_tests_that_are_run_with_the_oldest_libraries_exist() -> None:
    (paths,) = re.findall(r"^ +(tests/.*)$", (REPOSITORY / ".ci/packaging").read_text(), re.M)
    execute(["bash", "-c", f"ls -d {paths}"], cwd=REPOSITORY, check=True)
    semantics, security = (
        (REPOSITORY / "docs" / name).read_text() for name in ("SEMANTICS.md", "SECURITY.md")
    )
    promises = semantics.partition("## What is not promised")[0]
    table = security.partition("## What may be hostile")[2].partition("## Who may read")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for one in (*re.split(r"^- \*\*", promises, flags=re.MULTILINE)[1:], *rows):
        assert NAMED.search(one), one
