"""The commands that the documents show, each run in a root over this machine's (documents.sh)."""

import re
import shutil
import sys
from pathlib import Path

from tests.packages import nodes
from tests.support.mounting import requires_fuse, requires_root
from tests.support.surroundings import REPOSITORY, requires_namespaces

NOT_RUN = {
    "make ": "set-up, tests, measurements and builds, which run by themselves",
    "apt-get |pip |python3.11 |/opt/monarchfs/bin/pip |dpkg |rpm |packaging/": "test_packages",
    "spack |apptainer |python3 packaging/|cp /usr/": "they need what Debian lacks, or a build",
    "systemctl |install -d |cat > |qsub ": "they need systemd or Grid Engine",
    "monarchfs selftest ": "tests/mount/test_doctor.py has fewer files",
    "monarchfs (report 4711|peers |analyze )": "they need what a job left behind",
    "monarchfs cache remove ": "it asks somebody at a terminal",
    "grep 'job|grep refused|tar xzf |echo '{": "names of a file that differ each time",
    r"monarchfs mount .*\\\n.*--peers": "it needs nodes of these names",
}
"""Lines that stay away, and why."""


def blocks() -> list[tuple[str, str]]:
    """Where each block of commands is, and its lines."""
    found = []
    for path in sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")]):
        text = path.read_text()
        for block in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
            kind, content = block.groups()
            if kind == "console":
                content = "".join(re.findall(r"^[$#] ((?:.*\\\n)*.*\n)", content, re.M))
            lines = re.findall(r"(?:.*\\\n)*.*\n", content)
            if kind in ("sh", "console"):
                kept = [line for line in lines if not re.match("|".join(NOT_RUN), line)]
                found.append(
                    (f"{path.name}:{text[: block.start()].count(chr(10)) + 1}", "".join(kept))
                )
            else:
                shown = [
                    line for line in lines if re.match(r"\$ |(srun )?monarchfs [a-z]+ /", line)
                ]
                assert not shown, f"{path.name}: a block of commands without sh or console: {shown}"
    return [
        (where, commands) for where, commands in found if re.sub("(?m)#.*", "", commands).strip()
    ]


@requires_root
@requires_fuse
@requires_namespaces
def test_the_commands_in_the_documents_do_what_they_are_shown_for(tmp_path: Path) -> None:
    scripts, layer = tmp_path / "scripts", tmp_path / "layer"
    scripts.mkdir()
    layer.mkdir()
    here = Path(__file__).parent
    shutil.copy(here / "install.sh", scripts)
    shown = "".join(
        f"block {where} <<'END OF BLOCK'\n{text}END OF BLOCK\n" for where, text in blocks()
    )
    ending = 'step failed\necho "$failed"\nstep done\n'
    (scripts / "run.sh").write_text((here / "documents.sh").read_text() + shown + ending)
    programs = str(Path(sys.executable).parent)
    steps = nodes.tried_on(
        Path("/"), "run.sh", programs, REPOSITORY, layer, place=str(REPOSITORY), scripts=scripts
    )
    failed = re.findall(r"[\w.]+:\d+", steps["failed"])
    assert not failed, "\n".join(f"{where}:\n{steps[where]}" for where in failed)
    assert len(steps) > 25
