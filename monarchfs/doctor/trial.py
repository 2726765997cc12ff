"""Whether ``monarchfs run`` works here: it is tried with a command that reads some files."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from monarchfs.config import Config
from monarchfs.doctor.checks import Check, ok, problem, split_remedy
from monarchfs.doctor.speed import open_cold, some_files
from monarchfs.supervisor.launch import module_command
from monarchfs.supervisor.preflight import nearest
from monarchfs.system.bounded import bounded_value
from monarchfs.types import OperationError

PREFIX = "monarchfs-doctor."
_MOST_FILES = 3
_READ_BYTES = 1 << 20
"""Of each file."""
_SIZES = (1000, 100_000, 3 << 20)
_LOOK_SECONDS = 10.0
_TIER_SIZE = "64M"
_END_SECONDS = 10.0


def run_trial(config: Config, timeout: float) -> Check:
    """Takes ``timeout`` seconds and a moment at most, and leaves nothing behind. The files are some
    of ``config.source``, or of a directory made beside the first tier. For who runs the job: the
    mount is this process's own."""
    place = nearest(config.tiers[0].path)
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place) as work:
            return _tried(config.source, Path(work), time.monotonic() + timeout)
    except OperationError as error:
        return problem("run", *split_remedy(str(error)))
    except OSError as error:
        remedy = "name a directory on a local disk with --tier"
        return problem("run", f"{error.filename or place}: {error.strerror}", remedy)


def _tried(given: str, work: Path, deadline: float) -> Check:
    source = given or _made(work / "source")
    names, expected = bounded_value(
        lambda: _some_of(source),
        timeout=max(0.1, min(_LOOK_SECONDS, deadline - time.monotonic())),
        overdue=f"{source} did not answer in time: check its file system",
    )
    report = work / "report"
    words = ["--strict", "--json", str(report), "--state-dir", str(work / "state")]
    words += ["--tier", f"{work / 'tier'}={_TIER_SIZE}"]
    command = ["head", "-q", "-c", str(_READ_BYTES), *names, *names]
    words = [*module_command("monarchfs"), "run", source, *words, "--", *command]
    (work / "tier").mkdir()
    began = time.monotonic()
    output = _output(words, deadline - began)
    seconds = time.monotonic() - began
    if hashlib.sha256(output).hexdigest() != expected:
        return problem(
            "run", f"{source}: the mount gave other bytes than the source", "report this"
        )
    seen = json.loads(report.read_text())
    view = "a mount that was there" if seen["view"] == "existing" else "a mount of its own"
    which = f"{len(names)} files of {source}" if given else f"{len(names)} files made for it"
    detail = f"a command in {view} read {which} twice, in {seconds:.1f} s"
    return ok("run", detail, view=seen["view"], files=len(names), seconds=round(seconds, 3))


def _output(words: Sequence[str], timeout: float) -> bytes:
    """What it prints. Raises OperationError with its last line where it fails or takes longer."""
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, errors = process.communicate(timeout=max(0.1, timeout))
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise OperationError("monarchfs run did not end in time: give it more --timeout") from None
    if process.returncode != 0:
        said = errors.decode(errors="replace").strip().splitlines() or [str(process.returncode)]
        raise OperationError(f"monarchfs run failed: {said[-1].removeprefix('monarchfs: ')}")
    return output


def _made(directory: Path) -> str:
    directory.mkdir()
    chance = random.Random(1)
    for size in _SIZES:
        (directory / f"{size} bytes").write_bytes(chance.randbytes(size))
    return str(directory)


def _some_of(source: str) -> tuple[list[str], str]:
    """The paths of some files, and the digest of what a command is to read of them. Not of those
    that a read would bring back from an archive. Raises OperationError where there is none."""
    names: list[str] = []
    content = b""
    for path, size in some_files(source):
        opened = open_cold(path) if size and len(names) < _MOST_FILES else None
        if opened is not None:
            os.set_blocking(opened[0], True)
            with open(opened[0], "rb") as file:
                content += file.read(_READ_BYTES)
            names.append(path)
    if not names:
        raise OperationError(f"no file that can be read was found in {source}: name another source")
    return names, hashlib.sha256(2 * content).hexdigest()
