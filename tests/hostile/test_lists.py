"""Lists of paths (--prefetch FILE): whatever is in one, nothing outside of the source is read."""

import os
import resource
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from monarchfs.control.messages import MOST_PATH_BYTES
from monarchfs.prefetch.scan import read_list
from tests.support import on_disk, trees
from tests.support.fake_mounts import interpreter_for
from tests.support.mounting import Bench, assert_one_line, requires_fuse, requires_root, run

ROOTS = [b"/data/set", b"/mnt/set/"]
LINES = st.lists(
    st.sampled_from(
        [b"a", b"..", b"/", b"//", b".", b"\0", b"\n", b"\r\n", b"\xff", b"/data/set", b"/mnt/set"]
    )
    | st.binary(max_size=12),
    max_size=12,
).map(b"".join)


@given(LINES)
@example(b"/data/set/../../etc/passwd\n")
@example(b"x" * (1 << 20))
@example(b"a\n" + b"x" * 200_000 + b"\nb")
@example(b"\n" * 1000)
def test_any_bytes_are_short_names(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        paths = read_list(file.name, ROOTS)
    for path in paths:
        assert path
        assert b"\n" not in path
        assert len(path) <= MOST_PATH_BYTES
        assert path in content
    if len(content) < MOST_PATH_BYTES:
        assert len(paths) <= content.count(b"\n") + 1


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "list"
    with open(path, "wb") as file:
        file.write(b"first\n")
        file.seek(512 << 20)  # a hole: zeros
        file.write(b"\nlast\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_list(str(path), ROOTS) == [b"first", b"last"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


@requires_root
@requires_fuse
def test_a_mount_copies_what_is_in_the_source_alone(work: Bench) -> None:
    """A worker of an ordinary user, and files next to the source that this user may read."""
    interpreter_for("nobody")
    outside = work.path / "outside"
    trees.dataset(outside, files=3)
    source = work.path / "src"
    contents = trees.dataset(source, files=3)
    (source / "up").symlink_to("..")
    (source / "out").symlink_to(outside)
    os.mkfifo(source / "fifo")
    wanted = sorted(contents)[0]
    neighbour = sorted(p.relative_to(outside) for p in outside.rglob("*") if p.is_file())[0]
    lines = [
        *("..", "../..", "/", "", ".", "up", "out", "fifo", "nosuch", "\0", "x" * 100_000),
        *(f"../outside/{neighbour}", f"{outside}/{neighbour}", f"up/outside/{neighbour}"),
        *(f"out/{neighbour}", f"{source}/../outside/{neighbour}", "/proc/self/mem", "/dev/zero"),
        *("a/" * 5000, "-rf", "$(touch /tmp/x)", "\udcff\udcfe", f"./{wanted}", f"{wanted}/x"),
        *(f"x{number}" for number in range(4000)),
        str(wanted),
    ]
    (work.path / "list").write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    mount = work.mount(source, "--prefetch", f"{work.path}/list", "--user", "nobody")
    assert len((work.path / "log").read_text().splitlines()) < 40, "the log is not flooded"
    status = mount.wait_idle()
    assert status["files"]["resident"] == 1, status["files"]
    assert status["source_io"]["read_bytes"] == len(contents[wanted])
    assert status["worker"]["restarts"] == 0
    assert [p.read_bytes() for p in on_disk.own_files(work.path / "tier")] == [contents[wanted]]
    assert on_disk.segments(work.path / "tier") == []


@requires_root
@requires_fuse
@pytest.mark.parametrize("kind", ["fifo", "directory", "device", "secret", "link to a secret"])
def test_what_is_no_list_of_the_users_is_refused(work: Bench, kind: str) -> None:
    """Root does not read for a user what that user may not."""
    interpreter_for("nobody")
    (work.path / "src").mkdir()
    path = work.path / "list"
    secret = work.path / "secret"
    secret.write_text("root's alone\n")
    secret.chmod(0o600)
    match kind:
        case "fifo":
            os.mkfifo(path, 0o666)
        case "directory":
            path.mkdir()
        case "device":
            path = Path("/dev/zero")
        case "secret":
            path = secret
        case _:
            path.symlink_to(secret)
    done = work.try_to_mount(work.path / "src", "--prefetch", str(path), "--user", "nobody")
    assert_one_line(done, 2, "cannot be read by nobody")
    assert not (work.path / "state").exists()


@requires_root
@requires_fuse
def test_mistakes_are_told_at_mount(work: Bench) -> None:
    source, point, file = work.path / "src", work.path / "mnt", work.path / "list"
    contents = sorted(trees.dataset(source, files=5))

    def told(lines: list[str]) -> str:
        file.write_text("".join(f"{line}\n" for line in lines))
        done = work.try_to_mount(source, "--prefetch", str(file))
        assert done.returncode == 0
        assert run("umount", f"{point}").returncode == 0
        return done.stderr

    absolute = [f"{source}/{contents[1]}", "", f"{point}/{contents[2]}"]
    good = [contents[0], *absolute, f"./{contents[3]}"]
    assert told(good) == ""
    said = told([*good, "nosuch\x1b[2J", "also/not/there", contents[4]])
    assert said == (
        f"monarchfs: prefetch list {file}: 2 of 7 lines name no file in the source, the first is"
        " line 6: nosuch\\x1b[2J\n"
    )
    # Of another dataset, and longer than is looked up.
    said = told([*good, *(f"/other/{number}" for number in range(5000))])
    assert f"{file}: 5,000 of 5,004 lines name no file" in said
    assert "line 6: /other/0" in said
    assert f"{file} names nothing" in told(["", ""])
