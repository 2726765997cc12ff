"""The eviction policies: against a plain model, and against an independent implementation."""

from __future__ import annotations

import importlib
import random
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarchfs.placement import policies
from monarchfs.placement.policies import Keep, Lru, Policy, Sieve, make_policy
from monarchfs.placement.weighted import Weighted
from monarchfs.types import EvictionPolicy

Trace = list[int]


def zipf(rng: random.Random, files: int, length: int, exponent: float) -> Trace:
    weights = [1 / rank**exponent for rank in range(1, files + 1)]
    names = rng.sample(range(100, 100 + 7 * files), files)
    return rng.choices(names, weights, k=length)


def loop(files: int, passes: int) -> Trace:
    return [ino for _ in range(passes) for ino in range(files)]


def epochs(rng: random.Random, files: int, passes: int) -> Trace:
    return [ino for _ in range(passes) for ino in rng.sample(range(files), files)]


def scans(rng: random.Random, files: int, length: int) -> Trace:
    """Popular files, with now and then a run through files that are read once."""
    trace: Trace = []
    popular = zipf(rng, files, length, 1.0)
    once = 1_000_000
    for at in range(0, length, 200):
        trace += popular[at : at + 200]
        trace += range(once, once + 150)
        once += 150
    return trace


def traces() -> dict[str, tuple[Trace, int]]:
    """Traces, each with the number of files that the cache holds."""
    rng = random.Random(20240611)
    return {
        "zipf": (zipf(rng, 2_000, 20_000, 1.0), 200),
        "flat-zipf": (zipf(rng, 3_000, 20_000, 0.6), 700),
        "loop-that-fits-not": (loop(300, 30), 200),
        "loop-that-fits": (loop(300, 10), 300),
        "epochs": (epochs(rng, 1_000, 15), 500),
        "scans": (scans(rng, 500, 20_000), 150),
        "one": (zipf(rng, 20, 1_000, 1.0), 1),
        "two": (zipf(rng, 20, 1_000, 1.0), 2),
    }


TRACES = traces()


def replay(policy: Policy, trace: Trace, capacity: int) -> list[bool]:
    """Which requests found their file, in a cache of ``capacity`` files of one size."""
    held: set[int] = set()
    hits = []
    for ino in trace:
        hits.append(ino in held)
        if ino in held:
            policy.accessed(0, ino)
            continue
        if len(held) == capacity:
            victim = next(policy.victims(0))
            held.remove(victim)
            policy.removed(0, victim)
        held.add(ino)
        policy.added(0, ino)
    return hits


def model_lru(trace: Trace, capacity: int) -> list[bool]:
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for ino in trace:
        hits.append(ino in held)
        if ino in held:
            held.move_to_end(ino)
        else:
            if len(held) == capacity:
                held.popitem(last=False)
            held[ino] = None
    return hits


def model_sieve(trace: Trace, capacity: int) -> list[bool]:
    """A list, oldest first, of [inode, visited], and the index at which the hand is."""
    queue: list[list[int]] = []
    hand = 0
    hits = []
    for ino in trace:
        entry = next((entry for entry in queue if entry[0] == ino), None)
        hits.append(entry is not None)
        if entry is not None:
            entry[1] = 1
            continue
        if len(queue) == capacity:
            if hand == len(queue):
                hand = 0
            while queue[hand][1]:
                queue[hand][1] = 0
                hand = (hand + 1) % len(queue)
            # Past the newest it starts over, also if something newer arrives meanwhile.
            last = hand == len(queue) - 1
            del queue[hand]
            if last:
                hand = 0
        queue.append([ino, 0])
    return hits


MODELS: list[tuple[Callable[[], Policy], Callable[[Trace, int], list[bool]]]] = [
    (Lru, model_lru),
    (Sieve, model_sieve),
]


@pytest.mark.parametrize("trace", ["zipf", "scans", "two"])
@pytest.mark.parametrize(("policy", "model"), MODELS)
def test_a_policy_agrees_with_its_model(
    policy: Callable[[], Policy], model: Callable[[Trace, int], list[bool]], trace: str
) -> None:
    requests, capacity = TRACES[trace]
    assert replay(policy(), requests, capacity) == model(requests, capacity)


@given(st.lists(st.integers(0, 12), max_size=200), st.integers(1, 8))
@settings(max_examples=300, deadline=None)
def test_a_policy_agrees_with_its_model_on_anything(trace: Trace, capacity: int) -> None:
    for policy, model in MODELS:
        assert replay(policy(), trace, capacity) == model(trace, capacity)


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("name", ["LRU", "Sieve"])
def test_a_policy_misses_as_often_as_an_independent_implementation(name: str, trace: str) -> None:
    try:
        libcachesim = importlib.import_module("libcachesim")
    except ImportError as error:  # also where a library of its own is missing
        pytest.skip(f"needs libcachesim ({error}): make setup, Python 3.11, libglib2.0-0")
    requests, capacity = TRACES[trace]
    cache = getattr(libcachesim, name)(capacity)
    request = libcachesim.Request()
    request.obj_size = 1
    misses = 0
    for ino in requests:
        request.obj_id = ino
        misses += not cache.get(request)
    ours = replay(make_policy(EvictionPolicy[name.upper()]), requests, capacity)
    assert ours.count(False) == misses


