"""What a mount says of itself, on its way to the node's exporter: kept whole, believed little; and
the names and counts behind it."""

import itertools
import json
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from monarchfs.exporter import node, wire
from monarchfs.exporter.http import exposition
from monarchfs.exporter.node import Seen, label_mounts, learn_names, page_values
from monarchfs.metrics import DURATION_BOUNDS_NS, ErrorCounts, Histogram, names
from monarchfs.metrics.counts import ERRORS, OTHER
from monarchfs.metrics.names import FAMILIES, NODE_FAMILIES, Durations, MetricType, Values
from monarchfs.system.escaping import printable
from tests.support.golden import Golden
from tests.support.programs import execute
from tests.support.prometheus import PROMTOOL
from tests.support.scraping import parse
from tests.unit.test_messages import VALUES as SOME_VALUES

TIER = names.TIER_USED.name
OPENS = names.OPENS.name
DURATION = names.REQUEST_DURATION.name
VALUES: Values = {
    names.OPENS: [(("local",), 5), (("source",), 7)],
    names.TIER_USED: [(("/ssd/\udcff",), 1 << 40), (("/a b\n",), 0)],
    names.REQUEST_DURATION: [(("read", "local"), Durations((10, 20), (1, 2, 3), 99))],
    names.SOURCE_OLDEST_CALL: [(("demand",), 1.5)],
}


def sent(values: Values) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(json.dumps(wire.encode(values)))
    return result


def test_what_is_sent_arrives() -> None:
    arrived = wire.decode(sent(VALUES))
    assert arrived == {**VALUES, names.TIER_USED: [(("/ssd/\\udcff",), 1 << 40), (("/a b\\n",), 0)]}
    message = sent(VALUES)
    message["metrics"]["monarchfs_later_total"] = [[["x"], 1]]
    message["metrics"][OPENS] = [[["local", "more"], 1]]
    message["more"] = 5
    assert wire.decode(message) == {**wire.decode(sent(VALUES)), names.OPENS: []}


