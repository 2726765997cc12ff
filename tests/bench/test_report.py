"""What is saved, the report and its pictures."""

from __future__ import annotations

import re
import xml.etree.ElementTree as xml
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import matplotlib.image as mpimg
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from bench import comparison, markdown, numbers, plotlines, plots, plotstyle
from bench.harness import REPOSITORY
from bench.report import Kind, Missing, Point, Report, Result, Series, load, merged, point, save
from bench.run import PUBLISHED
from tests.bench import made_up

TITLES = [
    (result.name, title)
    for result in made_up.report().results
    for title in plots.plots(result.series)
]


# Results.


def test_a_saved_report_is_the_same_when_loaded(tmp_path: Path) -> None:
    report = made_up.report()
    save(report, tmp_path / "new" / "a.json")
    assert load(tmp_path / "new" / "a.json") == report
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 1}',
        '{"schema": 99, "results": []}',
        '{"schema": 1, "results": 3}',
    ],
)
def test_any_other_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_ratio_is_of_neighbouring_runs() -> None:
    result = Result("a", "")
    # Each pair 2:1, while the machine gets slower: the medians' ratio would be another one.
    result.compare("speed", "s", [2, 20, 6], [1, 10, 3.0], at_most=2, against="x", headline="h")
    (row,) = result.rows
    assert (row.ratio, row.ratio_spread) == (2.0, (2.0, 2.0, 2.0, 3))
    assert (row.value, row.other, row.target, row.holds) == (6, 3, "ratio <= 2", True)
    assert row.value_spread == (6, 2, 20, 3)


@pytest.mark.parametrize(
    ("bounds", "target", "holds"),
    [
        ({"at_most": 3}, "<= 3", True),
        ({"at_most": 2.9}, "<= 2.9", False),
        ({"at_least": 3}, ">= 3", True),
        ({"at_least": 3.1}, ">= 3.1", False),
        ({}, "", None),
    ],
)
def test_goals(bounds: dict[str, float], target: str, holds: bool | None) -> None:
    result = Result("a", "")
    result.figure("x", 3.0, "s", **bounds)  # type: ignore[arg-type]
    result.compare("y", "s", [6.0], [2.0], **bounds)  # type: ignore[arg-type]
    assert [row.holds for row in result.rows] == [holds, holds]
    assert [row.target for row in result.rows] == [target, target and f"ratio {target}"]


def test_several_runs_make_one_report() -> None:
    first, second = made_up.report(), made_up.report()
    first.results, second.results = first.results[:2], second.results[1:3]
    second.failed[0] = Missing(first.results[0].name, "it broke later")
    second.command, second.commit = "python -m bench.run growth", "4567def"
    second.results[0].title = "later"
    report = merged([first, second])
    assert [result.name for result in report.results] == ["monarch", "growth", "dlio"]
    assert report.results[1].title == "later"
    assert [one.what for one in report.failed] == ["programs"]
    assert (report.stem, report.commit, report.size) == (first.stem, "0123abc, 4567def", "quick")
    assert ".venv/bin/python -m bench.run growth\n" in markdown.document(report, [])
    assert merged([first]) == first


# The report.


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[plots.Picture]:
    return plots.save_all(made_up.report(), tmp_path_factory.mktemp("pictures"))


def test_the_report_holds_every_row_and_picture_and_what_is_missing(
    pictures: list[plots.Picture],
) -> None:
    report = made_up.report()
    text = markdown.document(report, pictures)
    for result in report.results:
        arms = any(row.arm for row in result.rows)
        for row in result.rows:
            assert (f"| {row.what} | {row.arm} |" if arms else f"| {row.what} |") in text
            assert not row.headline or f"| {row.headline} |" in text
        for missing in result.missing:
            assert f"- {missing.what}: {missing.why}" in text
        for note in result.notes:
            assert f"- {note}" in text
    for failed in report.failed:
        assert f"- **{failed.what}**: {failed.why}" in text
    for name in re.findall(r"\]\((2000[^)]*\.svg)\)", text):
        assert (pictures[0].svg.parent / name).exists()
    assert text.count(".svg)") == len(pictures) == len(TITLES)
    assert text.index("## Headlines") < text.index("## MONARCH")
    assert report.commit in text


def test_every_line_of_a_table_has_its_cells() -> None:
    report = made_up.report()
    report.results[0].rows[0].what = "a | b\nc < d"
    text = markdown.document(report, [])
    assert "| a \\| b c &lt; d | monarchfs cold |" in text
    expected = 0
    for line in text.splitlines():
        cells = line.count("|") - line.count("\\|")
        expected = 0 if not line.startswith("|") else expected or cells
        assert cells == expected or not expected, line


