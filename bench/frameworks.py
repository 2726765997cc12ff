"""The environment of the frameworks (PyTorch, TensorFlow, DLIO), and programs that run in it.

It is apart from the project's own: see ``make frameworks``. `bench.job` runs jobs that are asked
for one epoch after the other; here is what runs to its end by itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bench.harness import REPOSITORY, Unusable

ENVIRONMENT = REPOSITORY / ".venv-frameworks"
PROGRAM_SECONDS = 900.0


def program(name: str) -> str:
    """The path of a program of the environment; Unusable where it was not installed."""
    path = ENVIRONMENT / "bin" / name
    if not path.exists():
        raise Unusable(f"{name} of the frameworks is missing: run make frameworks (4 GB)")
    return str(path)


def environment() -> dict[str, str]:
    """Variables for what runs in it: processors only, and quiet."""
    return {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # DLIO's tracer writes every call of the job into a file.
        "DFTRACER_ENABLE": "0",
        # A job alone on this machine needs neither another process of MPI nor its network.
        "OMPI_MCA_ess_singleton_isolated": "1",
        "OMPI_MCA_btl": "self",
    }


def run_program(
    command: list[str],
    log: Path,
    variables: Mapping[str, str] | None = None,
    seconds: float = PROGRAM_SECONDS,
) -> None:
    """Runs a program of the environment to its end; what it prints goes to ``log``, beside which it
    runs. Raises Unusable with the last line of that if it fails or takes longer. What it started is
    ended with it."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment(), **(variables or {})},
            cwd=log.parent,
            # Ctrl-C is for the program that measures, which ends this one.
            start_new_session=True,
        )
    code = None
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        end_group(process)
    if code != 0:
        words = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        how = f"took longer than {seconds:g} s" if code is None else f"failed ({code})"
        raise Unusable(f"{Path(command[0]).name} {how}: {words[-1] if words else 'no word why'}")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a session of its own, with all that it started, and waits."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
