"""What `monarchfs analyze` says of jobs whose limits are known."""

import json
import subprocess
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.insight import epochs
from monarchfs.insight.analysis import analyze
from monarchfs.insight.epochs import in_order, survey
from monarchfs.insight.page import page_of
from monarchfs.insight.recording import AnsweredBy, Event, Kind, Recording, open_recording
from monarchfs.insight.results import CAUSES, CHECKS, NAMES, Analysis, cause_of
from monarchfs.insight.tables import text_of
from monarchfs.insight.trace import write_trace
from monarchfs.insight.waiting import Sweep
from tests.support.golden import Golden
from tests.support.jobs import (
    FACTS,
    KIB,
    MIB,
    Answer,
    Job,
    always,
    bandwidth,
    many_files,
    sizes_like,
    source_until_copied,
)
from tests.support.mounting import run

SOURCE, TIER, MEMORY = AnsweredBy.SOURCE, AnsweredBy.TIER, AnsweredBy.MEMORY


def analyzed(job: Job, tmp_path: Path, *, nodes: int = 1, **facts: Any) -> Analysis:
    return analyze(open_recording(job.record(tmp_path / "job.rec", **facts)), nodes)


def handed(events: list[Event]) -> list[Event]:
    """Where a tier answered, the kernel got the file with the open, and read by itself."""
    return [
        e._replace(kind=Kind.OPEN, source_of=AnsweredBy.KERNEL, size=0)
        if e.source_of is TIER
        else e
        for e in events
        if e.source_of is not TIER or not e.offset
    ]


def said(found: Analysis) -> str:
    return " ".join(found.verdict.lines)


def with_events(job: Job, events: list[Event]) -> Job:
    job.events = lambda: events  # type: ignore[method-assign]
    return job


def reads(*places: int) -> Job:
    """One process that reads 4 KiB at each place of a file."""
    job = Job(always(TIER, 1), {5: many_files(1, 1 << 40)[100]})
    events = [
        Event(n * 0.1, 0.05, Kind.READ, TIER, 5, 1, place, 4096) for n, place in enumerate(places)
    ]
    return with_events(job, events)


def with_open(answered_by: AnsweredBy) -> Job:
    """Each file comes with its open, in 10 ms, and is read from memory."""
    job = Job(always(answered_by, 0.01))
    events = job.events()
    opens = [e._replace(kind=Kind.OPEN, size=0) for e in events]
    fast = [e._replace(begin=e.begin + e.duration, source_of=MEMORY, duration=1e-4) for e in events]
    return with_events(job, sorted([*opens, *fast]))


def room(mib: int) -> dict[str, Any]:
    return {"tiers": [{"path": "/scratch", "capacity": mib * MIB}]}


def slow_now_and_then(slow: Callable[[Job, int], bool]) -> Answer:
    return lambda job, _now, ino, _size: (SOURCE, 0.5 if slow(job, ino) else 0.005)


