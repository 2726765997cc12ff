from collections.abc import Sequence

def stat_each(
    directory: int, device: int, names: Sequence[bytes], until: float, opens_bytes: int = 0, /
) -> list[tuple[int, int, int, int, int, int, int, int, int, int, int, int, int] | int | None]: ...
def take_stale(seconds: float, /) -> int: ...

take: object
