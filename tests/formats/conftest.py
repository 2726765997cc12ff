from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        what = (
            "migrate, or say in docs/FORMATS.md what is thrown away, and make the file anew with"
            " python -m tests.formats.make"
        )
        report.sections.append(("a format has changed", what))
    return report
