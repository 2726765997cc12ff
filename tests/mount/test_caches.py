"""``monarchfs cache``: which caches there are, whose, in use by which mount; and how they go.

Whose a directory in a tier is: no two mounts share one, nobody else can be first, and what an
earlier mount copied is found again."""

import json
import os
import pwd
import shlex
import shutil
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from monarchfs.cli.main import main
from monarchfs.config.places import dataset_id
from tests.support import mounting
from tests.support.fake_mounts import NOBODY, interpreter_for
from tests.support.programs import execute
from tests.support.trees import write_files

pytestmark = [*mounting.requires_mounts, pytest.mark.timeout(120)]

FILES = 3
BIN = pwd.getpwnam("bin").pw_uid


@pytest.fixture
def work(work: mounting.Bench) -> mounting.Bench:
    write_files(work.path / "src", {f"f{number}": b"%d" % number * 5000 for number in range(FILES)})
    (work.path / "tier").mkdir()
    (work.path / "other").mkdir()
    return work


def mounted(
    work: mounting.Bench, state: str = "state", *options: str, tier: str = "tier"
) -> mounting.Mount:
    """All of it copied."""
    arguments = ("--state-dir", f"{work.path}/{state}", "--prefetch", "all", *options)
    mount = work.mount(work.path / "src", *arguments, tiers=[f"{work.path}/{tier}=100M"])
    mount.wait_idle()
    # A new index knows what lies there once somebody looked.
    mounting.wait_for(lambda: mount.status()["tiers"][0]["files"] == FILES, "all copies")
    return mount


def ended(mount: mounting.Mount) -> None:
    done = mount.umount()
    assert done.returncode == 0, done.stderr


def cache(
    work: mounting.Bench, *arguments: str, code: int = 0, user: str | None = None
) -> dict[str, Any]:
    """What the command says, looking into the tiers of the test."""
    tiers = ("--tier", f"{work.path}/tier", "--tier", f"{work.path}/other", "--json")
    if user is not None:
        done = mounting.run("cache", *arguments, *tiers, user=user)
        returned, out, errors = done.returncode, done.stdout, done.stderr
    else:  # in this process: that takes half the time
        with redirect_stdout(StringIO()) as said, redirect_stderr(StringIO()) as complaint:
            returned = main(["cache", *arguments, *tiers])
        out, errors = said.getvalue(), complaint.getvalue()
    assert (returned, errors.count("\n")) == (code, int(code > 0)), errors
    found: dict[str, Any] = json.loads(out) if code == 0 else {"error": errors}
    return found


def of_test(work: mounting.Bench, said: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in said["caches"] if one["source"] == f"{work.path}/src"]


def test_caches_are_listed_and_removed(work: mounting.Bench) -> None:
    """Root's, mounted, and a user's; the user sees and removes nothing of root's."""
    interpreter_for("bin")
    one = mounted(work, "one")
    ended(mounted(work, "two", "--user", "bin"))
    rows = {row["state_dir"]: row for row in of_test(work, cache(work, "list"))}
    used, idle = rows[f"{work.path}/one"], rows[f"{work.path}/two"]
    assert (used["in_use"], used["mountpoint"], used["user"]) == (True, str(one.path), "root")
    assert (idle["in_use"], idle["mountpoint"], idle["user"]) == (False, None, "bin")
    for row in (used, idle):
        (tier,) = row["tiers"]
        assert (tier["tier"], tier["stranded"]) == (f"{work.path}/tier", None)
        # Of a mounted one what was synced is told.
        assert tier["files"] in ((0, FILES) if row is used else (FILES,))
        assert row["used_bytes"] == tier["used_bytes"] > 0
    # In use: one line, and nothing happens, also where another cache of the source is not.
    assert str(one.path) in cache(work, "remove", f"{work.path}/src", "--yes", code=1)["error"]
    assert len(of_test(work, cache(work, "list"))) == 2
    # Nobody can be asked.
    mounting.assert_one_line(mounting.run("cache", "remove", f"{work.path}/two"), 2, "--yes")
    assert [row["uid"] for row in of_test(work, cache(work, "list", user="bin"))] == [BIN]
    cache(work, "remove", f"{work.path}/one", "--yes", code=1, user="bin")
    # Somebody else's file in the state directory stays, and with it the directory.
    (work.path / "two" / "notes.txt").write_text("")
    (row,) = cache(work, "remove", f"{work.path}/two", "--yes")["caches"]
    assert row["removed"]
    assert os.listdir(work.path / "two") == ["notes.txt"]
    assert len(list((work.path / "tier").iterdir())) == 1
    assert f"in use by {one.path}" in mounting.run("cache", "show", str(one.path)).stdout
    ended(one)
    # Not used for a second, once that second is over.
    old = ("prune", f"{work.path}/src", "--older-than", "1s", "--yes")
    mounting.wait_for(lambda: cache(work, *old)["caches"], "it to be old")
    assert list((work.path / "tier").iterdir()) == []
    assert not (work.path / "one").exists()