def jobs() -> Iterator[tuple[str, Job, dict[str, Any]]]:
    small = sizes_like(many_files(400, 0), 20 * KIB, 60 * KIB, 100 * KIB)
    large = sizes_like(many_files(400, 0), 100 * KIB, 600 * KIB, 900 * KIB)
    one_in_16 = slow_now_and_then(lambda _, ino: not ino % 16)
    by_chance = slow_now_and_then(lambda job, _: job.random.random() < 0.03)
    anywhere = (n * n * 7919 * KIB % (1 << 36) for n in range(100))
    small_steps = Job(always(TIER, 0.01), many_files(20, MIB), request_bytes=4096)
    for what, job in {
        "the source takes 20 ms a file": Job(always(SOURCE, 0.02), small),
        "the source carries 100 MiB/s": Job(bandwidth(100 * MIB), large, compute=0.001),
        "the daemon takes 20 ms": Job(always(MEMORY, 0.02), readers=2),
        "computing takes 20 ms a file, a read 0.5": Job(always(TIER, 0.0005), compute=0.02),
        "10 ms of reading, 12.5 of computing": Job(always(SOURCE, 0.01), readers=1, compute=0.0125),
        "all would fit, and is not copied": Job(always(SOURCE, 0.02), epochs=3),
        "one of 16 files takes 500 ms": Job(one_in_16),
        "3% of reads take 500 ms": Job(by_chance),
        "four processes read all": Job(always(TIER, 0.01), shared=True),
        "one epoch": Job(always(SOURCE, 0.02), epochs=1),
        "three files": Job(always(SOURCE, 0.02), many_files(3, 1)),
        "nothing": Job(always(SOURCE, 0.02), {}, epochs=0),
        "1 MiB in steps of 4 KiB": small_steps,
        "4 KiB of each MiB": reads(*range(0, 100 * MIB, MIB)),
        "4 KiB anywhere": reads(*anywhere),
        "files come with their opens from the source": with_open(SOURCE),
        "... from peers": with_open(AnsweredBy.PEER),
        "... and wait for a copy": with_open(AnsweredBy.WAITED),
    }.items():
        yield what, job, {}
    facts: dict[str, Any]
    for facts in (
        {"hidden": ["lookups"], "data_path": "direct"},
        {"sampled": 8},
        {"hidden": ["reads"]},
        {"hidden": ["opens"]},
        {"dropped": 3},
        {"gaps": [[0, 1]]},
    ):
        job = Job(always(TIER, 0.001), compute=0.02)
        yield f"computing, and the recording says {facts}", job, facts
    unseen: dict[str, Any] = {"hidden": ["reads"], "data_path": "passthrough"}
    job = Job(always(TIER, 0.001), compute=0.02)
    yield "the kernel reads by itself", with_events(job, handed(job.events())), unseen
    job = Job(source_until_copied(0.5, 0.02), many_files(400, MIB), request_bytes=MIB)
    yield "... half of the files", with_events(job, handed(job.events())), unseen | room(201)
    yield "nothing is copied", Job(always(SOURCE, 0.02), epochs=3), {"prefetch": "none"}
    thousand = many_files(1000, 100 * KIB)
    yield "56% fit", Job(source_until_copied(0.56, 0.02), thousand), room(55)
    facts = room(49) | {"sampled": 4}
    yield "one of four was sampled", Job(source_until_copied(0.5, 0.02), thousand), facts
    for nodes in (2, 5):
        facts = room(25) | {"nodes": nodes}
        yield f"{nodes} nodes could share", Job(source_until_copied(0.25, 0.02), thousand), facts
    job = Job(always(TIER, 0.01))
    events = job.events()
    hot = [e._replace(ino=101, offset=0) for e in events[::10]]
    yield "each tenth read is of one file", with_events(job, sorted([*events, *hot])), {}
    opens = [e._replace(kind=Kind.OPEN, source_of=MEMORY, size=0) for e in events]
    yield "opens take as long as reads", with_events(job, sorted([*opens, *events])), {}


def test_what_is_said_of_jobs(tmp_path: Path, golden: Golden) -> None:
    texts = [
        f"# {what}\n{text_of(analyzed(job, tmp_path, **facts))}\n" for what, job, facts in jobs()
    ]
    golden("analyze.txt", "\n".join(texts))


@pytest.mark.parametrize("compute", [0.0, 0.003, 0.03])
@pytest.mark.parametrize("readers", [1, 4])
def test_the_estimate_is_what_the_job_takes(compute: float, readers: int, tmp_path: Path) -> None:
    def job(fits: float) -> Job:
        answer = source_until_copied(fits, 0.02)
        return Job(answer, many_files(500, 100 * KIB), readers, compute=compute)

    tiers = [{"path": "/scratch", "capacity": 250 * 100 * KIB}]
    half, all_local = analyzed(job(0.5), tmp_path, tiers=tiers), analyzed(job(1), tmp_path)
    assert half.outcomes[-1].hit_ratio == 1
    expected = all_local.epochs[1].seconds
    assert half.outcomes[-1].epoch_seconds == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("compute", [0.0, 0.003])