def test_a_long_table_is_cut_where_rows_begin_with_the_same() -> None:
    result = Result("long", "")
    for case in ("LeNet", "AlexNet"):
        for arm in ("a", "b"):
            for what in ("epoch 1", "epoch 2", "bytes", "operations"):
                result.figure(f"{case}: {what}", 1.0, "s", arm=arm)
    found = markdown.groups(result.rows)
    assert {heading: len(rows) for heading, rows in found.items()} == {"LeNet": 8, "AlexNet": 8}
    assert [(row.what, row.arm) for row in found["LeNet"]][:3] == [
        *(("epoch 1", "a"), ("epoch 1", "b"), ("epoch 2", "a")),
    ]
    assert result.rows[0].what == "LeNet: epoch 1"
    assert markdown.groups(result.rows[:8]) == {"": result.rows[:8]}
    text = "\n".join(markdown.section(result, [], "quick"))
    assert text.count("| epoch 1 |") == 4
    assert "<details>" not in text  # no goals
    result.rows[0].target, result.rows[0].holds = "<= 2", True
    text = "\n".join(markdown.section(result, [], "quick"))
    assert text.count("| ≤ 2 | reached |") == 2
    assert text.count("<details>") == text.count("</details>") == 1
    result.figure("alone", 1.0, "s")
    assert list(markdown.groups(result.rows)) == [""]


def test_a_missed_goal_says_why() -> None:
    report = made_up.report()
    missed = [row for result in report.results for row in result.rows if row.holds is False]
    assert missed
    text = markdown.document(report, [])
    assert text.count("**missed**") == sum(2 if row.headline else 1 for row in missed)
    for row in missed:
        assert f"- Missed: {row.headline} ({row.arm}): {markdown.cell(row.why)}" in text


def test_a_report_of_nothing_is_one_too() -> None:
    text = markdown.document(Report("python -m bench.run", "quick", commit=""), [])
    assert "Measured: nothing." in text
    assert "git checkout" not in text


def test_the_document_keeps_what_is_not_between_the_marks() -> None:
    text = f"before\n{markdown.BEGIN}\nold\n{markdown.END}\nafter\n"
    once = markdown.put_between_marks(text, "new")
    assert once == f"before\n{markdown.BEGIN}\nnew\n{markdown.END}\nafter\n"
    assert markdown.put_between_marks(once, "new") == once
    with pytest.raises(ValueError, match="figures: begin"):
        markdown.put_between_marks("no marks", "new")
    published = (REPOSITORY / PUBLISHED).read_text(encoding="utf-8")
    assert "\nnew\n" in markdown.put_between_marks(published, "new")


