"""Read and write rates of the source and the tiers, measured in children within a bounded time."""

from __future__ import annotations

import errno
import os
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from monarchfs.config import Config
from monarchfs.doctor.checks import Check, Severity, Step, Value, ok, warning
from monarchfs.doctor.storage import locate
from monarchfs.insight.estimates import RELAY_BYTES_PER_SECOND, SourceRates, TierRates
from monarchfs.source.posix import read_layout
from monarchfs.supervisor.identity import become
from monarchfs.supervisor.preflight import nearest
from monarchfs.system.bounded import bounded_value
from monarchfs.system.limits import explained
from monarchfs.types import OperationError

SOURCE_BYTES = 512 << 20
"""What is read of the source at most; half of it, of a tier, is written and read."""
LOOK_SECONDS = 1.0
PHASE_SECONDS = 1.5
SMALL_BYTES = 1 << 20
MOST_FILES = 4000
WORTH_IT = 1.5
_SECONDS = 12.0
"""Measuring takes 4 seconds where a file system answers."""
_LEAST_SECONDS = 0.05
_BLOCK = 1 << 20


def measure(config: Config, checks: Iterable[Check], timeout: float) -> Iterator[Step]:
    """Rates of the source and the tiers in which ``checks`` found no problem, within ``timeout``
    seconds and a moment."""
    deadline = time.monotonic() + timeout
    problems = [check for check in checks if check.state is Severity.PROBLEM]
    failed = {str(check.numbers.get("path", check.name)) for check in problems}
    of_source = None
    if config.source and not failed & {config.source, "source"}:
        yield "looking at source_speed"
        try:
            of_source = source_rates(config, deadline - time.monotonic())
            yield judge_source_speed(of_source)
        except OperationError as error:
            yield warning("source_speed", str(error), "see whether it is overloaded")
    for tier in config.tiers:
        if tier.path in failed:
            continue
        yield "looking at tier_speed"
        try:
            rates = tier_rates(tier.path, deadline - time.monotonic())
        except OperationError as error:
            detail = f"{tier.path}: {error}"
            yield warning("tier_speed", detail, "see whether it fails", path=tier.path)
            continue
        yield judge_tier_speed(tier.path, rates, of_source)


def source_rates(config: Config, timeout: float = _SECONDS) -> SourceRates:
    """Measured in a child, as the mount's user. Raises OperationError."""

    def call() -> dict[str, Any]:
        become(config.user)
        return asdict(measure_source(config.source, config.copy_workers))

    return SourceRates(**_measured(call, timeout))


def tier_rates(path: str, timeout: float = _SECONDS) -> TierRates:
    """Measured in a child, in the tier's directory or the nearest existing one above it. Raises
    OperationError."""

    def call() -> dict[str, Any]:
        try:
            existing = nearest(path)
            free = locate(path, existing).space.free_bytes
            return asdict(measure_tier(existing, free))
        except OSError as error:
            raise OperationError(f"cannot be measured: {explained(error)}") from None

    return TierRates(**_measured(call, timeout))


def _measured(call: Callable[[], dict[str, Any]], timeout: float) -> dict[str, Any]:
    seconds = max(_LEAST_SECONDS, min(_SECONDS, timeout))
    overdue = f"not measured: no answer within {seconds:.0f} s"
    return dict(bounded_value(call, timeout=seconds, overdue=overdue))


def judge_source_speed(rates: SourceRates) -> Check:
    numbers: dict[str, Value] = asdict(rates)
    if rates.read_bytes_per_second is None or rates.open_seconds is None:
        detail = "no file was found within a second that could be read"
        return warning("source_speed", detail, "see whether it holds files", **numbers)
    detail = (
        f"{rates.read_bytes_per_second / 1e6:.0f} MB/s with {rates.threads} threads,"
        f" {rates.open_seconds * 1e3:.2f} ms to open a file and read its beginning"
    )
    if rates.read_bytes_per_second >= RELAY_BYTES_PER_SECOND:
        detail += "; a mount relays hardly more"
        remedy = "read it directly, if it is always that fast (it may have been in memory)"
        return warning("source_speed", detail, remedy, **numbers)
    return ok("source_speed", detail, **numbers)


def judge_tier_speed(path: str, rates: TierRates, of_source: SourceRates | None) -> Check:
    source_rate = of_source.read_bytes_per_second if of_source else None
    ratio = rates.read_bytes_per_second / source_rate if source_rate else None
    numbers: dict[str, Value] = {"path": path, **asdict(rates), "times_source": ratio}
    detail = (
        f"{path}: writes {rates.write_bytes_per_second / 1e6:.0f} MB/s,"
        f" reads {rates.read_bytes_per_second / 1e6:.0f} MB/s"
    )
    if ratio is not None:
        detail += f", {ratio:.1f} x the source"
        if ratio < WORTH_IT:
            remedy = "use a faster disk or memory; what is gained is the load off the source"
            return warning("tier_speed", detail, remedy, **numbers)
    return ok("tier_speed", detail, **numbers)


