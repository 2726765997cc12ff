from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs.cache.index import Index, problems
from tests.index.tools import DIRECTORY, NOW, ROOT_SOURCE_INO, open_index, source_stat


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    opened = open_index(tmp_path)
    opened.nodes.record_root(source_stat(ROOT_SOURCE_INO, mode=DIRECTORY), NOW)
    yield opened
    opened.close()
    assert problems(str(tmp_path)) == []
