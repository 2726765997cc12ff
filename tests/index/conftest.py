from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monarchfs.index import Index, check_in_child, problems
from tests.index.tools import DIRECTORY, NOW, ROOT_SOURCE_INO, open_index, source_stat


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    opened = open_index(tmp_path)
    opened.tree.record_root(source_stat(ROOT_SOURCE_INO, mode=DIRECTORY), NOW)
    yield opened
    opened.close()
    assert check_in_child(str(tmp_path))
    assert problems(str(tmp_path)) == []