def test_stranded_copies_are_pruned(work: mounting.Bench) -> None:
    """Of a state directory that is gone, and of another --tier, also under the running mount."""
    ended(mounted(work, "gone"))
    shutil.move(work.path / "tier", work.path / "before")
    (work.path / "tier").mkdir()
    ended(mounted(work, "state"))
    for path in (work.path / "before").iterdir():
        path.rename(work.path / "tier" / path.name)
    shutil.rmtree(work.path / "gone")
    mount = mounted(work, "state", tier="other")
    said = cache(work, "prune", f"{work.path}/src", "--dry-run")
    reasons = sorted(tier["stranded"] for row in of_test(work, said) for tier in row["tiers"])
    assert reasons == ["its last mount did not name this tier", "no state directory claims it"]
    assert len(list((work.path / "tier").iterdir())) == 2
    # The mount names the command that removes what it leaves, and nothing else.
    lines = [line for line in work.log().splitlines() if "copies of an earlier mount stay" in line]
    command = lines[-1].partition("remove them with ")[2]
    assert command.startswith("monarchfs cache remove ")
    assert main([*shlex.split(command)[1:], "--yes"]) == 0
    assert len(list((work.path / "tier").iterdir())) == 1
    notes = mounting.asked("gc", "--dry-run")["notes"]
    assert any("monarchfs cache prune" in note for note in notes)
    pruned = cache(work, "prune", f"{work.path}/src", "--yes")["caches"]
    assert all(row["removed"] for row in pruned)
    assert list((work.path / "tier").iterdir()) == []
    assert mount.status()["tiers"][0]["files"] == FILES
    ended(mount)
    # A source that is not there is gone only where that is said.
    shutil.move(work.path / "src", work.path / "moved")
    prune = ("prune", f"{work.path}/src", "--state-dir", f"{work.path}/state", "--yes")
    assert of_test(work, cache(work, *prune)) == []
    assert len(of_test(work, cache(work, *prune, "--source-gone"))) == 1
    assert list((work.path / "other").iterdir()) == []


def test_what_is_only_called_like_a_directory_of_copies_is_none(work: mounting.Bench) -> None:
    ended(mounted(work))
    shutil.rmtree(work.path / "state")
    (made,) = (work.path / "tier").iterdir()
    for letter, inside in (("a", "notes.txt"), ("b", "parts"), ("c", "")):
        (work.path / "tier" / f"{letter * 16}-{letter * 16}" / inside).mkdir(parents=True)
    (row,) = of_test(work, cache(work, "prune", "--dry-run"))
    assert [tier["path"] for tier in row["tiers"]] == [str(made)]
    (made / "owner").rename(work.path / "tier" / f"{'d' * 16}-{'d' * 16}")
    said = cache(work, "prune", "--dry-run")
    assert [row for row in said["caches"] if row["tiers"][0]["tier"] == f"{work.path}/tier"] == []