@pytest.mark.parametrize("fits", [1.0, 0.56])
def test_what_immutable_would_bring(fits: float, compute: float, tmp_path: Path) -> None:
    """Names and changes are asked for at each open: that is waiting for the source, and more room
    does less against it."""

    def job(immutable: bool) -> Job:
        answer = source_until_copied(fits, 0.006)
        files = many_files(500, 100 * KIB)
        return Job(answer, files, compute=compute, asked=0.005, immutable=immutable)

    tiers = [{"path": "/scratch", "capacity": int(500 * fits + 1) * 100 * KIB}]
    found = analyzed(job(False), tmp_path, tiers=tiers)
    real = analyzed(job(True), tmp_path, tiers=tiers, freshness="immutable")
    assert found.verdict.kind == "input-bound"
    assert "the source, asked whether names and files have changed (--freshness open)" in said(
        found
    )
    assert "--freshness immutable would bring that to an estimated" in said(found)
    assert "only if no file changes" in said(found)
    assert found.outcomes[1].change == "--freshness immutable"
    assert found.outcomes[1].epoch_seconds == pytest.approx(real.epochs[1].seconds, rel=0.05)
    assert found.epochs[1].span.shared[NAMES] == 0
    asked = found.epochs[1].span.shared[CHECKS] / found.epochs[1].span.waiting
    assert asked == pytest.approx((5 + 5 * fits) / (10 + 6 - 5 * fits), rel=0.05)
    assert "--freshness immutable" not in text_of(real)


def test_readers_that_are_forked_for_each_epoch_do_not_idle_in_others(tmp_path: Path) -> None:
    found = analyzed(Job(always(SOURCE, 0.02), epochs=3, forks=True), tmp_path)
    assert [round(epoch.readers) for epoch in found.epochs] == [4, 4, 4]
    assert all(epoch.waited_share > 0.95 for epoch in found.epochs)
    path = Job(always(SOURCE, 0.02)).record(tmp_path / "job.rec")
    path.write_bytes(path.read_bytes()[:-1])
    found = analyze(open_recording(path))
    assert found.verdict.kind == "input-bound"
    assert "The recorder was killed" in found.verdict.reservations[-1]


INTERVALS = st.lists(
    st.builds(
        lambda begin, took, pid, by: Event(begin, took, Kind.READ, by, 9, pid, 0, 10),
        st.integers(0, 60).map(float),
        st.integers(0, 20).map(float),
        st.integers(1, 3),
        st.sampled_from(AnsweredBy),
    ),
    max_size=25,
).map(sorted)


@given(INTERVALS, st.lists(st.integers(1, 79), max_size=3))
def test_merged_intervals_are_what_plain_counts_give(events: list[Event], cuts: list[int]) -> None:
    lives = survey(events).readers
    sweep = Sweep(sorted({0.0, 80.0, *map(float, cuts)}), lives)
    for event in events:
        sweep.add(cause_of(event), cause_of(event), event, event.size)
    for span in sweep.finish():
        moments = [n + 0.5 for n in range(int(span.begin), int(span.end))]
        under_way = [[e for e in events if e.begin < m < e.begin + e.duration] for m in moments]
        alive = [[p for p, life in lives.items() if life.begin < m < life.end] for m in moments]
        waiting = [{e.pid for e in now} & set(lives) for now in under_way]
        pairs = list(zip(alive, waiting, strict=True))
        assert span.waiting == sum(map(bool, under_way))
        assert span.idle == sum(bool(a) and not w for a, w in pairs)
        assert span.all_waiting == sum(bool(a) and set(a) <= w for a, w in pairs)
        assert span.waited == pytest.approx(sum(len(w) / len(a) for a, w in pairs if a))
        for cause in range(len(CAUSES)):
            mine = [[e for e in now if cause_of(e) == cause] for now in under_way]
            assert span.merged[cause] == sum(map(bool, mine))
        assert sum(span.shared) == pytest.approx(span.waiting)
        assert sum(span.bytes) == 10 * sum(span.begin <= e.begin < span.end for e in events)


@settings(max_examples=40)
@given(
    files=st.integers(100, 200),
    passes=st.integers(1, 4),
    readers=st.integers(1, 4),
    forks=st.booleans(),
    pieces=st.integers(1, 3),
    seed=st.integers(0, 1 << 32),
)
def test_epochs_begin_where_all_is_read_again(
    files: int, passes: int, readers: int, forks: bool, pieces: int, seed: int
) -> None:
    contents = many_files(files, pieces * 128 * KIB)
    job = Job(always(TIER, 0.01), contents, readers, passes, forks=forks, random=Random(seed))
    events = job.events()
    assert survey(in_order(events)).begins == job.begins


