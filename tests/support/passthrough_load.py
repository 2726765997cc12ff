"""A process of the stress test: opens, reads, maps and closes files of a mount, and compares.

    python passthrough_load.py MOUNT ORIGINALS SECONDS SEED

ORIGINALS holds every version of each file, as NAME.VERSION. It goes on until it has opened so many
files, however busy the machine is. Prints what was wrong, as JSON.
"""

import json
import mmap
import os
import random
import sys
import time
from pathlib import Path

LEAST_OPENS = 200


def main() -> None:
    mount, originals = sys.argv[1], Path(sys.argv[2])
    end, chance = time.monotonic() + float(sys.argv[3]), random.Random(int(sys.argv[4]))
    names = sorted({path.name.rpartition(".")[0] for path in originals.iterdir()})
    versions = {
        name: [path.read_bytes() for path in sorted(originals.glob(f"{name}.*"))] for name in names
    }
    held: list[tuple[int, str]] = []
    mapped: list[tuple[mmap.mmap, str]] = []
    opens = 0
    wrong: list[str] = []
    while time.monotonic() < end or opens + len(wrong) < LEAST_OPENS:
        # Some files are everybody's, so that their opens meet.
        name = chance.choice(names[:3] if chance.random() < 0.5 else names)
        try:
            fd = os.open(f"{mount}/{name}", os.O_RDONLY)
            opens += 1
            size = max(map(len, versions[name])) + 1
            match chance.randrange(5):
                case 0 if os.fstat(fd).st_size:
                    try:
                        view = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
                    except ValueError:
                        view = None  # another version by now, a shorter one
                    if view is not None:
                        mapped.append((view, name))
                case 1:
                    held.append((fd, name))
                    fd = -1
                case 2:
                    at = chance.randrange(size)
                    data = os.pread(fd, 4096, at)
                    if not any(data == v[at : at + 4096] for v in versions[name]):
                        wrong.append(f"{name} at {at}: {len(data)} bytes")
                case _:
                    data = os.pread(fd, size, 0)
                    if data not in versions[name]:
                        wrong.append(f"{name}: {len(data)} bytes")
            if fd >= 0:
                os.close(fd)
            while len(held) > 6:
                fd, name = held.pop(chance.randrange(len(held)))
                data = os.pread(fd, max(map(len, versions[name])) + 1, 0)
                if data not in versions[name]:
                    wrong.append(f"{name}, held open: {len(data)} bytes")
                os.close(fd)
            while len(mapped) > 6:
                view, name = mapped.pop(chance.randrange(len(mapped)))
                if view[:] not in versions[name]:
                    wrong.append(f"{name}, mapped: {len(view)} bytes")
                view.close()
        except OSError as error:
            wrong.append(f"{name}: {error}")
    print(json.dumps(wrong[:20]))


if __name__ == "__main__":
    main()