def test_links_lead_root_nowhere(work: mounting.Bench) -> None:
    """A user's state directory and tiers name, or are links to, what is root's."""
    precious = work.path / "precious"
    (precious / "index").mkdir(parents=True, mode=0o700)
    (precious / "index" / "data.mdb").write_text("root's")
    (precious / "owner").write_text(json.dumps({"source": "/s", "uid": BIN, "state_dir": "/x"}))
    precious.chmod(0o700)
    own = work.path / "own"
    name = f"{'a' * 16}-{'b' * 16}"
    script = f"""
import json, os
os.chdir({str(own)!r})
os.makedirs("state")
open("state/lock", "w").write(json.dumps({{"pid": 1, "mountpoint": "/m", "source": "/evil",
    "dataset_id": "{"a" * 16}", "tiers": []}}))
open("state/tiers", "w").write(json.dumps({{"tiers": {{os.getcwd() + "/t": "{name}",
    os.getcwd() + "/u": "{name}"}}}}))
os.symlink({str(precious)!r}, "state/index")
os.makedirs("t"); os.symlink({str(precious)!r}, "t/{name}")
os.makedirs("u/{name}", 0o700)
open("u/{name}/owner", "w").write(json.dumps({{"source": "/evil", "uid": {BIN},
    "state_dir": os.getcwd() + "/state"}}))
os.symlink({str(precious)!r}, "u/{name}/aa")
os.mkfifo("state/worker.log")
"""
    own.mkdir()
    os.chown(own, BIN, BIN)
    subprocess.run(mounting.as_user("bin", [interpreter_for("bin"), "-c", script]), check=True)
    before = sorted(precious.rglob("*"))
    # Root's own directory, by way of a link of theirs.
    (precious / "lock").write_text((own / "state" / "lock").read_text())
    os.symlink(work.path, own / "link")
    os.lchown(own / "link", BIN, BIN)
    assert main(["cache", "remove", f"{own}/link/precious", "--yes"]) == 1
    (precious / "lock").unlink()
    assert main(["cache", "remove", f"{own}/state", "--yes"]) == 0
    assert sorted(precious.rglob("*")) == before
    assert (precious / "index" / "data.mdb").read_text() == "root's"
    assert not (own / "state").exists()
    assert not (own / "u" / name).exists()


def test_who_is_at_a_terminal_is_asked(work: mounting.Bench) -> None:
    state = work.path / "state"
    state.mkdir(mode=0o700)
    holder = {"pid": 1, "mountpoint": "/m", "source": "/gone", "dataset_id": "", "tiers": []}
    (state / "lock").write_text(json.dumps(holder))
    for answer, code in (("n", 1), ("y", 0)):
        ours, theirs = os.openpty()
        os.write(ours, answer.encode() + b"\n")
        done = execute([*mounting.MONARCHFS, "cache", "remove", str(state)], stdin=theirs)
        os.close(ours)
        os.close(theirs)
        assert done.returncode == code, done.stderr
        assert "/gone" in done.stderr
        assert state.exists() == (answer == "n")


def copied(mount: mounting.Mount) -> int:
    """How many files this mount has read from the source."""
    return int(mount.status()["prefetch"]["completed"])


def directories(tier: Path) -> list[Path]:
    return sorted(path for path in tier.iterdir() if path.is_dir())


def test_two_state_directories_share_no_copies(work: mounting.Bench) -> None:
    """Not even where the other one's cannot be seen, as from another container."""
    one = mounted(work, "one")
    (work.path / "one").rename(work.path / "hidden")
    other = mounted(work, "two")
    assert copied(other) == FILES
    assert mounting.run("evict", str(other.path)).returncode == 0
    mounting.wait_for(lambda: other.status()["tiers"][0]["files"] == 0, "the copies to be removed")
    assert one.status()["tiers"][0]["files"] == FILES
    (work.path / "hidden").rename(work.path / "one")
    for mount in (one, other):
        ended(mount)
    for state, files in (("one", FILES), ("two", 0)):
        report = mounting.asked("fsck", f"{work.path}/{state}")
        assert (report["findings"], report["tiers"][0]["files"]) == ({}, files)


