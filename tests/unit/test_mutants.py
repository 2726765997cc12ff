"""The bugs that ``tests.mutants`` puts in still fit the code and the tests."""

import re

import pytest

from tests.mutants.table import MUTANTS, Mutant
from tests.support.surroundings import REPOSITORY


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_each_can_be_put_in_and_has_its_tests(mutant: Mutant) -> None:
    text = (REPOSITORY / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    changed = text.replace(mutant.old, mutant.new)
    assert changed != text
    if mutant.file.endswith(".py"):
        compile(changed, mutant.file, "exec")
    for test in mutant.tests:
        file, _, function = test.partition("[")[0].partition("::")
        assert re.search(rf"def {function or 'test_.*'}\(", (REPOSITORY / file).read_text())


def test_each_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) == 52
