"""Random system calls on a mount and on its source, compared one by one: make test-fuzz.

    python -m tests.fuzz [--seed N] [--seconds N] [--paths NAME,...]

Everything happens in a mount and pid namespace of its own, in which all but one new directory is
read-only. A difference is printed with the shortest history of calls that was found to lead to it.
"""

import argparse
import multiprocessing as processes
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fuzz import calls
from tests.fuzz.calls import Call, Side
from tests.fuzz.place import CHANGING, PATHS, Place, enclose, make_tree

LENGTH = 1500
ACTORS = 2
HANGS_SECONDS = 60.0
SHORTEN_SECONDS = 150.0
KILL_EVERY_SECONDS = 1.0
EVENTS = ("warm", "evict", "refresh", "pin", "unpin", "warm")
History = list[tuple[int, Call]]
"""Each by an actor, -1 for what is no call."""


def history_of(chance: random.Random, changes: bool) -> History:
    made: History = []
    while len(made) < LENGTH:
        luck = chance.random()
        if luck < 0.002:
            made.append((-1, ("kill", chance.random() * 0.05)))
        elif luck < 0.004:
            names = [name for name in calls.FILES if "\n" not in name]
            made.append((-1, (chance.choice(EVENTS), chance.choice(names))))
        elif luck < 0.02 and changes:
            how = chance.randrange(CHANGING), chance.randrange(7), chance.randrange(1000)
            made.append((-1, ("change", *how)))
        else:
            made.append((chance.randrange(ACTORS), calls.made(chance)))
    return made


def act(pipe: Connection, mirror: str, plain: str) -> None:
    sides = Side(mirror, mirrored=True), Side(plain, mirrored=False)
    while (one := pipe.recv()) is not None:
        results = [calls.carried_out(side, one) for side in sides]
        pipe.send(None if results[0] == results[1] else [f"{r!r:.600}" for r in results])


class Actors:
    def __init__(self, place: Place) -> None:
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(ACTORS):
            ours, theirs = processes.Pipe()
            arguments = theirs, str(place.mirror), str(place.plain)
            process = processes.get_context("fork").Process(target=act, args=arguments)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, actor: int, one: Call) -> list[str] | None:
        self.pipes[actor].send(one)
        if not self.pipes[actor].poll(HANGS_SECONDS):
            return [f"no answer in {HANGS_SECONDS:g} s", ""]
        answer: list[str] | None = self.pipes[actor].recv()
        return answer

    def end(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            process.kill()
            process.join()
            pipe.close()


class Difference(Exception):
    def __init__(self, at: int, actor: int, one: Call, said: list[str]) -> None:
        super().__init__(
            f"call {at}, actor {actor}: {one}\n  mount:  {said[0]}\n  source: {said[1]}"
        )
        self.at = at
        self.kind = one[0]
        self.log = ""


def run(directory: Path, path: str, history: History, seconds: float) -> int:
    """How many calls were made, in so many seconds. Raises Difference."""
    done, killed = 0, 0.0
    with Place(directory, PATHS[path]) as place:
        deadline = time.monotonic() + seconds
        actors = Actors(place)
        try:
            for at, (actor, one) in enumerate(history):
                if time.monotonic() > deadline:
                    break
                if actor >= 0:
                    done += 1
                    if (said := actors.ask(actor, one)) is not None:
                        found = Difference(at, actor, one, said)
                        found.log = place.log()
                        raise found
                    continue
                if one[0] == "kill":
                    # Faster, and it is a crash loop; in safe mode that ends the mount.
                    if place.path.safe or time.monotonic() < killed + KILL_EVERY_SECONDS:
                        continue
                    killed = time.monotonic()
                elif one[0] == "change":
                    # Who has a file open sees it change sooner or later: docs/SEMANTICS.md.
                    for number in range(ACTORS):
                        actors.ask(number, ("end_all",))
                place.do(one)
        finally:
            actors.end()
    return done


def shortened(directory: Path, path: str, history: History, found: Difference) -> History:
    """The shortest history that was found in time to lead to a difference of the same call."""
    deadline = time.monotonic() + SHORTEN_SECONDS
    history = history[: found.at + 1]
    step = len(history) // 2
    while step and time.monotonic() < deadline:
        at = 0
        while at < len(history) - 1 and time.monotonic() < deadline:
            shorter = history[:at] + history[at + step :]
            try:
                run(directory, path, shorter, deadline - time.monotonic())
            except Difference as again:
                if again.kind == found.kind:
                    history = shorter[: again.at + 1]
                    continue
            at += step
        step //= 2
    return history


def inside(directory: Path, seed: int, seconds: float, paths: list[str]) -> int:
    enclose(directory)
    os.environ.update(TMPDIR=str(directory), HOME=str(directory))
    os.umask(0o022)
    make_tree(directory / "source")
    begun, total, number = time.monotonic(), 0, 0
    while (left := begun + seconds - time.monotonic()) > 0:
        path = paths[number % len(paths)]
        chance = random.Random(f"{seed} {path} {number // len(paths)}")
        history = history_of(chance, PATHS[path].changes)
        # A short run is to see each of them.
        share = max(1.0, min(left, seconds / len(paths)))
        try:
            total += run(directory, path, history, share)
        except Difference as found:
            print(f"seed {seed}, data path {path!r}, history {number // len(paths)}: {found}")
            print("the end of the log:", found.log, sep="\n", flush=True)
            for actor, one in shortened(directory, path, history, found):
                print(f"  {'' if actor < 0 else f'actor {actor}'} {one}")
            return 1
        number += 1
    print(f"seed {seed}: {total} calls in {number} histories, no difference")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    default = random.randrange(1 << 32)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("FUZZ_SEED", default)))
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("FUZZ_SECONDS", 180)))
    parser.add_argument("--paths", default=",".join(PATHS))
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside is not None:
        return inside(given.inside, given.seed, given.seconds, given.paths.split(","))
    if os.geteuid() != 0:
        print("the fuzzer needs root: it mounts, and makes its own namespace")
        return 2
    print(f"seed {given.seed}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="monarchfs-fuzz-"))
    words = ["--seed", str(given.seed), "--seconds", str(given.seconds), "--paths", given.paths]
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    alone += ["--propagation", "private", "--", sys.executable, "-m", "tests.fuzz"]
    try:
        return subprocess.run([*alone, "--inside", directory, *words], check=False).returncode
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())
