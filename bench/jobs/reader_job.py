"""A training job without a framework: threads that read shards of records ahead of the trainer."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator

from bench.jobs.training import Batch, batch_of, interleaved, parser, shards, shuffled, train


def main() -> None:
    arguments = parser().parse_args()
    paths = shards(arguments.data)

    def epoch(number: int) -> Iterator[Batch]:
        rng = random.Random(number)
        order = rng.sample(paths, len(paths))
        read: queue.Queue[Batch | BaseException | None] = queue.Queue(arguments.ahead)

        def reader(place: int) -> None:
            try:
                mine = order[place :: arguments.readers]
                width = max(1, arguments.open_shards // arguments.readers)
                room = max(1, arguments.shuffle // arguments.readers)
                held: list[bytes] = []
                for record in shuffled(interleaved(mine, width), room, random.Random(place)):
                    held.append(record)
                    if len(held) == arguments.batch:
                        read.put(batch_of(held))
                        held = []
                if held:
                    read.put(batch_of(held))
            except BaseException as error:  # noqa: BLE001 - raised again in the trainer's thread
                read.put(error)
            else:
                read.put(None)

        readers = [
            threading.Thread(target=reader, args=(place,), daemon=True)
            for place in range(arguments.readers)
        ]
        for thread in readers:
            thread.start()
        ended = 0
        while ended < len(readers):
            batch = read.get()
            if batch is None:
                ended += 1
            elif isinstance(batch, BaseException):
                raise batch
            else:
                yield batch

    train(arguments.compute, epoch)


if __name__ == "__main__":
    main()
