from collections.abc import Sequence

from monarchfs.types import Data

def write_each(
    staging: int, mode: int, files: Sequence[tuple[int, str, str, Data]], /
) -> list[int | tuple[int, bool]]: ...
