from collections.abc import Sequence

def stat_each(
    directory: int, device: int, names: Sequence[bytes], until: float, /
) -> list[tuple[int, int, int, int, int, int, int, int, int, int, int, int, int] | int | None]: ...
