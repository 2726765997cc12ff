"""What sharing (--peers) comes to on many nodes: the project's own decision who owns a file, put to
thousands of nodes that do not exist.

Nothing is read here. What a few real nodes do, and how long it takes, `bench.nodes` measures.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report import Result
from bench.task import Task
from monarchfs.peers.nodes import PeerNode
from monarchfs.peers.ownership import BUCKETS, Ownership, bucket
from monarchfs.prefetch.spans import SPAN_BYTES

SIZES = (3, 8, 64, 256, 1024, 4096)
QUICK_SIZES = (3, 8, 64, 1024, 4096)
SMALL_FILES = 1_281_167
"""As in ImageNet."""
SMALL_BYTES = 110_000
LARGE_FILES = 8
LARGE_BYTES = 128 << 30
ROUNDS = 25
STALE = (0.01, 0.1, 0.5)
"""Shares of the nodes that know an older list."""


@dataclass(frozen=True)
class Dataset:
    """``of_bucket``: the bytes in each bucket of files."""

    name: str
    of_bucket: Sequence[int]

    @property
    def bytes(self) -> int:
        return sum(self.of_bucket)


def small_files(count: int, mean_bytes: int, seed: int) -> Dataset:
    """Files whose sizes vary by a factor of two or so."""
    rng = random.Random(seed)
    of_bucket = [0] * BUCKETS
    for _ in range(count):
        of_bucket[rng.getrandbits(16)] += int(rng.lognormvariate(0, 0.5) * mean_bytes)
    return Dataset("small files", of_bucket)


def large_files(count: int, size: int, seed: int) -> Dataset:
    """Files that are divided into spans."""
    rng = random.Random(seed)
    of_bucket = [0] * BUCKETS
    for _ in range(count):
        name = rng.randbytes(16)
        for start in range(0, size, SPAN_BYTES):
            of_bucket[bucket(name, start // SPAN_BYTES)] += min(SPAN_BYTES, size - start)
    return Dataset("large files", of_bucket)


def cluster(count: int, *, weighted: bool = False) -> list[PeerNode]:
    """Nodes; if ``weighted``, every second one has twice the room."""
    return [PeerNode(f"node{n:05d}", "", 1, 1.0 + (n % 2 if weighted else 0)) for n in range(count)]


def owned_bytes(ownership: Ownership, dataset: Dataset) -> list[int]:
    """Of each node."""
    owned = [0] * len(ownership.nodes)
    for owner, size in zip(ownership.table.cast("H"), dataset.of_bucket, strict=True):
        owned[owner] += size
    return owned


def imbalance(owned: Sequence[int], nodes: Sequence[PeerNode]) -> float:
    """The most that a node owns, over the mean, both relative to the nodes' weights."""
    mean = sum(owned) / sum(node.weight for node in nodes)
    return max(size / node.weight for size, node in zip(owned, nodes, strict=True)) / mean


def busiest(owned: Sequence[int], rounds: int, seed: int) -> float:
    """When each node waits for one random file: how many wait for the same owner, at the one that
    has the most of them; the median of ``rounds``."""
    rng = random.Random(seed)
    most = []
    for _ in range(rounds):
        waiting = [0] * len(owned)
        for owner in rng.choices(range(len(owned)), owned, k=len(owned)):
            waiting[owner] += 1
        most.append(max(waiting))
    return statistics.median(most)


@dataclass(frozen=True)
class Lost:
    """A node is lost when each node has read half of the dataset, in an order of its own. Bytes are
    relative to the dataset's."""

    moved: float
    """What has another owner then."""
    moved_besides: float
    """The part of it that the lost node did not own."""
    reread: float
    """What new owners read of the source, if all nodes have the new list at once."""
    reread_unlisted: float
    """What is read of it if no node is told: each reads what it lacks of that node's."""


def lose(before: Ownership, after: Ownership, gone: int, dataset: Dataset) -> Lost:
    """``after``: the owners without the node of the number ``gone``."""
    moved = besides = 0
    for old, new, size in zip(
        before.table.cast("H"), after.table.cast("H"), dataset.of_bucket, strict=True
    ):
        if before.nodes[old] is not after.nodes[new]:
            moved += size
            besides += size if old != gone else 0
    own = (moved - besides) / dataset.bytes
    # The new owner has half of it, as all nodes have.
    return Lost(moved / dataset.bytes, besides / dataset.bytes, own / 2, own * len(after.nodes) / 2)