def test_nobody_else_can_be_first(work: mounting.Bench) -> None:
    """In a directory that everybody may write to, another user has made what could be guessed."""
    interpreter_for("bin")
    tier = work.path / "tier"
    tier.chmod(0o1777)
    source = str(work.path / "src")
    for uid, options in ((0, ()), (2, ("--user", "bin"))):
        name = dataset_id(source, uid)
        squatted = [tier / name, tier / f"{name}-{'0' * 16}"]
        for path in squatted:
            subprocess.run(mounting.as_user(NOBODY, ["mkdir", "-m", "777", str(path)]), check=True)
        mount = mounted(work, f"state{uid}", *options)
        own = [path for path in directories(tier) if path.stat().st_uid == uid]
        assert [path.stat().st_mode & 0o777 for path in own] == [0o700]
        assert all(not list(path.iterdir()) for path in squatted)
        ended(mount)
        # The next mount finds its own.
        mount = mounted(work, f"state{uid}", *options)
        assert copied(mount) == 0
        ended(mount)


def test_copies_are_found_again(work: mounting.Bench) -> None:
    """After the loss of the index, of the state directory, and by another one once that is gone."""
    ended(mounted(work))
    (before,) = directories(work.path / "tier")
    shutil.rmtree(work.path / "state" / "index")
    mount = mounted(work)
    assert (copied(mount), directories(work.path / "tier")) == (0, [before])
    ended(mount)
    # A mount that does not name the tier counts them, and leaves them to one that does.
    options = ("--state-dir", f"{work.path}/state", "--prefetch", "none")
    mount = work.mount(work.path / "src", *options, tiers=[f"{work.path}/other=100M"])
    (other,) = mount.status()["other_tiers"]
    assert (other["path"], other["files"]) == (f"{work.path}/tier", FILES)
    ended(mount)
    mount = mounted(work)
    assert (copied(mount), mount.status()["other_tiers"]) == (0, [])
    ended(mount)
    shutil.rmtree(work.path / "state")
    mount = mounted(work)
    assert copied(mount) == 0
    ended(mount)
    (work.path / "state").rename(work.path / "kept")
    mount = mounted(work, "another")
    assert copied(mount) == 0
    assert "took over" in work.log()
    ended(mount)
    # The first one is back: what was its own is the other's by now.
    (work.path / "kept").rename(work.path / "state")
    mount = mounted(work)
    assert copied(mount) == FILES
    ended(mount)
    assert len(directories(work.path / "tier")) == 2
    assert mounting.asked("fsck", f"{work.path}/another")["findings"] == {}


def test_a_directory_that_is_not_ours_any_more(work: mounting.Bench) -> None:
    tier = work.path / "tier"
    ended(mounted(work))
    for spoilt in ("link", "file", "foreign", "open", "fifo"):
        (made,) = {path.parent for path in tier.glob("*/owner") if path.is_file()}
        beside = work.path / f"beside {spoilt}"
        made.rename(beside)
        match spoilt:
            case "link":
                made.symlink_to(beside)
            case "file":
                made.write_text("")
            case "foreign":
                made.mkdir()
                shutil.chown(made, NOBODY)
            case "open":
                made.mkdir()
                made.chmod(0o777)
            case _:
                made.mkdir(0o700)
                os.mkfifo(made / "owner")
        before = sorted(os.listdir(beside))
        mount = mounted(work)
        assert copied(mount) == FILES, spoilt
        assert sorted(os.listdir(beside)) == before
        ended(mount)
        if made.is_symlink():
            made.unlink()
    mount = mounted(work)
    assert copied(mount) == 0
    ended(mount)
