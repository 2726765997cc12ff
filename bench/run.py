"""``make bench``: the measurements of this release, the shorter ones or those named.

    python -m bench.run [epochs] [hdf5] [frozen] [names] [mirror] [capacity] [--output DIR]
    python -m bench.run datapath | kill | million | restarts

Each takes a few minutes at most and up to 6 GiB below --temp, and leaves nothing but its results;
those of the second line take up to half an hour, or much memory, and run only by name.
Every speed is compared with the same work done in the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from bench.harness import REPOSITORY, Unusable, check_fuse, workplace
from bench.report import Result, print_result, save

MEASUREMENTS = {
    "epochs": "bench.epochs",
    "hdf5": "bench.records",
    "frozen": "bench.frozen",
    "datapath": "bench.datapath",
    "names": "bench.names",
    "mirror": "bench.mirror",
    "capacity": "bench.capacity",
    "kill": "bench.kill",
    "million": "bench.million",
    "restarts": "bench.restarts",
}
LONG = {"datapath", "kill", "million", "restarts"}


def measure(name: str, temp: str | None) -> Result:
    """Runs one measurement in a directory of its own."""
    try:
        run: Callable[[Path], Result] = import_module(MEASUREMENTS[name]).run
    except ImportError as missing:
        raise Unusable(f"{missing.name} is not installed: run make setup") from None
    started = time.perf_counter()
    with workplace(f"bench-{name}", temp) as place:
        result = run(place)
    result.seconds = time.perf_counter() - started
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.run", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    parser.add_argument("--temp", help="where data and replicas lie (default: $TMPDIR)")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(MEASUREMENTS)
    if unknown:
        parser.error(f"no measurement {', '.join(unknown)}: there are {', '.join(MEASUREMENTS)}")
    results: list[Result] = []
    try:
        check_fuse()
        for name in arguments.names or [name for name in MEASUREMENTS if name not in LONG]:
            print(f"{name} ...", flush=True)
            results.append(measure(name, arguments.temp))
            print_result(results[-1])
    except Unusable as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench: interrupted; everything is unmounted and removed", file=sys.stderr)
        return 130
    print(f"\n{save(results, arguments.output)}")
    return int(any(row.holds is False for result in results for row in result.rows))


if __name__ == "__main__":
    sys.exit(main())
