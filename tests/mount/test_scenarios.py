"""Recorded scenarios: what a mount asks of its source, counts and keeps, step by step, as it did
when they were recorded. ``pytest --record-scenarios`` writes them anew; `tests.support.scenario`
says how they read. A number that may differ says why."""

from pathlib import Path

import pytest

from tests.support.mounting import Bench, requires_mounts
from tests.support.scenario import Script, differences, perform

pytestmark = requires_mounts

SCENARIOS = Path(__file__).parents[1] / "scenarios"


@pytest.mark.parametrize("name", sorted(path.stem for path in SCENARIOS.glob("*.txt")))
def test_it_is_as_recorded(work: Bench, name: str, request: pytest.FixtureRequest) -> None:
    path = SCENARIOS / f"{name}.txt"
    script = Script(path.read_text())
    observed = perform(work, script)
    if request.config.getoption("--record-scenarios"):
        script.record(observed)
        path.write_text(script.text())
        return
    differing = differences(script, observed, complete=True)
    assert not differing, "\n".join(differing)
    unexplained = [e.text() for lines in script.expected.values() for e in lines
                   if not e.exact and not e.why]  # fmt: skip
    assert not unexplained, "nothing says why these may differ"