def test_sieve_keeps_popular_files_through_scans_better_than_lru() -> None:
    requests, capacity = TRACES["scans"]
    lru, sieve = (replay(policy(), requests, capacity).count(True) for policy in (Lru, Sieve))
    assert sieve > lru


def names(policy: Policy, tier: int = 0) -> list[int]:
    return list(policy.victims(tier))


def test_keep_wants_to_hear_of_nothing_and_names_nobody() -> None:
    policy = make_policy(EvictionPolicy.KEEP)
    assert isinstance(policy, Keep)
    assert not policy.tracks
    policy.added(0, 20)
    assert names(policy) == []


@pytest.mark.parametrize("policy", [Lru(), Sieve()], ids=["lru", "sieve"])
def test_a_spared_replica_is_not_looked_at_again_at_once(policy: Policy) -> None:
    for ino in range(20, 24):
        policy.added(0, ino)
    victims = policy.victims(0)
    assert [next(victims), next(victims)] == [20, 21]
    policy.removed(0, 21)
    # 20 was spared.
    assert names(policy) == [22, 23, 20]


@pytest.mark.parametrize("policy", [Lru(), Sieve()], ids=["lru", "sieve"])
def test_what_is_told_twice_or_late_does_no_harm(policy: Policy) -> None:
    policy.removed(0, 20)
    policy.moved(20, 0, 1)
    policy.removed(1, 20)
    policy.accessed(0, 21)
    policy.added(0, 21)
    policy.known(0, 21)
    policy.known(0, 22)
    policy.known(0, 23)
    policy.removed(0, 99)
    # What an earlier mount left is colder than what was opened.
    assert names(policy) == [23, 22, 21]


def test_lru_knows_when_a_replica_was_accessed_and_forgets_it_in_no_move() -> None:
    policy = Lru()
    policy.known(0, 20)
    policy.added(0, 21)
    policy.accessed(0, 22)
    first, second, third = (policy.last_access(0, ino) for ino in (20, 21, 22))
    assert 0 == first < second < third
    policy.moved(21, 0, 1)
    assert policy.last_access(1, 21) == second
    assert policy.last_access(0, 21) == 0
    policy.accessed(0, 20)
    assert policy.last_access(0, 20) > third


def test_sieve_does_not_pass_over_more_than_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policies, "VISITED_STEPS", 5)
    policy = Sieve()
    for ino in range(20, 40):
        policy.added(0, ino)
        policy.accessed(0, ino)
    # 20 to 24 lost their marks.
    assert next(policy.victims(0)) == 25
    assert sorted(names(policy)) == [*range(20, 40)]


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["added", "known", "accessed", "removed", "moved", "victims"]),
        st.integers(0, 1),
        st.integers(-70, 200),
        st.lists(st.booleans(), max_size=5),
    ),
    max_size=60,
)


@given(OPERATIONS)
@settings(max_examples=300, deadline=None)
def test_nothing_is_lost_or_invented_whatever_is_told(
    operations: list[tuple[str, int, int, list[bool]]],
) -> None:
    for policy in (Lru(), Sieve(), Weighted()):
        held: dict[int, set[int]] = {0: set(), 1: set()}
        for operation, tier, ino, takes in operations:
            match operation:
                case "moved":
                    policy.moved(ino, tier, 1 - tier)
                    held[tier].discard(ino)
                    held[1 - tier].add(ino)
                case "removed":
                    policy.removed(tier, ino)
                    held[tier].discard(ino)
                case "victims":
                    offered: list[int] = []
                    for victim, take in zip(policy.victims(tier), takes, strict=False):
                        assert victim in held[tier]
                        assert victim not in offered
                        offered.append(victim)
                        if take:
                            policy.removed(tier, victim)
                            held[tier].discard(victim)
                        else:
                            policy.spared(tier, victim)
                case _:
                    getattr(policy, operation)(tier, ino)
                    held[tier].add(ino)
        for tier in (0, 1):
            found = names(policy, tier)
            assert sorted(found) == sorted(held[tier])


def _containers(queue: policies._Queue) -> Iterator[object]:
    yield from vars(queue).values()
    yield queue._slots.pages
    yield from queue._slots.pages.values()


@pytest.mark.parametrize(("policy", "most_bytes"), [(Lru(), 45), (Sieve(), 35)])
def test_a_tracked_replica_costs_a_few_bytes(policy: Lru | Sieve, most_bytes: int) -> None:
    count = 20_000
    for ino in range(1000, 1000 + count):
        policy.added(0, ino)
    queue = policy._tiers[0]
    kept = [item for item in _containers(queue) if isinstance(item, array | bytearray | dict)]
    assert sum(map(sys.getsizeof, kept)) < most_bytes * count
    # Slots are used again.
    for ino in range(1000, 1000 + count):
        policy.removed(0, ino)
        policy.added(0, ino + count)
    assert len(queue.inos) == count + 1