@pytest.mark.parametrize(
    ("name", "rows", "bounds"),
    [
        (OPENS, None, {}),
        (OPENS, [[["local"]]], {}),
        (OPENS, [[["local"], True]], {}),
        (OPENS, [[["local"], -1]], {}),
        (OPENS, [[["local"], 1 << 63]], {}),
        (OPENS, [[[5], 1]], {}),
        (OPENS, [[['a"b'], 1]], {}),
        (TIER, [[["/\udcff"], 1], [["/\\udcff"], 2]], {}),
        (TIER, [[["/" * 4097], 1]], {}),
        (TIER, [[[f"/{n}"], 1] for n in range(wire.MOST_LINES + 1)], {}),
        (OPENS, [[["local"], [1, 2]]], {}),
        (DURATION, [[["read", "local"], [1, 1]]], {DURATION: [1]}),
        (DURATION, [[["read", "local"], [1, 1, -1]]], {DURATION: [1]}),
        (DURATION, [[["read", "local"], [1, 1, 1, 1]]], {DURATION: [1, 1]}),
        (DURATION, [[["read", "local"], [1, 1, 1]]], {DURATION: [0]}),
        (DURATION, [[["read", "local"], [1, 1, 1]]], {DURATION: ["1"]}),
        (DURATION, [[["read", "local"], [1, 1, 1]]], {DURATION: 5}),
        (DURATION, [[["read", "local"], [1] * 101]], {DURATION: list(range(1, 100))}),
        (DURATION, [[[f"{n}", "x"], [1] * 66] for n in range(100)], {DURATION: list(range(1, 65))}),
    ],
)
def test_nonsense_is_refused(name: str, rows: Any, bounds: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        wire.decode({"metrics": {name: rows}, "bounds_ns": bounds})


JSON = SOME_VALUES | st.text()
LABEL = st.sampled_from(["local", "/ssd", "read", "\udcff", 'x"y\n\\', "\0", "é\u2028"]) | st.text()
ROW = st.tuples(st.lists(LABEL, max_size=3), st.integers() | st.floats() | st.lists(st.integers()))
METRICS = st.dictionaries(
    st.sampled_from([family.name for family in FAMILIES]), st.lists(ROW, max_size=4) | JSON
)


@given(
    st.fixed_dictionaries(
        {
            "metrics": METRICS,
            "bounds_ns": st.dictionaries(st.just(DURATION), st.lists(st.integers(1, 9))) | JSON,
        }
    )
    | st.dictionaries(st.sampled_from(["metrics", "bounds_ns"]), JSON),
    st.text(max_size=20),
)
def test_a_page_can_be_read_whatever_a_mount_says(message: dict[str, Any], path: str) -> None:
    """Two mounts, of which one is somebody's own program."""
    values = None
    with suppress(ValueError):
        values = wire.decode(json.loads(json.dumps(message)))
    hostile = Seen("a", 1, path, path, values=values)
    well = Seen("b", 0, "/s", "/m", values=VALUES_OF_ONE)
    named = [(("user", printable(path), printable(path)), hostile), (("root", "/s", "/m"), well)]
    now = parse(exposition(page_values(named, 0)).decode())
    assert now.value("monarchfs_mount_up", user="root", source="/s", mount="/m") == 1
    assert now.value(OPENS, user="root", source="/s", mount="/m", served="local") == 5
    assert all(name.startswith("monarchfs_") for name in now.kinds)


VALUES_OF_ONE = {names.OPENS: VALUES[names.OPENS]}


def test_the_page(golden: Golden) -> None:
    """Every metric, of a mount with odd names that two jobs use; one that says nothing; and
    mounts that were left off. Each value is another one."""
    number = itertools.count(3)
    values: Values = {
        family: [
            (
                tuple(f"{label} \\n" if label == "tier" else label for label in family.labels),
                Durations((1_000, 2_000_000_000), (next(number), 1, 2), 5_000_000_000)
                if family.kind is MetricType.HISTOGRAM
                else next(number),
            )
        ]
        for family in FAMILIES
    }
    odd = '/s "strange" \\ n\u00e4me'
    told = {"started_ns": 1500000000, "jobs": ("1", "2_4"), "values": wire.decode(sent(values))}
    well = Seen("k", 0, odd, "/m", **told)  # type: ignore[arg-type]
    mounts = [(("u", odd, "/m"), well), (("v", "/s", "/gone"), Seen("l", 7, "/s", "/gone"))]
    text = exposition(page_values(mounts, 3)).decode()
    golden("exporter-page.txt", text)
    now = parse(text)
    assert set(now.kinds) == {f.name for f in (*FAMILIES, *names.NODE_FAMILIES)}
    for family in FAMILIES:
        assert {"user", "source", "mount"} <= now.labels[family.name]
    if PROMTOOL is not None:
        check = [PROMTOOL, "check", "metrics"]
        done = execute(check, input=text)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_names_of_mounts_are_given_once_and_stay() -> None:
    same = ("u", "/s", "/m")
    second = ("u", "/s", "/m (2)")
    given = label_mounts({}, [("a", same), ("b", same)])
    assert given == {"a": same, "b": second}
    given = label_mounts(given, [("b", same)])
    assert given == {"b": second}, "not the series of another mount"
    given = label_mounts(given, [("b", same), ("c", same)])
    assert given == {"b": second, "c": same}
    given = label_mounts(given, [("b", same), ("c", same), ("d", second), ("e", same)])
    assert len(set(given.values())) == 4
    assert label_mounts(given, []) == {}


async def test_a_name_service_that_hangs_costs_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "NAME_SECONDS", 0.05)
    asked: list[int] = []
    answered = threading.Event()

    def hanging(uid: int) -> str:
        asked.append(uid)
        answered.wait(30)
        return "late"

    monkeypatch.setattr(node, "name_of", hanging)
    known: dict[int, str] = {}
    threads = trio.CapacityLimiter(1)
    with trio.fail_after(10):
        await learn_names(known, [7, 8], threads)
    assert known == {7: "7", 8: "8"}
    assert not trio.to_thread.current_default_thread_limiter().borrowed_tokens, "a page needs those"
    answered.set()
    await learn_names(known, [7, 8], threads)
    assert known == {7: "7", 8: "8"}, "a name that changes is another series"
    assert len(asked) == 1


# The names of the metrics, all of which the documentation has, and what is counted under them

DOCUMENT = Path(__file__).parents[2] / "docs" / "METRICS.md"
IN_TABLE = re.compile(r"^\| `(\w+)` \| (\w+) \|(.*?)\|(.*)\|$", re.MULTILINE)


def test_the_documentation_lists_what_is_exported_and_each_error() -> None:
    rows = {
        name: (kind, re.findall(r"`(\w+)`", labels))
        for name, kind, labels, _meaning in IN_TABLE.findall(DOCUMENT.read_text())
    }
    ours = {name: row for name, row in rows.items() if name.startswith("monarchfs_")}
    assert ours == {f.name: (f.kind.value, list(f.labels)) for f in (*FAMILIES, *NODE_FAMILIES)}
    assert [name for name in ERRORS if f"`{name}`" not in DOCUMENT.read_text()] == []


def test_a_duration_is_counted_once_and_unknown_errors_make_no_series() -> None:
    histogram = Histogram()
    durations = [0, 1, 10_000, 10_001, 30 * 10**9, 30 * 10**9 + 1, 10**15]
    for duration in durations:
        histogram.observe(duration)
    assert histogram.total_ns == sum(durations)
    assert sum(histogram.counts) == len(durations)
    assert histogram.counts[0] == 3, "a bound belongs to its bucket"
    assert histogram.counts[1] == 1
    assert histogram.counts[-2:] == [1, 2]
    assert list(DURATION_BOUNDS_NS) == sorted(set(DURATION_BOUNDS_NS))
    counts = ErrorCounts()
    for number in (5, 5, 28, 133, 100_000, 0, None):
        counts.count(number)
    assert tuple(counts.by_name) == ERRORS
    assert (counts.by_name["EIO"], counts.by_name["ENOSPC"], counts.by_name[OTHER]) == (2, 1, 4)
