"""A training job as a process: started, asked for one epoch after the other, never left behind."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import REPOSITORY, Unusable, end

FRAMEWORKS = REPOSITORY / ".venv-frameworks" / "bin" / "python"
# Loading TensorFlow on a machine that is busy otherwise takes most of a minute.
START_SECONDS = 180.0
EPOCH_SECONDS = 900.0


@dataclass(frozen=True)
class Epoch:
    """What one epoch of a job came to; as `bench.jobs.training` prints it."""

    seconds: float
    waited_seconds: float
    samples: int
    bytes: int
    checksum: int


@dataclass(frozen=True)
class Program:
    """A job's program: a module of `bench.jobs`, and what must be importable for it."""

    name: str
    module: str
    needs: str = ""

    def python(self) -> str:
        """The interpreter that runs it; raises Unusable, with the remedy, where it cannot."""
        if not self.needs:
            return sys.executable
        if not FRAMEWORKS.exists():
            raise Unusable(f"{self.name} is not installed: run make frameworks")
        command = [
            str(FRAMEWORKS),
            "-c",
            f"import importlib.util as u; u.find_spec('{self.needs}').name",
        ]
        if subprocess.run(command, check=False, capture_output=True).returncode != 0:
            raise Unusable(f"{self.name} is not in {FRAMEWORKS.parent.parent}: run make frameworks")
        return str(FRAMEWORKS)


TFDATA = Program("tf.data", "bench.jobs.tfdata_job", "tensorflow")
PYTORCH = Program("PyTorch DataLoader", "bench.jobs.torch_job", "torch")
THREADS = Program("reader threads", "bench.jobs.reader_job")


class Job:
    """A context manager; when it is entered the job is loaded and waits. ``errors`` is a file for
    what the program writes to standard error."""

    def __init__(self, program: Program, arguments: Sequence[object], errors: Path) -> None:
        self._command = [program.python(), "-m", program.module, *map(str, arguments)]
        self._errors = errors

    def __enter__(self) -> Job:
        environment = {
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                cwd=REPOSITORY,
                env=environment,
                # Ctrl-C is for the program that measures, which ends this one.
                start_new_session=True,
            )
        try:
            self._answer(START_SECONDS)
        except BaseException:
            self._end()
            raise
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def epoch(self, number: int) -> Epoch:
        """Runs one; raises Unusable with the job's own words if it fails or takes for ever."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{number}\n".encode())
        except BrokenPipeError:
            raise Unusable(self._failed("ended")) from None
        answer = self._answer(EPOCH_SECONDS)
        del answer["epoch"]
        return Epoch(**answer)

    def _answer(self, seconds: float) -> dict[str, Any]:
        """The next line that it prints; frameworks print others, too."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        line = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise Unusable(self._failed(f"did not answer within {seconds:g} s"))
            got = os.read(self._process.stdout.fileno(), 1 << 16)
            if not got:
                raise Unusable(self._failed("ended"))
            line += got
            while b"\n" in line:
                first, _, line = line.partition(b"\n")
                if first.startswith(b"{"):
                    answer: dict[str, Any] = json.loads(first)
                    return answer

    def _failed(self, how: str) -> str:
        words = self._errors.read_text(errors="replace").strip().splitlines()
        return f"{self._command[2]} {how}: {words[-1] if words else 'no word why'}"

    def _end(self) -> None:
        end(self._process, 20.0)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # In the middle of an epoch it would not see the end of its input for long.
            self._process.kill()
        self._end()