@settings(max_examples=40)
@given(
    st.lists(
        st.builds(
            Event,
            begin=st.floats(-1, 50),
            duration=st.floats(0, 20),
            kind=st.sampled_from(Kind),
            source_of=st.sampled_from(AnsweredBy),
            ino=st.integers(0, 120),
            pid=st.integers(0, 3),
            offset=st.integers(0, 1 << 40),
            size=st.integers(0, 1 << 20),
        ),
        max_size=120,
    )
)
def test_whatever_was_recorded_can_be_shown(events: list[Event]) -> None:
    recording = Recording(0.0, 40.0, dict(FACTS), many_files(20, 3), True, Path(), 0, [])
    with patch.object(Recording, "events", events):
        found = analyze(recording)
        write_trace(recording, found.epochs, stream := StringIO())
    json.loads(stream.getvalue())
    assert found.verdict.lines[0] in text_of(found)
    assert page_of(found).endswith("</html>\n")
    assert sum(epoch.span.requests for epoch in found.epochs) <= len(events)


def test_epochs_of_more_files_than_are_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "_MOST_KEYS", 300)
    job = Job(always(TIER, 0.01), many_files(4000, 4 * KIB), epochs=3)
    assert survey(in_order(job.events())).begins == pytest.approx(job.begins, abs=0.02 * job.end)


@pytest.mark.parametrize("readers", [4, 16])
def test_epochs_of_few_large_files_that_turn_local(readers: int) -> None:
    """What is local is one event a file, what is not many; and others read it in each epoch."""
    for seed in range(20):
        answer = source_until_copied(0.56, 0.02)
        files = many_files(40, 4 * MIB)
        job = Job(answer, files, readers, epochs=3, random=Random(seed), request_bytes=512 * KIB)
        assert survey(in_order(handed(job.events()))).begins == pytest.approx(job.begins)


@pytest.mark.parametrize("readers", [2, 4, 16])
@pytest.mark.parametrize("together", [True, False])
def test_processes_that_read_the_same_are_no_epochs(readers: int, together: bool) -> None:
    """In the same order at about the same time, or each in an order of its own."""
    job = Job(always(TIER, 0.01), readers=readers, shared=True, epochs=1)
    events = job.events()
    if not together:
        alone = [Job(job.answer, readers=1, random=Random(n), epochs=1) for n in range(readers)]
        events = sorted(e._replace(pid=n + 1) for n in range(readers) for e in alone[n].events())
    assert len(survey(in_order(events)).begins) == 1


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run("analyze", *map(str, arguments))


def test_the_command(tmp_path: Path) -> None:
    path = Job(source_until_copied(0.5, 0.02)).record(tmp_path / "job.rec")
    page, trace = tmp_path / "job.html", tmp_path / "job.json"
    done = command(path, "--html", page, "--trace", trace)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Input-bound: in epoch 2" in done.stdout
    assert "http" not in page.read_text().replace("http-equiv", "")
    for svg in page.read_text().split("<svg ")[1:]:
        ElementTree.fromstring("<svg " + svg.partition("</svg>")[0] + "</svg>")
    events = json.loads(trace.read_text())["traceEvents"]
    shown = [event for event in events if event["ph"] == "X" and event["pid"]]
    assert len(shown) == 800
    assert {event["args"]["file"] for event in shown} == {f"train/{n:04}.jpg" for n in range(400)}
    found = json.loads(command(path, "--json").stdout)
    assert found["verdict"]["kind"] == "input-bound"
    assert [epoch["files"] for epoch in found["epochs"]] == [400, 400]


def test_odd_names_and_recordings_that_make_no_sense(tmp_path: Path) -> None:
    """They do nothing to a terminal or a page."""
    job, path, page = Job(always(TIER, 0.01)), tmp_path / "job.rec", tmp_path / "job.html"
    job.record(path, source="/l\x1b[2J<script>alert(1)</script>\udcff")
    done = command(path, "--html", page)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "<script>" not in page.read_text()
    job.record(path, policy="none of ours")
    done = command(path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "makes no sense" in done.stderr


def test_a_header_that_is_read_twice_is_no_epoch() -> None:
    job = Job(always(TIER, 0.01))
    events = sorted(e for event in job.events() for e in (event, event))
    assert survey(events).begins == pytest.approx(job.begins, abs=0.02)
