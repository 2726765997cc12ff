from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs.cache.index import Index, problems
from tests.index.tools import rooted


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    opened = rooted(tmp_path)
    yield opened
    opened.close()
    assert problems(str(tmp_path)) == []