def read_with_old_lists(
    old: Ownership, new: Ownership, stale: frozenset[int], dataset: Dataset
) -> float:
    """How much all nodes of the new list read of the source to have all of the dataset, relative to
    it, when those of the numbers ``stale`` know the old list. At most: no node learns from
    catalogues that somebody else has a file, and a node that asks the wrong one has all its files
    from the source."""
    place = {node.name: number for number, node in enumerate(new.nodes)}
    number_stale, number_fresh = len(stale), len(new.nodes) - len(stale)
    total = 0
    for a, b, size in zip(old.table.cast("H"), new.table.cast("H"), dataset.of_bucket, strict=True):
        here = place.get(old.nodes[a].name)  # None: it is not there any more
        if here == b:
            reads = 1
        else:
            reads = 1 if here in stale else number_stale
            reads += number_fresh if b in stale else 1
        total += reads * size
    return total / dataset.bytes


def report_balance(
    result: Result, nodes: Sequence[PeerNode], ownership: Ownership, datasets: Sequence[Dataset]
) -> None:
    arm = f"{len(nodes):,} nodes"
    for dataset in datasets:
        owned = owned_bytes(ownership, dataset)
        name = dataset.name
        result.figure(f"{name}: the most an owner has", imbalance(owned, nodes), "x mean", arm=arm)
        sent = max(owned) * (len(nodes) - 1) / dataset.bytes
        result.figure(f"{name}: the most an owner sends in epoch 1", sent, "x data", arm=arm)
        waiting = busiest(owned, ROUNDS, len(nodes))
        what = f"{name}: the most that wait for one owner, one reader a node"
        result.figure(what, waiting, "nodes", arm=arm)


def report_changes(
    result: Result, nodes: Sequence[PeerNode], ownership: Ownership, dataset: Dataset
) -> None:
    arm = f"{len(nodes):,} nodes"
    owned = owned_bytes(ownership, dataset)
    gone = owned.index(max(owned))
    after = Ownership([node for number, node in enumerate(nodes) if number != gone])
    lost = lose(ownership, after, gone, dataset)
    result.figure("the largest owner lost: has another owner", lost.moved, "x data", arm=arm)
    result.figure(
        *("the largest owner lost: of other nodes' files", lost.moved_besides, "x data"),
        at_most=0,
        arm=arm,
    )
    result.figure("the largest owner lost: read again", lost.reread, "x data", arm=arm)
    result.figure(
        *("the largest owner lost, no list changed: read again", lost.reread_unlisted, "x data"),
        arm=arm,
    )
    rng = random.Random(len(nodes))
    for share in STALE:
        count = max(1, round(share * len(after.nodes)))
        stale = frozenset(rng.sample(range(len(after.nodes)), count))
        read = read_with_old_lists(ownership, after, stale, dataset)
        what = f"{share:.0%} of the nodes still list the lost one: read in all"
        result.figure(what, read, "x data", arm=arm)


def run(task: Task) -> Result:
    result = Result(
        "scale",
        f"who owns {SMALL_FILES:,} files of {SMALL_BYTES / 1e6:g} MB, and {LARGE_FILES} of"
        f" {LARGE_BYTES >> 30} GiB in spans of {SPAN_BYTES >> 20} MiB: simulated",
    )
    task.say("datasets")
    datasets = [
        small_files(SMALL_FILES, SMALL_BYTES, 1),
        large_files(LARGE_FILES, LARGE_BYTES, 2),
    ]
    for count in QUICK_SIZES if task.quick else SIZES:
        task.say(f"{count:,} nodes")
        nodes = cluster(count)
        began = time.process_time()
        ownership = Ownership(nodes)
        seconds = time.process_time() - began
        result.figure("to compute all owners", seconds, "s", arm=f"{count:,} nodes")
        report_balance(result, nodes, ownership, datasets)
        uneven = cluster(count, weighted=True)
        owned = owned_bytes(Ownership(uneven), datasets[0])
        result.figure(
            *("small files, room of 1 and 2: the most an owner has", imbalance(owned, uneven)),
            "x mean",
            arm=f"{count:,} nodes",
        )
        report_changes(result, nodes, ownership, datasets[0])
    result.notes = [
        "mean: what an owner would have if all had the same, in proportion to their room",
        "the node is lost when each has read half; the others' copies serve those who ask then",
        "old lists: an upper bound, without the catalogues that also lead to a file",
    ]
    return result