def test_the_published_figures_are_the_headlines() -> None:
    report = made_up.report()
    text = markdown.figures(report, "docs/images/a.svg")
    rows = [row for result in report.results for row in result.rows]
    for row in rows:
        assert f"| {row.headline or row.what} |" in text or not row.headline
    assert len(re.findall("^[|] [A-Z]", text, re.MULTILINE)) == sum(bool(r.headline) for r in rows)
    assert "](docs/images/a.svg)" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith(("|", "-"))) <= 100
    with pytest.raises(ValueError, match="no headlines"):
        markdown.figures(Report("python -m bench.run", "quick"), None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (*(0, "0"),),
        (*(0.01234, "0.012"),),
        (*(1.005, "1.00"),),
        (*(12.34, "12.3"),),
        (*(1234567, "1,234,567"),),
        (*(-5.5, "-5.50"),),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert numbers.number(value) == text


# Comparing.


def test_a_comparison_is_of_ratios_where_there_are_any() -> None:
    before, after = made_up.report(), made_up.report()
    row = after.results[0].rows[0]
    assert row.ratio is not None
    row.ratio *= 2
    row.value *= 50  # a slower machine: no matter
    # The same by another way is another figure.
    before.results[0].rows.append(replace(row, arm="rclone", ratio=77))
    after.results[0].rows.append(replace(row, what="new"))
    after.results[1].rows[0].value *= 3
    factors = {one.what: one.factor for one in comparison.changes(before, after)}
    assert factors[f"{row.what}, {row.arm}"] == pytest.approx(2)
    assert factors[after.results[1].rows[0].what] == pytest.approx(3)
    assert "new" not in factors
    text = "\n".join(comparison.show(before, after))
    assert "Only after: 1 of" in text
    assert "Only before: 1 of" in text


# Pictures.


def drawn(name: str, title: str) -> Figure:
    (result,) = (result for result in made_up.report().results if result.name == name)
    return plots.draw(title, plots.plots(result.series)[title])


def box_of(text: Text) -> Any:
    """Without the empty line that a text may begin with."""
    box = Text.get_window_extent(text)
    if not text.get_text().startswith("\n"):
        return box
    return Bbox.from_extents(box.x0, box.y0, box.x1, (box.y0 + box.y1) / 2)


def texts(figure: Figure) -> list[tuple[str, Any]]:
    """What can be read, with the box of each, in pixels."""
    unseen: set[Text] = set()
    for axes in figure.axes:
        if not axes.get_visible():
            unseen.update(text for text in axes.findobj(Text) if isinstance(text, Text))
        for axis, index in ((axes.xaxis, 0), (axes.yaxis, 1)):
            low, high = sorted(axis.get_view_interval())
            # Matplotlib has labels for ticks outside of the limits, too, and does not draw them.
            unseen.update(
                label
                for label in axis.get_ticklabels()
                if not low <= label.get_position()[index] <= high
            )
    return [
        (text.get_text().strip(), box_of(text))
        for text in figure.findobj(Text)
        if isinstance(text, Text) and text not in unseen
        if text.get_visible() and text.get_text().strip()
    ]


def overlapping(figure: Figure) -> list[tuple[str, str]]:
    found = []
    for (one, here), (other, there) in combinations(texts(figure), 2):
        if here.shrunk(0.98, 0.8).overlaps(there.shrunk(0.98, 0.8)):
            found.append((one, other))
    return found


@pytest.mark.parametrize(("name", "title"), TITLES)
def test_no_words_lie_on_others_or_outside(name: str, title: str) -> None:
    figure = drawn(name, title)
    assert overlapping(figure) == []
    for words, box in texts(figure):
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1
        assert inside, (words, box)
        assert box.y1 <= figure.bbox.y1 + 1, (words, box)


@pytest.mark.parametrize(("name", "title"), TITLES)
def test_a_picture_names_its_subject_its_axes_and_every_series(name: str, title: str) -> None:
    (result,) = (result for result in made_up.report().results if result.name == name)
    series = plots.plots(result.series)[title]
    said = "\n".join(words for words, _ in texts(plots.draw(title, series)))
    assert title in said
    for one in series:
        assert one.name in said
        assert one.y in said
        assert one.kind is Kind.BARS or one.x in said
        assert one.panel in said


def test_pictures_are_files_with_something_in_them(pictures: list[plots.Picture]) -> None:
    for picture in pictures:
        assert xml.parse(picture.svg).getroot().tag.endswith("svg")
        pixels = mpimg.imread(picture.png)
        assert pixels.shape[1] == plotstyle.WIDTH_INCHES * plotstyle.DOTS_PER_INCH
        assert pixels.std() > 0.05


def test_the_same_results_make_the_same_picture(tmp_path: Path) -> None:
    for name in ("a", "b"):
        plots.save_svg(drawn(*TITLES[0]), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_arm_has_one_colour_in_all_pictures_and_no_two_the_same() -> None:
    same = 4  # cp -r, direct, and the mount where it is neither cold nor warm
    assert len(set(plotstyle.COLOURS.values())) == len(plotstyle.COLOURS) - same
    names = ["monarchfs cold", "something else", "direct"]
    found = plotstyle.colours(names)
    assert found[names[0]] == plotstyle.colours(names[:1])[names[0]]
    assert len(set(found.values())) == 3


def test_neighbours_are_moved_apart_around_their_middle() -> None:
    assert plotlines.spread_out([1, 50, 100], 10) == [1, 50, 100]
    assert plotlines.spread_out([50, 50, 50], 10) == [40, 50, 60]
    found = plotlines.spread_out([0, 1, 2, 3, 90, 91], 10)
    assert all(later - earlier >= 9.999 for earlier, later in pairwise(found))


def test_kinds_are_not_mixed() -> None:
    one = Series("a", "x", "y", [Point(1, 1.0)])
    with pytest.raises(ValueError, match="one kind"):
        plots.draw("title", [one, replace(one, kind=Kind.TIME)])


def test_series_without_points_are_no_picture() -> None:
    assert plots.plots([Series("a", "x", "y", [])]) == {}
    assert list(plots.plots([Series("a", "x", "y", [point(1, [1.0])])])) == ["y"]