# In a child: all of it blocks


def measure_source(root: str, threads: int) -> SourceRates:
    """Reads some files of ``root``, past the page cache if possible; leaves out those that cannot
    be read, or that only an archive has (Lustre HSM). Takes about LOOK_SECONDS + 2 PHASE_SECONDS
    if the source answers."""
    files = some_files(root)
    opened = _opens(
        [path for path, size in files if 0 < size <= SMALL_BYTES] or [path for path, _size in files]
    )
    large = sorted(files, key=lambda file: file[1], reverse=True)
    read_bytes, seconds = _read_all([path for path, _size in large], threads)
    rate = read_bytes / seconds if read_bytes else None
    median = statistics.median(opened) if opened else None
    return SourceRates(rate, median, threads, read_bytes, len(files))


def measure_tier(directory: str, free_bytes: int) -> TierRates:
    """Writes a file without a name, which is gone in any case, and reads it again. Raises
    OSError."""
    most = min(SOURCE_BYTES // 2, free_bytes // 4)
    block = os.urandom(_BLOCK)
    fd = nameless_file(directory)
    try:
        begun, written = time.monotonic(), 0
        while written + _BLOCK <= max(most, _BLOCK) and time.monotonic() - begun < PHASE_SECONDS:
            written += os.write(fd, block)
        os.fdatasync(fd)
        write_seconds = time.monotonic() - begun
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        begun, read = time.monotonic(), 0
        while time.monotonic() - begun < PHASE_SECONDS and (data := os.pread(fd, _BLOCK, read)):
            read += len(data)
        read_seconds = time.monotonic() - begun
    finally:
        os.close(fd)
    return TierRates(written / write_seconds, read / max(read_seconds, 1e-9), written)


def nameless_file(directory: str) -> int:
    """A descriptor of a new file in ``directory`` that no name leads to. Raises OSError."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EOPNOTSUPP, errno.EINVAL):
            raise
    # A file system, or a kernel, without O_TMPFILE (open(2)).
    fd, path = tempfile.mkstemp(prefix=".monarchfs-doctor-", dir=directory)
    os.unlink(path)
    return fd


def some_files(root: str) -> list[tuple[str, int]]:
    """Some files below ``root`` with their sizes, found breadth first within LOOK_SECONDS."""
    end = time.monotonic() + LOOK_SECONDS
    found: list[tuple[str, int]] = []
    directories = deque([root])
    while directories and len(found) < MOST_FILES and time.monotonic() < end:
        try:
            with os.scandir(directories.popleft()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        found.append((entry.path, entry.stat(follow_symlinks=False).st_size))
                    if len(found) >= MOST_FILES or time.monotonic() > end:
                        break
        except OSError:
            continue  # not readable for this user, or gone: others are
    return found


def _opens(paths: list[str]) -> list[float]:
    """Seconds of each open with the first read and the close, one after the other."""
    times: list[float] = []
    end = time.monotonic() + PHASE_SECONDS
    # Spread over all: the first ones may be in memory because somebody just looked at them.
    for path in paths[:: max(1, len(paths) // 200)]:
        if time.monotonic() > end:
            break
        if (opened := open_cold(path)) is None:
            continue
        fd, seconds = opened
        begun = time.monotonic()
        try:
            os.pread(fd, 4096, 0)
        except OSError:
            continue
        finally:
            os.close(fd)
        times.append(seconds + time.monotonic() - begun)
    return times


def _read_all(paths: list[str], threads: int) -> tuple[int, float]:
    """Bytes read by ``threads`` that share the files, and the seconds it took."""
    left = deque(paths)
    totals = [0] * threads
    begun = time.monotonic()
    end = begun + PHASE_SECONDS

    def goes_on(number: int) -> bool:
        return time.monotonic() < end and totals[number] < SOURCE_BYTES // threads

    def read(number: int) -> None:
        while goes_on(number):
            try:
                opened = open_cold(left.popleft())
            except IndexError:
                return
            if opened is None:
                continue
            fd, offset = opened[0], 0
            with suppress(OSError):
                while goes_on(number) and (size := len(os.pread(fd, _BLOCK, offset))):
                    offset += size
                    totals[number] += size
            os.close(fd)

    running = [threading.Thread(target=read, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return sum(totals), max(time.monotonic() - begun, 1e-9)


def open_cold(path: str) -> tuple[int, float] | None:
    """A file that was dropped from memory, and the seconds of opening it. None if it cannot be
    read, or if that would bring it back from an archive, or might."""
    begun = time.monotonic()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    seconds = time.monotonic() - begun
    try:
        read_layout(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        os.close(fd)
        return None
    return fd, seconds
